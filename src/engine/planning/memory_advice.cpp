#include "engine/planning/memory_advice.h"

#include <limits>
#include <string_view>

#include <fmt/format.h>

#include "core/error.h"
#include "engine/config/config_io.h"
#include "engine/planning/gpu_plan.h"
#include "model/activation_offload.h"

namespace parka {
namespace {

using nlohmann::json;
using Change = MemoryAdvice::Change;

constexpr int64_t kNever = std::numeric_limits<int64_t>::max();

std::string_view key_of(const Change& change) {
  return std::string_view(change.override).substr(0, change.override.find('='));
}

// From the cheapest to the dearest (docs/troubleshooting.md). Of changes of one key the later replaces the earlier.
std::vector<Change> possible_changes(const Config& config, int64_t num_gpus) {
  std::vector<Change> changes;
  const auto add = [&](std::string override, std::string cost) {
    changes.push_back({std::move(override), std::move(cost)});
  };
  if (config.optimizer.master == MasterForm::kFp32) add("optimizer.master=fp32_split", "the same bits, no cost");
  add("precision.save_product=false", "the same bits, a little recomputation");
  add("precision.save_norm_output=false", "the same bits, a little recomputation");
  add("precision.weight_copies=rows", "the same bits, weights are transposed in every micro-batch");
  add("precision.weight_copies=none", "the same bits, weights are quantized in every micro-batch");
  for (int64_t stage = config.distributed.zero_stage + 1; num_gpus > 1 && stage <= 3; ++stage) {
    add(fmt::format("distributed.zero_stage={}", stage), "communication between GPUs");
  }
  // Not more than half the blocks: copies have to keep up with forward (docs/results/memory.md).
  const auto add_offload = [&](int64_t part) {
    const int64_t blocks = (config.model.num_layers - ActivationOffload::kBuffers) / part;
    if (blocks <= config.precision.offload_blocks) return;
    add(fmt::format("precision.offload_blocks={}", blocks), "the same bits, copied to CPU memory and back");
  };
  add_offload(4);
  add("optimizer.gradient=bf16", "gradients are summed in bf16");
  add_offload(2);
  for (int64_t micro = config.training.micro_batch_size / 2; micro >= 1; micro /= 2) {
    if (config.training.global_batch_size % micro != 0) continue;
    add(fmt::format("training.micro_batch_size={}", micro), "smaller matrix products");
  }
  add("precision.recompute=block", "the same bits, about a third more work");
  if (config.precision.recipe != Recipe::kParka) add("precision.recipe=parka", "FP8, with its effect on the loss");
  if (config.precision.compute != DType::kF32) {
    add("optimizer.master=bf16_sr", "stochastic rounding instead of an exact master");
  }
  return changes;
}

// Some of the possible changes: of each key at most one.
class ChosenChanges {
 public:
  ChosenChanges(const json& config, std::vector<Change> possible, int64_t num_gpus)
      : config_(config), possible_(std::move(possible)), chosen_(possible_.size(), false), num_gpus_(num_gpus) {}

  // Sum of the plan with them; kNever where they contradict each other or the config.
  int64_t planned() const {
    try {
      return planned_bytes(override_config(config_, advice().overrides(), "config"), num_gpus_);
    } catch (const Error&) {
      return kNever;
    }
  }

  // Adds changes until they fit; false where all are not enough. Leaves out what contradicts those before it.
  bool add_until(int64_t limit_bytes) {
    if (planned() <= limit_bytes) return true;
    if (!can_fit(limit_bytes)) return false;
    for (size_t i = 0; i < possible_.size(); ++i) {
      const std::vector<bool> before = chosen_;
      choose(i);
      const int64_t bytes = planned();
      if (bytes == kNever) chosen_ = before;
      if (bytes <= limit_bytes) return true;
    }
    return false;
  }

  // Takes changes back, or replaces them by cheaper ones of the same key, while the rest fits.
  void prune(int64_t limit_bytes) {
    for (bool changed = true; changed;) {
      changed = false;
      for (size_t i = possible_.size(); i-- > 0;) changed = (chosen_[i] && make_cheaper(i, limit_bytes)) || changed;
    }
  }

  MemoryAdvice advice() const {
    MemoryAdvice result{.changes = {}, .num_gpus = num_gpus_};
    for (size_t i = 0; i < possible_.size(); ++i) {
      if (chosen_[i]) result.changes.push_back(possible_[i]);
    }
    return result;
  }

 private:
  // False where all changes together, which do not contradict each other, are not enough: soon said.
  bool can_fit(int64_t limit_bytes) {
    const std::vector<bool> before = chosen_;
    for (size_t i = 0; i < possible_.size(); ++i) choose(i);
    const int64_t bytes = planned();
    chosen_ = before;
    return bytes <= limit_bytes || bytes == kNever;
  }

  bool same_key(size_t i, size_t j) const { return key_of(possible_[i]) == key_of(possible_[j]); }

  void choose(size_t i) {
    for (size_t j = 0; j < possible_.size(); ++j) {
      if (same_key(i, j)) chosen_[j] = i == j;
    }
  }

  bool make_cheaper(size_t i, int64_t limit_bytes) {
    const std::vector<bool> before = chosen_;
    chosen_[i] = false;
    if (planned() <= limit_bytes) return true;
    for (size_t j = 0; j < i; ++j) {
      if (!same_key(i, j)) continue;
      choose(j);
      if (planned() <= limit_bytes) return true;
    }
    chosen_ = before;
    return false;
  }

  const json& config_;
  std::vector<Change> possible_;
  std::vector<bool> chosen_;
  int64_t num_gpus_;
};

// Numbers of GPUs above `num_gpus` that divide the batch into micro-batches.
std::vector<int64_t> possible_gpus(const Config& config, int64_t num_gpus) {
  constexpr int64_t kGpusPerNode = 8, kMostGpus = 1024;
  const TrainingConfig& training = config.training;
  std::vector<int64_t> result;
  for (int64_t gpus = num_gpus + 1; gpus <= kMostGpus; ++gpus) {
    const bool whole_nodes = gpus <= kGpusPerNode || gpus % kGpusPerNode == 0;
    if (whole_nodes && training.global_batch_size % (gpus * training.micro_batch_size) == 0) result.push_back(gpus);
  }
  return result;
}

std::optional<MemoryAdvice> find_changes(const json& config, std::vector<Change> possible, int64_t num_gpus,
                                         int64_t limit_bytes) {
  ChosenChanges chosen(config, std::move(possible), num_gpus);
  if (!chosen.add_until(limit_bytes)) return std::nullopt;
  chosen.prune(limit_bytes);
  MemoryAdvice result = chosen.advice();
  result.planned_bytes = chosen.planned();
  return result;
}

}  // namespace

std::vector<std::string> MemoryAdvice::overrides() const {
  std::vector<std::string> result;
  for (const Change& change : changes) result.push_back(change.override);
  return result;
}

std::string MemoryAdvice::arguments() const {
  std::string result;
  for (const Change& change : changes) result += (result.empty() ? "--set " : " --set ") + change.override;
  return result;
}

std::optional<MemoryAdvice> cheapest_changes(const json& config, int64_t num_gpus, int64_t limit_bytes) {
  return find_changes(config, possible_changes(parse_config(config, "config"), num_gpus), num_gpus, limit_bytes);
}

std::optional<MemoryAdvice> fewest_gpus(const json& config, int64_t num_gpus, int64_t gpu_bytes, MoreGpus with) {
  const Config read = parse_config(config, "config");
  for (const int64_t gpus : possible_gpus(read, num_gpus)) {
    std::vector<Change> changes = possible_changes(read, gpus);
    if (with == MoreGpus::kWithStages) {
      std::erase_if(changes, [](const Change& change) { return key_of(change) != "distributed.zero_stage"; });
    }
    auto advice = find_changes(config, std::move(changes), gpus, gpu_bytes - context_bytes(gpus));
    if (advice) return advice;
  }
  return std::nullopt;
}

}  // namespace parka
