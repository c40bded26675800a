#include "engine/training/run_log.h"

#include <algorithm>
#include <functional>
#include <map>
#include <numeric>
#include <regex>
#include <string>
#include <utility>
#include <vector>

#include <fmt/ranges.h>

#include "core/error.h"
#include "core/log/log.h"
#include "core/memory/host_memory.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/checkpoint/checkpoint_layout.h"
#include "engine/files/file_io.h"
#include "engine/huggingface/huggingface_families.h"
#include "engine/training/progress.h"

namespace parka {
namespace {

// In the units of `parka plan`: GB are 10^9 bytes.
std::string memory_text(int64_t bytes) {
  const double gb = 1e-9 * static_cast<double>(bytes);
  return gb < 0.1 ? fmt::format("{:.1f} MB", 1e3 * gb) : fmt::format("{:.2f} GB", gb);
}

// "blocks.*.qkv" of "blocks.3.qkv".
std::string in_all_blocks(const std::string& name) {
  static const std::regex number(R"(\.[0-9]+\.)");
  return std::regex_replace(name, number, ".*.");
}

// The tensors that each rule updates: one line for all of one kind.
void log_updates(const OptimizerConfig& config, const std::vector<ParameterInfo>& parameters) {
  std::map<std::string, int64_t> tensors;
  std::vector<std::pair<std::string, const ParameterInfo*>> kinds;
  for (const ParameterInfo& p : parameters) {
    if (!p.trainable) continue;
    const std::string name = in_all_blocks(p.name);
    if (tensors[name]++ == 0) kinds.emplace_back(name, &p);
  }
  for (const auto& [name, p] : kinds) {
    const bool is_muon = rule_of(config, *p) == UpdateRule::kMuon;
    const std::vector<int64_t>& rows = p->fused_rows;
    const bool are_alike = std::ranges::adjacent_find(rows, std::not_equal_to()) == rows.end();
    const std::string apart = rows.empty() ? ""
                              : are_alike  ? fmt::format(", {} matrices of {} rows apart", rows.size(), rows[0])
                                           : fmt::format(", matrices of {} rows apart", fmt::join(rows, ", "));
    log_info("  {} {:<24} {} x [{}, {}]{}", is_muon ? "muon " : "adamw", name, tensors[name], p->rows, p->cols,
             apart);
  }
}

constexpr int64_t kLeastShown = 50'000;  // bytes: what is less would be 0.0 MB

std::string describe_bad_step(const StepReport& report, const Config& config) {
  return fmt::format(
      "step {}: loss {} and gradient norm {} are not both finite{}; batch: epoch {}, sequences {} to {} of its order",
      report.step, report.loss, report.grad_norm,
      report.culprit.empty() ? "" : fmt::format(" (first bad gradient: {})", report.culprit), report.data.epoch,
      report.data.consumed, report.data.consumed + config.training.global_batch_size - 1);
}

}  // namespace

void log_model(const TrainingRun& run, const ModelSpeed& speed) {
  const ParameterTable& table = run.model().parameters();
  log_info("model: {}, {} FLOP/token", parameters_text(table), format_count(speed.flop_per_token));
  if (speed.peak_flops > 0) {
    log_info("MFU is relative to a dense peak of {:.0f} TFLOP/s of each GPU", 1e-12 * speed.peak_flops);
  }
  if (run.optimizer().config().kind != OptimizerKind::kAdamw) {
    log_info("update of each tensor:");
    log_updates(run.optimizer().config(), table.all);
  }
  std::string parts;
  for (const auto& total : run.plan().summary()) {
    if (total.bytes < kLeastShown) continue;
    parts += fmt::format("{}{} {}", parts.empty() ? ": " : ", ", total.category, memory_text(total.bytes));
  }
  log_info("memory plan: {}{}", memory_text(run.plan().total_bytes()), parts);
  for (const auto& total : run.plan().host_summary()) {
    log_info("in host memory: {} {}", total.category, memory_text(total.bytes));
  }
}

void log_data(const TokenFiles& data, const Config& config) {
  const std::vector<double>& weights = config.data.weights;
  const int64_t batch = config.training.global_batch_size;
  std::string tokens =
      fmt::format("data: {} tokens in {} sequences of {}", format_count(static_cast<double>(data.num_tokens())),
                  data.num_sequences(), config.data.sequence_length);
  if (data.rules().loss_mask || data.rules().separate_documents) {
    const TokenFiles::Estimate few = data.estimate();
    if (data.rules().loss_mask) tokens += fmt::format(", about {:.0f} % of the tokens targets", 100 * few.targets);
    if (few.document_length > 0) tokens += fmt::format(", in documents of about {:.0f}", few.document_length);
  }
  if (weights.empty()) {
    log_info("{}; {} steps per epoch", tokens, data.num_sequences() / batch);
    return;
  }
  log_info("{}, from {} sources by weight", tokens, weights.size());
  const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
  for (size_t i = 0; i < weights.size(); ++i) {
    const double share = weights[i] / sum, sequences = static_cast<double>(data.source_sequences()[i]);
    log_info("  {:.3f} %: {}, {} sequences; {:.0f} steps per epoch", 100 * share, config.data.train[i],
             data.source_sequences()[i], sequences / (share * static_cast<double>(batch)));
  }
}

void log_removals(const CheckpointConfig& config) {
  const auto found = static_cast<int64_t>(list_checkpoints(config.folder).size());
  // One more is what a stop between a save and the step behind it leaves.
  if (config.keep == 0 || found <= config.keep + 1) return;
  log_warning(
      "checkpoint.keep = {}: the older ones of the {} checkpoints in {} will be removed; move away what is to stay, "
      "or set checkpoint.keep=0",
      config.keep, found, config.folder);
}

// A model whose steps are not finite so often has diverged.
constexpr int64_t kMostSkippedSteps = 10;

bool ends_run(const Config& config, int64_t skipped_in_a_row) {
  return config.optimizer.release_gradients || config.training.non_finite == NonFinitePolicy::kStop ||
         skipped_in_a_row >= kMostSkippedSteps;
}

void throw_bad_step(const StepReport& report, const Config& config, int64_t skipped_in_a_row,
                    std::optional<int64_t> saved_step) {
  const std::string what = describe_bad_step(report, config);
  const std::string saved = saved_step ? fmt::format("; step {} is saved", *saved_step) : "";
  if (config.optimizer.release_gradients) {
    throw Error(ExitCode::kNonFinite,
                what +
                    "; parts of the weights were updated (optimizer.release_gradients), and are not saved: the "
                    "same command goes on from the last checkpoint");
  }
  if (config.training.non_finite == NonFinitePolicy::kStop) {
    throw Error(ExitCode::kNonFinite, what + "; the weights were not changed" + saved +
                                          "; set training.non_finite=skip to skip such steps");
  }
  throw Error(ExitCode::kNonFinite,
              what + fmt::format("; {} steps in a row were skipped", skipped_in_a_row) + saved);
}

void log_skipped_step(const StepReport& report, const Config& config) {
  if (!report.is_finite()) {
    log_warning("{}; skipped", describe_bad_step(report, config));
    return;
  }
  log_warning(
      "step {}: loss {:.4f} (limit {:.4f}) or gradient norm {:.4g} (limit {:.4g}) is a spike: skipped "
      "(training.spike_window)",
      report.step, report.loss, report.limits.loss, report.grad_norm, report.limits.grad_norm);
}

void log_memory(const TrainingRun& run, const Device& device) {
  const int64_t planned = run.plan().total_bytes(), on_host = run.plan().total_host_bytes();
  const std::string resident = memory_text(peak_resident_bytes());
  if (device.kind() == DeviceKind::kCpu) {
    log_info("peak memory {} resident, {} of it planned", resident, memory_text(planned + on_host));
    return;
  }
  // Nothing is allocated after the start, so what is in use now is the peak.
  const Device::MemoryUse use = device.memory_use();
  log_info("GPU memory {} planned; {} in use on the device, its context and libraries included",
           memory_text(planned), memory_text(use.total_bytes - use.free_bytes));
  if (on_host > 0) {
    log_info("host memory {} planned for tensors; {} resident in all", memory_text(on_host), resident);
  }
}

void log_end(const Config& config, int64_t step, int64_t newest_step) {
  const std::string& folder = config.checkpoint.folder;
  const std::string word = shell_word(folder);
  if (newest_step != step) {
    log_info("step {} was the last; it is not saved, as checkpoint.save_final is false{}", step, warnings_above());
    return;
  }
  const bool is_side = config.finetune.method == FinetuneMethod::kQst;
  const std::string exported = is_side ? fmt::format("parka export {} --adapter --out FOLDER", word)
                               : has_family(config.model)
                                   ? fmt::format("parka export {} --out FOLDER for Hugging Face", word)
                                   : "parka compare with another run";
  log_info(
      "step {} was the last; the model is in {}; next: parka eval {}, parka generate {} --prompt TEXT, or {}{}",
      step, step_folder_path(folder, step), word, word, exported, warnings_above());
}

}  // namespace parka
