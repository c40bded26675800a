#include "engine/planning/bench.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <map>
#include <numeric>
#include <tuple>
#include <unordered_map>

#include <unistd.h>

#include "core/memory/host_memory.h"
#include "core/philox.h"
#include "engine/files/file_io.h"
#include "engine/planning/memory_advice.h"
#include "engine/training/training_run.h"
#include "kernels/device/gemm_tuning.h"
#include "kernels/device/measuring_time.h"

namespace parka {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// cuDNN's attention reaches these FLOP/s on an H200 (docs/results) at 2048 and 8192 tokens: the floor of ours.
constexpr double kAttentionForward[] = {484e12, 596e12}, kAttentionBackward[] = {365e12, 474e12};

double attention_floor(const OpSummary& op, const std::string& device, int64_t sequence_length) {
  if (!device.starts_with("NVIDIA H200")) return 0;
  const double where = std::clamp(std::log2(static_cast<double>(sequence_length) / 2048.0) / 2.0, 0.0, 1.0);
  const auto& rates = op.cost.products == Products::kAttentionForward ? kAttentionForward : kAttentionBackward;
  return op.cost.flop / (rates[0] + where * (rates[1] - rates[0]));
}

void add_floors(Device& device, const Config& config, BenchResult& result) {
  std::unordered_map<std::string, double> gemm_seconds;
  if (device.kind() == DeviceKind::kCuda) {
    for (const GemmChoice& choice : tune_gemms(device, {.max_candidates = 8,
                                                       .warm_seconds = 0.2,
                                                       .settle_seconds = 0.03,
                                                       .measured_seconds = 0.03,
                                                       .rounds = 1})) {
      gemm_seconds[choice.shape] = 1e-6 * choice.microseconds;
    }
  }
  for (OpSummary& op : result.ops) {
    double floor = op.cost.bytes / result.copy_bandwidth;
    if (op.cost.products == Products::kGemm) {
      // A product in an op that cuBLASLt does not run can be measured against nothing but itself.
      floor = op.op == "gemm" ? gemm_seconds[op.cost.shape] : op.seconds / static_cast<double>(op.count);
    } else if (op.cost.products != Products::kNone) {
      floor = attention_floor(op, result.device, config.data.sequence_length);
    }
    op.floor_seconds = static_cast<double>(op.count) * floor;
  }
}

std::vector<OpSummary> summarize(const std::vector<OpTime>& times) {
  std::map<std::tuple<StepSection, std::string, std::string>, OpSummary> by_kind;
  for (const OpTime& time : times) {
    OpSummary& summary = by_kind[{time.section, time.op, time.cost.shape}];
    summary.section = time.section;
    summary.op = time.op;
    // Calls of one shape may differ in what they write: the cost becomes that of an average one.
    summary.cost.bytes += time.cost.bytes;
    summary.cost.flop += time.cost.flop;
    summary.cost.shape = time.cost.shape;
    summary.cost.products = time.cost.products;
    summary.seconds += time.seconds;
    ++summary.count;
  }
  std::vector<OpSummary> summaries;
  summaries.reserve(by_kind.size());
  for (auto& [kind, summary] : by_kind) {
    summary.cost.bytes /= static_cast<double>(summary.count);
    summary.cost.flop /= static_cast<double>(summary.count);
    summaries.push_back(std::move(summary));
  }
  std::ranges::sort(summaries, [](const OpSummary& a, const OpSummary& b) { return a.seconds > b.seconds; });
  return summaries;
}

constexpr int64_t kSteps = 2;  // worth of tokens; more steps are further epochs

template <typename T>
std::vector<T> tokens(int64_t count, int64_t vocab_size, int64_t image_token) {
  std::vector<T> ids(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    const double u = uniform_open(philox4x32(1, 2, static_cast<uint64_t>(i))[0]);
    ids[i] = static_cast<T>(std::pow(static_cast<double>(vocab_size), u) - 1.0);
    if (ids[i] == image_token) ids[i] = static_cast<T>(image_token == 0 ? 1 : 0);  // images are blank, in no place
  }
  return ids;
}

template <typename T>
void write_tokens(const std::string& path, int64_t count, const ModelConfig& model) {
  const std::vector<T> ids = tokens<T>(count, model.vocab_size, model.vision.image_token);
  OutputFile file(path);
  file.write(std::as_bytes(std::span(ids)));
  file.close();
}

}  // namespace

double BenchResult::median_step_seconds() const {
  std::vector<double> sorted = step_seconds;
  std::ranges::sort(sorted);
  return sorted[sorted.size() / 2];
}

double BenchResult::own_op_seconds() const {
  return std::accumulate(ops.begin(), ops.end(), 0.0,
                         [](double sum, const OpSummary& op) { return sum + op.seconds; });
}

double BenchResult::floor_seconds() const {
  return std::accumulate(ops.begin(), ops.end(), 0.0,
                         [](double sum, const OpSummary& op) { return sum + op.floor_seconds; });
}

BenchResult run_benchmark(const Config& given, Device& device, Communicator& communicator, int64_t steps,
                          bool roofline) {
  std::optional<SyntheticTokens> data(given);
  const Config config = data->apply(given);
  BenchResult result;
  result.device = device.name();
  result.ranks = communicator.size();
  result.documents = config.data.documents;
  result.copy_bandwidth = measure_copy_bandwidth(device);
  TrainingRun run(config, device, communicator);
  data.reset();  // the file stays open, and a signal leaves none after
  run.initialize_alike();
  result.speed = speed_of(config, run.model().parameters(), device.name());
  result.tokens_per_step = run.tokens_per_step();
  result.sequences_per_step = config.training.global_batch_size;
  result.images_per_sequence = config.data.images_per_sequence;
  result.blocks_per_step = config.model.num_layers * config.micro_batches_per_step(communicator.size());
  result.planned_bytes = run.plan().total_bytes();
  if (device.kind() == DeviceKind::kCuda) {
    result.context_bytes = context_bytes(communicator.size()) + group_bytes(config, communicator.size());
  }

  constexpr int64_t kWarmups = 2;
  const auto add = [&](const std::optional<StepReport>& report) {
    if (report && report->step > kWarmups) result.step_seconds.push_back(report->seconds);
  };
  run.step();
  run.finish();  // libraries have set themselves up; now the host's own time can be seen
  const Clock::time_point start = Clock::now();
  std::optional<StepReport> report = run.step();
  result.queue_seconds = seconds_since(start);
  for (int64_t i = 0; i < steps; ++i) add(run.step());
  add(run.finish());

  device.start_op_timer();
  report = run.step();
  if (!report) report = run.finish();
  result.timed_step_seconds = report->seconds;
  result.ops = summarize(device.stop_op_timer());
  const auto first_wait = std::stable_partition(result.ops.begin(), result.ops.end(),
                                                [](const OpSummary& op) { return op.op != kWaitOp; });
  result.waits.assign(first_wait, result.ops.end());
  result.ops.erase(first_wait, result.ops.end());
  for (const std::string& of_rank : communicator.gather_text(fmt::format("{}", result.own_op_seconds()))) {
    result.op_seconds.push_back(std::stod(of_rank));
  }
  const Device::MemoryUse use = device.memory_use();
  result.used_bytes = static_cast<int64_t>(communicator.max(static_cast<double>(use.total_bytes - use.free_bytes)));
  result.planned_host_bytes = run.plan().total_host_bytes() + run.model().host_bytes(run.plan());
  result.resident_host_bytes = static_cast<int64_t>(communicator.max(static_cast<double>(peak_resident_bytes())));
  if (roofline) add_floors(device, config, result);
  return result;
}

SyntheticTokens::SyntheticTokens(const Config& config)
    : path_((std::filesystem::temp_directory_path() / fmt::format("parka_bench_{}.npy", getpid())).string()),
      type_(config.model.vocab_size <= 65536 ? TokenType::kUint16 : TokenType::kUint32) {
  const int64_t count = kSteps * config.training.global_batch_size * config.data.sequence_length;
  if (type_ == TokenType::kUint16) {
    write_tokens<uint16_t>(path_, count, config.model);
  } else {
    write_tokens<uint32_t>(path_, count, config.model);
  }
}

SyntheticTokens::~SyntheticTokens() {
  std::error_code ignored;
  std::filesystem::remove(path_, ignored);
}

Config SyntheticTokens::apply(Config config) const {
  config.data.train = {path_};
  config.data.eval = {};
  config.data.weights = {};
  config.data.token_dtype = type_;
  config.data.loss_mask = false;
  if (!config.data.document_ids().any())
    config.data.documents = DocumentMode::kJoined;  // nothing else marks documents
  config.data.checksum = false;
  config.checkpoint.interval = 0;
  return config;
}

}  // namespace parka
