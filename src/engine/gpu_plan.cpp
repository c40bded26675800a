#include "engine/gpu_plan.h"

#include <algorithm>
#include <functional>

#include "engine/recipe.h"
#include "engine/training_run.h"

namespace parka {
namespace {

// The ZeRO stage from which a category is divided over ranks; kNever for what every rank holds whole.
constexpr int64_t kNever = 4;
int64_t sharded_from_stage(const std::string& category) {
  if (category == "master weights" || category == "optimizer states") return 1;
  if (category == "gradients") return 2;
  if (category == "weights" || category == "fp8 weights") return 3;
  return kNever;
}

// The weights of the largest block as they are gathered: in FP8 where GEMMs read FP8.
int64_t largest_block_bytes(const MemoryPlan& plan) {
  int64_t plain = 0, fp8 = 0;
  for (const MemoryPlan::Entry& entry : plan.entries()) {
    if (!entry.name.starts_with("blocks.0.")) continue;  // all blocks are alike
    if (entry.category == "weights") plain += entry.bytes;
    if (entry.category == "fp8 weights") fp8 += entry.bytes;
  }
  return std::max(plain, fp8);
}

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
  changes.push_back({"precision.cache_transposed_weights=false (same bits)", [](Config& c) {
                       return c.precision.gemm != GemmPrecision::kCompute &&
                              assign(c.precision.cache_transposed_weights, false);
                     }});
  changes.push_back({"precision.recompute=block (same bits, about a third more forward work)",
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
                       const Recompute recompute = c.precision.recompute;
                       c.precision.recipe = Recipe::kParka;
                       apply_recipe(Recipe::kParka, c);
                       c.precision.recompute = recompute;
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

}  // namespace

GpuPlan plan_for_gpus(const Config& config, int64_t num_gpus) {
  const DeclaredRun run(config, DeviceKind::kCuda);
  const int64_t stage = num_gpus > 1 ? config.distributed.zero_stage : 0;
  GpuPlan result;
  const auto add = [&](std::string category, int64_t unsharded, int64_t bytes) {
    result.lines.push_back({std::move(category), unsharded, bytes});
    result.total_bytes += bytes;
  };
  for (const MemoryPlan::CategoryTotal& total : run.plan.summary()) {
    const bool sharded = stage >= sharded_from_stage(total.category);
    add(total.category, total.bytes, sharded ? ceil_div(total.bytes, num_gpus) : total.bytes);
    if (total.category == "saved activations") {
      const double tokens = static_cast<double>(config.training.micro_batch_size * config.data.sequence_length);
      result.saved_bytes_per_token_layer =
          static_cast<double>(total.bytes) / tokens / static_cast<double>(config.model.num_layers);
    }
  }
  if (num_gpus > 1) add("gradient buckets", 0, 2 * config.distributed.bucket_mib * (int64_t{1} << 20));
  if (stage == 3) add("gathered weights of two blocks", 0, 2 * largest_block_bytes(run.plan));
  return result;
}

std::optional<std::string> change_that_fits(const Config& config, int64_t num_gpus, int64_t limit_bytes) {
  const std::vector<Change> changes = possible_changes(config, num_gpus);
  for (const Change& change : changes) {
    Config changed = config;
    if (change.apply(changed) && fits(changed, num_gpus, limit_bytes)) return change.text;
  }
  Config changed = config;
  std::vector<const Change*> together;
  for (const Change& change : changes) {
    if (!change.apply(changed)) continue;
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
