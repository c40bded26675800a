#include "engine/planning/memory_changes.h"

#include <numeric>
#include <utility>

#include <fmt/format.h>

#include "core/error.h"
#include "core/memory/unit_buffers.h"
#include "engine/planning/gpu_plan.h"
#include "engine/step/declared_run.h"
#include "model/activation_offload.h"
#include "model/weights.h"

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

// More ranks than now that may share each sequence. Of long sequences only: parts of others would make small matrix
// products.
std::vector<int64_t> sharing_ranks_to_try(const Config& config, int64_t num_gpus) {
  constexpr int64_t kShortestPart = 8192;
  std::vector<int64_t> numbers;
  for (int64_t ranks = 2 * config.distributed.context_parallel;
       num_gpus % ranks == 0 && config.data.sequence_length / ranks >= kShortestPart; ranks *= 2) {
    numbers.push_back(ranks);
  }
  return numbers;
}

// Whether a higher stage of ZeRO adds gradients, or the squares of their norm, in another order. From stage 1 on
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
  if (config.distributed.gathered_blocks > kLeastGatherBuffers) {
    add(fmt::format("distributed.gathered_blocks={}", kLeastGatherBuffers), kSameBits,
        "the same bits, weights are gathered more often");
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

ChosenChanges::ChosenChanges(GivenConfig config, std::vector<MemoryChange> possible, int64_t num_gpus)
    : config_(std::move(config)),
      possible_(std::move(possible)),
      chosen_(possible_.size(), false),
      num_gpus_(num_gpus) {
  const Config given = config_.with({});
  num_layers_ = given.model.num_layers;
  given_blocks_ = given.precision.weight_copies_blocks;
}

std::vector<MemoryChange> ChosenChanges::changes() const {
  std::vector<MemoryChange> result;
  for (size_t i = 0; i < possible_.size(); ++i) {
    if (!chosen_[i]) continue;
    if (possible_[i].key() == kWeightCopiesKey) {
      for (MemoryChange& change : copy_changes(possible_[i])) result.push_back(std::move(change));
    } else {
      result.push_back(possible_[i]);
    }
  }
  return result;
}

std::vector<MemoryChange> ChosenChanges::copy_changes(const MemoryChange& whole) const {
  constexpr auto kSameBits = MemoryChange::Results::kSameBits;
  const auto blocks = [](int64_t number, std::string cost) {
    return MemoryChange{fmt::format("precision.weight_copies_blocks={}", number), kSameBits, std::move(cost)};
  };
  if (kept_blocks_ == 0) {
    // Without copies no blocks may be said to have them.
    if (whole.override == kNoCopies && given_blocks_ > 0) return {whole, blocks(0, "of all blocks")};
    return {whole};
  }
  const MemoryChange some =
      blocks(kept_blocks_,
             cost_of_copies(whole.override, fmt::format("weights of {} blocks", num_layers_ - kept_blocks_)));
  if (whole.override == kRowsOnly) {
    if (others_keep(WeightCopies::kBoth)) return {some};
    return {{"precision.weight_copies=both", kSameBits, "of the first blocks"}, some};
  }
  if (others_keep(WeightCopies::kRows)) return {some};
  return {{std::string(kRowsOnly), kSameBits, cost_of_copies(kRowsOnly, "weights")}, some};
}

// Whether the config keeps these copies with the other chosen changes.
bool ChosenChanges::others_keep(WeightCopies copies) const {
  std::vector<std::string> overrides;
  for (size_t i = 0; i < possible_.size(); ++i) {
    if (chosen_[i] && possible_[i].key() != kWeightCopiesKey) overrides.push_back(possible_[i].override);
  }
  try {
    const Config others = config_.with(overrides);
    return kept_copies(others.precision, zero_of(others, 0, num_gpus_), others.finetune.base) == copies;
  } catch (const Error&) {  // they contradict each other
    return false;
  }
}

void ChosenChanges::clear() {
  chosen_.assign(possible_.size(), false);
  kept_blocks_ = 0;
}

void ChosenChanges::choose(size_t i) {
  for (size_t j = 0; j < possible_.size(); ++j) {
    if (same_key(i, j)) chosen_[j] = i == j;
  }
}

std::optional<Config> ChosenChanges::config() const {
  std::vector<std::string> overrides;
  for (const MemoryChange& change : changes()) overrides.push_back(change.override);
  try {
    return config_.with(overrides);
  } catch (const Error&) {
    return std::nullopt;
  }
}

std::optional<MemoryBytes> ChosenChanges::planned() const {
  const std::pair key(chosen_, kept_blocks_);
  const auto known = planned_.find(key);
  if (known != planned_.end()) return known->second;
  std::optional<MemoryBytes>& bytes = planned_[key];
  const std::optional<Config> changed = config();
  try {
    if (changed) bytes = planned_memory(*changed, num_gpus_);
  } catch (const Error&) {  // refused on so many GPUs
  }
  return bytes;
}

bool ChosenChanges::fit(const MemoryBytes& limit) const {
  const std::optional<MemoryBytes> bytes = planned();
  return bytes && bytes->within(limit);
}

bool ChosenChanges::add_until(const MemoryBytes& limit) {
  if (fit(limit)) return true;
  const std::vector<bool> given = chosen_;
  if (!come_within(limit, all())) return false;  // which is soon said
  const std::vector<bool> within = std::exchange(chosen_, given);
  std::vector<size_t> left_out;
  for (size_t i = 0; i < possible_.size(); ++i) {
    if (!add(i, limit)) {
      left_out.push_back(i);
      continue;
    }
    add_what_saves(left_out, limit);  // change i may have made way: smaller states take less host memory, too
    if (fit(limit)) return true;
  }
  chosen_ = within;
  if (fit(limit)) return true;
  chosen_ = given;  // `within` is so without regard to host memory
  add_what_saves(all(), limit);
  return fit(limit);
}

// Adds change i, in the place of another if need be. Where it contradicts the others, or takes too much host memory
// beside them, it is left out.
bool ChosenChanges::add(size_t i, const MemoryBytes& limit) {
  const std::vector<bool> before = chosen_;
  choose(i);
  const std::optional<MemoryBytes> bytes = planned();
  if (!bytes || bytes->host > limit.host) make_way_for(i, before, limit);
  return chosen_[i];
}

// Changes back to `before` where none of its changes can make way for change i, or where that would not save
// memory.
void ChosenChanges::make_way_for(size_t i, const std::vector<bool>& before, const MemoryBytes& limit) {
  const std::vector<bool> with = chosen_;
  chosen_ = before;
  const std::optional<MemoryBytes> least = planned();
  for (size_t j = 0; j < possible_.size(); ++j) {
    if (j == i || !with[j]) continue;
    chosen_ = with;
    chosen_[j] = false;
    const std::optional<MemoryBytes> bytes = planned();
    if (bytes && least && bytes->gpu < least->gpu && bytes->host <= limit.host) return;
  }
  chosen_ = before;
}

bool ChosenChanges::come_within(const MemoryBytes& limit, const std::vector<size_t>& changes) {
  const std::vector<bool> before = chosen_;
  const auto is_within = [&] {
    const std::optional<MemoryBytes> bytes = planned();
    return !bytes || bytes->gpu <= limit.gpu;
  };
  for (const size_t i : changes) choose(i);
  if (is_within()) return true;
  take_back_what_adds(changes, limit.gpu);
  if (is_within()) return true;
  chosen_ = before;
  add_what_saves(changes, limit);
  return is_within();
}

std::vector<size_t> ChosenChanges::all() const {
  std::vector<size_t> indices(possible_.size());
  std::iota(indices.begin(), indices.end(), size_t{0});
  return indices;
}

void ChosenChanges::take_back_what_adds(const std::vector<size_t>& changes, int64_t gpu_limit) {
  std::optional<MemoryBytes> bytes = planned();
  for (bool changed = bytes.has_value(); changed;) {
    changed = false;
    for (const size_t i : changes) {
      if (!chosen_[i]) continue;
      if (bytes->gpu <= gpu_limit) return;
      chosen_[i] = false;
      const std::optional<MemoryBytes> without = planned();
      if (without && without->gpu < bytes->gpu) {
        bytes = without;
        changed = true;
      } else {
        chosen_[i] = true;
      }
    }
  }
}

void ChosenChanges::add_what_saves(const std::vector<size_t>& changes, const MemoryBytes& limit) {
  std::optional<MemoryBytes> bytes = planned();
  for (bool changed = bytes.has_value(); changed;) {
    changed = false;
    for (const size_t i : changes) {
      const std::vector<bool> before = chosen_;
      choose(i);
      const std::optional<MemoryBytes> with = planned();
      if (with && with->gpu < bytes->gpu && with->host <= limit.host) {
        bytes = with;
        changed = true;
      } else {
        chosen_ = before;
      }
    }
  }
}

void ChosenChanges::take_back(const MemoryBytes& limit) {
  for (bool changed = true; changed;) {
    changed = false;
    for (size_t i = possible_.size(); i-- > 0;) changed = (chosen_[i] && take_back(i, limit)) || changed;
  }
}

bool ChosenChanges::take_back(size_t i, const MemoryBytes& limit) {
  const std::vector<bool> before = chosen_;
  chosen_[i] = false;
  if (fit(limit)) return true;
  for (size_t j = 0; j < i; ++j) {
    if (!same_key(i, j)) continue;
    choose(j);
    if (fit(limit)) return true;
  }
  chosen_ = before;
  return false;
}

int64_t ChosenChanges::keep_copies_within(const MemoryBytes& limit) {
  int64_t fitting = 0, too_many = num_layers_;
  for (size_t i = 0; i < possible_.size(); ++i) {
    if (!chosen_[i] || possible_[i].key() != kWeightCopiesKey) continue;
    while (too_many - fitting > 1) {
      kept_blocks_ = (fitting + too_many) / 2;
      (fit(limit) ? fitting : too_many) = kept_blocks_;
    }
  }
  kept_blocks_ = fitting;
  return fitting;
}

}  // namespace parka
