#include "engine/config/config_checks.h"

#include <cmath>
#include <string_view>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "core/error.h"

namespace parka {

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
  return {optimizer.frozen, optimizer.lr_patterns, optimizer.lr_factors,  std::move(lora),
          finetune.base,    finetune.side_rules(), precision.unquantized, precision.forward_format == DType::kI8};
}

std::string sharing_ranks(const Config& config) {
  const int64_t shared_by = config.distributed.context_parallel;
  const int64_t divided_by = config.distributed.expert_parallel;
  std::string text = shared_by == 1 ? "" : fmt::format(", of which {} share each sequence", shared_by);
  if (divided_by > 1) text += fmt::format(", of which {} divide the experts", divided_by);
  return text;
}

std::string indivisible_batch(const Config& config, int64_t num_ranks) {
  if (config.divides_batch(num_ranks)) return "";
  const int64_t shared_by = config.distributed.context_parallel;
  return fmt::format(
      "training.global_batch_size {} is not a multiple of training.micro_batch_size {} x {} rank{}{}; change one of "
      "them",
      config.training.global_batch_size, config.training.micro_batch_size, num_ranks, num_ranks == 1 ? "" : "s",
      shared_by == 1 ? "" : fmt::format(" / distributed.context_parallel {}", shared_by));
}

void require_whole_micro_batches(const Config& config, int64_t num_ranks) {
  const std::string why = indivisible_batch(config, num_ranks);
  if (!why.empty()) throw_bad_input("{}", why);
}

}  // namespace parka
