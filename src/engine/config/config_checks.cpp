#include "engine/config/config_checks.h"

#include <algorithm>
#include <cmath>
#include <string_view>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "core/error.h"
#include "core/log/log.h"
#include "engine/config/config_io.h"
#include "engine/config/config_table.h"

namespace parka {
namespace {

// Codes are made of weights that come in whole, once.
void check_base(const Config& c) {
  if (c.finetune.base == BaseFormat::kCompute) return;
  const std::string_view base = name_of(c.finetune.base);
  if (c.finetune.method == FinetuneMethod::kFull) {
    throw_bad_input(
        "finetune.base = {} is for weights that stay as they are, and finetune.method = full trains them; set method = "
        "lora or qst, or base = compute",
        base);
  }
  if (c.precision.offload_weights) {
    throw_bad_input(
        "finetune.base = {} keeps codes on the device; set precision.offload_weights = false, or base = compute",
        base);
  }
  if (c.finetune.base != BaseFormat::kFp8) return;
  if (c.precision.gemm == GemmPrecision::kCompute) {
    throw_bad_input(
        "finetune.base = fp8 keeps the codes of FP8 GEMMs, and precision.gemm = compute has none; use a recipe like "
        "parka, or base = nf4");
  }
  if (c.precision.weight_copies == WeightCopies::kNone) {
    throw_bad_input(
        "finetune.base = fp8 has no weights but the copies that precision.weight_copies = none leaves out; use rows or "
        "both");
  }
  if (c.precision.gemm == GemmPrecision::kFp8Block && c.precision.weight_copies == WeightCopies::kRows) {
    throw_bad_input(
        "finetune.base = fp8 with precision.gemm = fp8_block cannot transpose codes on use: set "
        "precision.weight_copies = both");
  }
  if (c.telemetry.interval > 0) {
    throw_bad_input(
        "telemetry.interval = {} compares FP8 codes with weights, which finetune.base = fp8 does not keep; set it to 0, "
        "or base = compute",
        c.telemetry.interval);
  }
}

// No gradient goes through the model's own blocks, so some keys that are about that have nothing to do.
void check_side(const Config& c) {
  if (!c.optimizer.frozen.empty()) {
    throw_bad_input(
        "optimizer.frozen has no meaning with finetune.method = qst, which trains the side network alone; remove it");
  }
  if (c.finetune.kept == Storage::kFp8 && is_pool(c.finetune.downsample)) {
    throw_bad_input(
        "finetune.kept = fp8 has no meaning with finetune.downsample = {}, which keeps nothing; use kept = compute",
        name_of(c.finetune.downsample));
  }
  if (c.precision.offload_weights || c.precision.offload_blocks > 0) {
    throw_bad_input(
        "precision.{} does not go with finetune.method = qst, whose frozen blocks keep nothing for backward; set it to {}",
        c.precision.offload_weights ? "offload_weights" : "offload_blocks",
        c.precision.offload_weights ? "false" : "0");
  }
  if (c.telemetry.interval > 0) {
    throw_bad_input(
        "telemetry.interval = {} does not go with finetune.method = qst, whose frozen blocks do not go backward; set it "
        "to 0",
        c.telemetry.interval);
  }
}

// A key of another method than the chosen one would be ignored.
void check_keys_of_method(const Config& c) {
  Config own = c, defaults;
  const ConfigTable given = make_config_table(own), standard = make_config_table(defaults);
  for (const ConfigField& field : given.fields) {
    if (section_of(field.path) != "finetune") continue;
    const std::string key(key_of(field.path));
    if (is_used_by(c.finetune.method, c.finetune.downsample, key)) continue;
    if (get_field(field) == get_field(*standard.find(field.path))) continue;
    if (is_used_by(c.finetune.method, defaults.finetune.downsample, key)) {
      throw_bad_input("{} has no meaning with finetune.downsample = {}; remove it, or change how h is read",
                      field.path, name_of(c.finetune.downsample));
    }
    throw_bad_input("{} has no meaning with finetune.method = {}; remove it, or change the method", field.path,
                    name_of(c.finetune.method));
  }
}

}  // namespace

bool is_used_by(FinetuneMethod method, Downsampling downsample, std::string_view key) {
  if (key == "method" || key == "base") return true;
  if (key == "rank") {
    return method == FinetuneMethod::kLora || (method == FinetuneMethod::kQst && has_two_factors(downsample));
  }
  const bool of_lora = key == "alpha" || key == "rslora" || key == "dropout" || key == "targets";
  return method == (of_lora ? FinetuneMethod::kLora : FinetuneMethod::kQst);
}

LoraRules FinetuneConfig::lora_rules() const {
  if (method != FinetuneMethod::kLora) return {};
  const auto r = static_cast<double>(rank);
  return {rank, alpha / (rslora ? std::sqrt(r) : r), targets, dropout};
}

SideRules FinetuneConfig::side_rules() const {
  if (method != FinetuneMethod::kQst) return {};
  return {.reduction = reduction,
          .downsample = downsample,
          .rank = rank,
          .mix = mix,
          .keeps_fp8 = kept == Storage::kFp8};
}

ParameterRules Config::parameter_rules() const {
  // Initialization and stochastic rounding draw other numbers from training.seed.
  constexpr uint64_t kDropoutKey = 0x7f4a7c159e3779b9;
  LoraRules lora = finetune.lora_rules();
  lora.seed = static_cast<uint64_t>(training.seed) ^ kDropoutKey;
  return {optimizer.frozen, optimizer.lr_patterns, optimizer.lr_factors,
          std::move(lora),  finetune.base,         finetune.side_rules()};
}

void check_finetune(const Config& c) {
  if (c.model.vision.exists() && c.finetune.method != FinetuneMethod::kFull) {
    throw_bad_input("finetune.method = {} does not go with model.vision.tower yet; use method = full",
                    name_of(c.finetune.method));
  }
  check_keys_of_method(c);
  check_base(c);
  if (c.finetune.method == FinetuneMethod::kQst) check_side(c);
  if (c.finetune.method != FinetuneMethod::kLora) return;
  if (!c.optimizer.frozen.empty()) {
    throw_bad_input(
        "optimizer.frozen has no meaning with finetune.method = lora, which trains adapters alone; remove it");
  }
  if (c.finetune.targets.empty()) {
    throw_bad_input("finetune.targets is empty, so that no layer has an adapter; give some, or method = full");
  }
  if (c.finetune.alpha == 0) {
    throw_bad_input(
        "finetune.alpha = 0 multiplies adapters and their gradients by 0, so that nothing is trained; give more, "
        "finetune.rank for example");
  }
  for (const std::string& target : c.finetune.targets) {
    const FinetuneConfig defaults;  // with all of them
    if (std::ranges::count(defaults.targets, target) > 0) continue;
    throw_bad_input("finetune.targets holds \"{}\"; wanted some of {}", target, fmt::join(defaults.targets, ", "));
  }
}

void warn_of_random_weights(const Config& config) {
  const bool is_added = config.finetune.method != FinetuneMethod::kFull;
  if (!config.checkpoint.init_from.empty() || (!is_added && config.optimizer.frozen.empty())) return;
  log_warning(
      "{} leaves weights as they begin, and without checkpoint.init_from they begin at random; give it a checkpoint, "
      "such as parka import writes",
      is_added ? fmt::format("finetune.method = {}", name_of(config.finetune.method)) : "optimizer.frozen");
}

namespace {

// Ranks that share sequences divide their tokens, and in attention the heads.
void check_context_sizes(const Config& c) {
  const int64_t shared_by = c.distributed.context_parallel;
  const auto require_multiple = [&](std::string_view key, int64_t value) {
    if (value % shared_by == 0) return;
    throw_bad_input("distributed.context_parallel = {} does not divide {} = {}; change one of them", shared_by, key,
                    value);
  };
  require_multiple("data.sequence_length", c.data.sequence_length);
  require_multiple("model.num_heads", c.model.num_heads);
  require_multiple(c.model.num_kv_heads == 0 ? "model.num_heads" : "model.num_kv_heads", c.model.kv_heads());
}

void check_context(const Config& c) {
  if (c.distributed.context_parallel == 1) return;
  check_context_sizes(c);
  const auto refuse = [&](std::string_view what, std::string_view instead) {
    throw_bad_input("{} does not go with distributed.context_parallel = {}; {}, or set context_parallel = 1", what,
                    c.distributed.context_parallel, instead);
  };
  if (c.model.vision.exists()) refuse("model.vision.tower", "train without images");
  if (c.finetune.method == FinetuneMethod::kQst) refuse("finetune.method = qst", "use method = lora");
  if (c.finetune.method == FinetuneMethod::kLora && c.finetune.dropout > 0) {
    refuse("finetune.dropout", "set dropout = 0");
  }
  if (!c.evaluation.tasks.empty()) {
    refuse("evaluation.tasks", "evaluate tasks with `parka eval`, whose one rank has its sequences alone");
  }
}

}  // namespace

void check_distributed(const Config& c) {
  check_context(c);
  if (c.distributed.shard_size != 0 && c.distributed.zero_stage == 0) {
    throw_bad_input(
        "distributed.shard_size = {} has no meaning with zero_stage = 0, which shards nothing; set it to 0",
        c.distributed.shard_size);
  }
  // Only the codes of FP8 weights are gathered.
  if (c.distributed.zero_stage == 3 && c.precision.has_fp8() && c.precision.eval == EvalNumerics::kBf16) {
    throw_bad_input(
        "distributed.zero_stage = 3 with FP8 GEMMs has no bf16 weights to evaluate with; use precision.eval = "
        "same, or zero_stage = 2");
  }
  if (c.distributed.zero_stage == 3 && c.telemetry.interval > 0) {
    throw_bad_input("telemetry.interval = {} needs whole weights; use distributed.zero_stage = 2, or interval = 0",
                    c.telemetry.interval);
  }
}

std::string sharing_ranks(const Config& config) {
  const int64_t shared_by = config.distributed.context_parallel;
  return shared_by == 1 ? "" : fmt::format(", of which {} share each sequence", shared_by);
}

std::string divided_by_context(const Config& config) {
  const int64_t shared_by = config.distributed.context_parallel;
  return shared_by == 1 ? "" : fmt::format(" / distributed.context_parallel {}", shared_by);
}

}  // namespace parka
