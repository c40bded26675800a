#include "engine/planning/memory_changes.h"

#include <utility>

#include <fmt/format.h>

#include "model/activation_offload.h"

namespace parka {
namespace {

constexpr std::string_view kRowsOnly = "precision.weight_copies=rows", kNoCopies = "precision.weight_copies=none";

std::string cost_of_copies(std::string_view left, const std::string& weights) {
  return fmt::format("the same bits, {} are {} in every micro-batch", weights,
                     left == kNoCopies ? "quantized" : "transposed");
}

// Frozen blocks beside a side network have no backward to recompute for.
std::string cost_of_recomputation(FinetuneMethod method) {
  return method == FinetuneMethod::kQst ? "the same bits, side blocks run forward twice"
                                        : "the same bits, about a third more work";
}

// More ranks than now that may share each sequence. For long sequences only: parts of others would make small
// GEMMs.
std::vector<int64_t> sharing_ranks_to_try(const Config& config, int64_t num_gpus) {
  constexpr int64_t kShortestPart = 8192;
  std::vector<int64_t> numbers;
  for (int64_t ranks = 2 * config.distributed.context_parallel;
       num_gpus % ranks == 0 && config.data.sequence_length / ranks >= kShortestPart; ranks *= 2) {
    numbers.push_back(ranks);
  }
  return numbers;
}

// True if a higher stage of ZeRO adds gradients, or the squares of their norm, in another order. From stage 1 on
// each rank has the squares of its own pieces, and from 2 on ranks add up every micro-batch's gradients, not a
// step's.
bool changes_sums(const Config& config, int64_t num_gpus) {
  const int64_t stage = config.distributed.zero_stage;
  const bool is_one_sum = config.divides_batch(num_gpus) && config.micro_batches_per_step(num_gpus) == 1;
  return stage == 0 || (stage == 1 && !is_one_sum);
}

}  // namespace

MemoryChange::Results MemoryChange::taken_among() const {
  return key() == kZeroStageKey ? Results::kSameBits : results;
}

std::vector<MemoryChange> memory_changes(const Config& config, int64_t num_gpus) {
  constexpr auto kSameBits = MemoryChange::Results::kSameBits, kOtherSums = MemoryChange::Results::kOtherSums,
                 kOtherPrecision = MemoryChange::Results::kOtherPrecision;
  std::vector<MemoryChange> changes;
  const auto add = [&](std::string override, MemoryChange::Results results, std::string cost) {
    changes.push_back({std::move(override), results, std::move(cost)});
  };
  if (config.optimizer.master == MasterForm::kFp32) {
    add("optimizer.master=fp32_split", kSameBits, "the same bits, no cost");
  }
  if (config.precision.save_product)
    add("precision.save_product=false", kSameBits, "the same bits, a little recomputation");
  if (config.precision.save_norm_output)
    add("precision.save_norm_output=false", kSameBits, "the same bits, a little recomputation");
  const WeightCopies copies = config.precision.weight_copies;
  if (copies == WeightCopies::kAuto || copies == WeightCopies::kBoth) {
    add(std::string(kRowsOnly), kSameBits, cost_of_copies(kRowsOnly, "weights"));
  }
  if (copies != WeightCopies::kNone) {
    add(std::string(kNoCopies), kSameBits, cost_of_copies(kNoCopies, "weights"));
  }
  for (int64_t stage = config.distributed.zero_stage + 1; num_gpus > 1 && stage <= 3; ++stage) {
    add(fmt::format("{}={}", kZeroStageKey, stage), changes_sums(config, num_gpus) ? kOtherSums : kSameBits,
        "communication between GPUs");
  }
  // Not more than half the blocks: copies have to keep up with forward (docs/results/memory.md).
  const auto add_offload = [&](int64_t part) {
    const int64_t blocks = (config.model.num_layers - ActivationOffload::kBuffers) / part;
    if (blocks <= config.precision.offload_blocks) return;
    add(fmt::format("precision.offload_blocks={}", blocks), kSameBits,
        "the same bits, copied to CPU memory and back");
  };
  const auto add_plain_head = [&] {
    add("precision.head=compute", kOtherPrecision, "the head in bf16, with slower matrix products");
  };
  if (config.precision.head == Storage::kFp8) add_plain_head();
  add_offload(4);
  if (config.optimizer.gradient == DType::kF32)
    add("optimizer.gradient=bf16", kOtherPrecision, "gradients are summed in bf16");
  const MasterForm master = config.optimizer.master;
  if (master == MasterForm::kFp32 || master == MasterForm::kFp32Split) {
    add("optimizer.master=fp24_split", kOtherPrecision, "a master of 24 bits instead of 32");
  }
  add_offload(2);
  for (int64_t micro = config.training.micro_batch_size / 2; micro >= 1; micro /= 2) {
    if (config.training.global_batch_size % micro != 0) continue;
    add(fmt::format("training.micro_batch_size={}", micro), kOtherSums, "smaller matrix products");
  }
  for (const int64_t ranks : sharing_ranks_to_try(config, num_gpus)) {
    add(fmt::format("distributed.context_parallel={}", ranks), kOtherSums,
        fmt::format("communication between GPUs, {} of which share each sequence", ranks));
  }
  // Behind smaller micro-batches, which do not go together with it.
  if (!config.optimizer.release_gradients && config.divides_batch(num_gpus) &&
      config.micro_batches_per_step(num_gpus) == 1) {
    const bool clips = config.optimizer.clip_norm > 0;
    add("optimizer.release_gradients=true", clips ? kOtherPrecision : kSameBits,
        clips ? "clipped by the norm of the step before" : "the same bits, no CUDA graphs");
  }
  if (config.precision.recompute == Recompute::kNone)
    add("precision.recompute=block", kSameBits, cost_of_recomputation(config.finetune.method));
  // Behind all else with the same bits: in a step of few micro-batches nothing hides their copies.
  if (!config.optimizer.offload) {
    add("optimizer.offload=true", kSameBits, "the same bits, masters and moments in CPU memory");
  }
  if (!config.precision.offload_weights) {
    add("precision.offload_weights=true", kSameBits, "the same bits, weights in CPU memory");
  }
  if (config.precision.recipe != Recipe::kParka) {
    add("precision.recipe=parka", kOtherPrecision, "FP8, with its effect on the loss");
    if (config.precision.head == Storage::kCompute) add_plain_head();  // which the recipe changes
  }
  if (config.precision.compute != DType::kF32 && config.optimizer.master != MasterForm::kBf16Sr) {
    add("optimizer.master=bf16_sr", kOtherPrecision, "stochastic rounding instead of an exact master");
  }
  return changes;
}

std::string arguments_of(const std::vector<MemoryChange>& changes) {
  std::string result;
  for (const MemoryChange& change : changes) result += (result.empty() ? "--set " : " --set ") + change.override;
  return result;
}

}  // namespace parka
