#include "engine/planning/gpu_plan.h"

#include <algorithm>
#include <functional>
#include <map>
#include <utility>

#include "engine/config/config_io.h"
#include "engine/config/recipe.h"
#include "engine/training/training_run.h"
#include "model/activation_offload.h"
#include "model/buffer_scope.h"
#include "model/weights.h"

namespace parka {
namespace {

struct Change {
  std::string text;
  std::function<bool(Config&)> apply;  // false: it changes nothing here
  bool one_of_a_series = false;        // replaces what an earlier one of the same key has set
};

template <typename T>
bool assign(T& target, T value) {
  if (target == value) return false;
  target = value;
  return true;
}

std::vector<Change> possible_changes(const Config& config, int64_t num_gpus) {
  std::vector<Change> changes;
  if (config.optimizer.master == MasterForm::kFp32) {
    changes.push_back({"optimizer.master=fp32_split (same bits)",
                       [](Config& c) { return assign(c.optimizer.master, MasterForm::kFp32Split); }});
  }
  changes.push_back(
      {"precision.save_norm_output=false and precision.save_product=false (same bits)", [](Config& c) {
         const bool norm = assign(c.precision.save_norm_output, false);
         return assign(c.precision.save_product, false) || norm;
       }});
  const WeightCopies kept = kept_copies(config.precision, zero_of(config.distributed, 0, num_gpus));
  for (WeightCopies copies : {WeightCopies::kRows, WeightCopies::kNone}) {
    if (config.precision.gemm == GemmPrecision::kCompute || kept >= copies) continue;
    changes.push_back({fmt::format("precision.weight_copies={} (same bits)", name_of(copies)),
                       [copies](Config& c) { return assign(c.precision.weight_copies, copies); }, true});
  }
  // Not more than half the blocks: copies have to keep up with forward (docs/results/memory.md).
  for (const int64_t part : {4, 2}) {
    const int64_t blocks = (config.model.num_layers - ActivationOffload::kBuffers) / part;
    if (blocks <= config.precision.offload_blocks) continue;
    changes.push_back(
        {fmt::format("precision.offload_blocks={} (same bits, copied to CPU memory and back)", blocks),
         [blocks](Config& c) { return assign(c.precision.offload_blocks, blocks); }, true});
  }
  changes.push_back({"precision.recompute=block (same bits, about a third more work)",
                     [](Config& c) { return assign(c.precision.recompute, Recompute::kBlock); }});
  if (num_gpus > 1) {
    for (int64_t stage = config.distributed.zero_stage + 1; stage <= 3; ++stage) {
      changes.push_back({"distributed.zero_stage=" + std::to_string(stage),
                         [stage](Config& c) { return assign(c.distributed.zero_stage, stage); }, true});
    }
  }
  for (int64_t micro = config.training.micro_batch_size / 2; micro >= 1; micro /= 2) {
    if (config.training.global_batch_size % micro != 0) continue;
    changes.push_back({"training.micro_batch_size=" + std::to_string(micro),
                       [micro](Config& c) { return assign(c.training.micro_batch_size, micro); }, true});
  }
  changes.push_back(
      {"optimizer.gradient=bf16", [](Config& c) { return assign(c.optimizer.gradient, DType::kBF16); }});
  changes.push_back({"precision.recipe=parka", [](Config& c) {
                       if (c.precision.recipe == Recipe::kParka) return false;
                       const PrecisionConfig before = c.precision;
                       c.precision.recipe = Recipe::kParka;
                       apply_recipe(Recipe::kParka, c);
                       c.precision.recompute = before.recompute;
                       c.precision.offload_blocks = before.offload_blocks;
                       return true;
                     }});
  if (config.precision.compute != DType::kF32) {
    changes.push_back(
        {"optimizer.master=bf16_sr", [](Config& c) { return assign(c.optimizer.master, MasterForm::kBf16Sr); }});
  }
  return changes;
}

std::string key_of(const Change& change) { return change.text.substr(0, change.text.find('=')); }

bool fits(const Config& config, int64_t num_gpus, int64_t limit_bytes) {
  return plan_for_gpus(config, num_gpus).total_bytes <= limit_bytes;
}

// Makes the change; false, and `config` is as it was, where nothing changes or keys would not go together.
bool apply_valid(const Change& change, Config& config) {
  Config changed = config;
  if (!change.apply(changed)) return false;
  try {
    validate(changed);
  } catch (const Error&) {
    return false;
  }
  config = std::move(changed);
  return true;
}

}  // namespace

GpuPlan plan_for_gpus(const Config& config, int64_t num_gpus) {
  const Zero zero = zero_of(config.distributed, 0, num_gpus);
  const DeclaredRun run(config, DeviceKind::kCuda, zero);
  const DeclaredRun alone(config, DeviceKind::kCuda);
  std::map<std::string, int64_t> unsharded;
  for (const MemoryPlan::CategoryTotal& total : alone.plan.summary()) unsharded[total.category] = total.bytes;
  GpuPlan result;
  result.host_bytes = run.model.host_bytes(run.plan);
  result.staging_bytes = staging_bytes(config, run, zero, num_gpus / zero.shard.size);
  for (const MemoryPlan::CategoryTotal& total : run.plan.summary()) {
    result.lines.push_back({total.category, unsharded[total.category], total.bytes});
    result.total_bytes += total.bytes;
    if (total.category == kSavedActivationsCategory) {
      const double tokens = static_cast<double>(config.training.micro_batch_size * config.data.sequence_length);
      result.saved_bytes_per_token_layer = static_cast<double>(total.bytes + result.host_bytes) / tokens /
                                           static_cast<double>(config.model.num_layers);
    }
  }
  return result;
}

std::optional<std::string> change_that_fits(const Config& config, int64_t num_gpus, int64_t limit_bytes) {
  const std::vector<Change> changes = possible_changes(config, num_gpus);
  for (const Change& change : changes) {
    Config changed = config;
    if (apply_valid(change, changed) && fits(changed, num_gpus, limit_bytes)) return change.text;
  }
  Config changed = config;
  std::vector<const Change*> together;
  for (const Change& change : changes) {
    if (!apply_valid(change, changed)) continue;
    const bool replaces = change.one_of_a_series && !together.empty() && together.back()->one_of_a_series &&
                          key_of(*together.back()) == key_of(change);
    if (replaces) together.pop_back();
    together.push_back(&change);
    if (!fits(changed, num_gpus, limit_bytes)) continue;
    std::string text;
    for (const Change* part : together) text += (text.empty() ? "" : " + ") + part->text;
    return text;
  }
  return std::nullopt;
}

}  // namespace parka
