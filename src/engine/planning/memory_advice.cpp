#include "engine/planning/memory_advice.h"

#include <algorithm>
#include <map>
#include <utility>

#include <fmt/format.h>

#include "core/error.h"
#include "engine/step/declared_run.h"
#include "engine/training/training_run.h"
#include "model/activation_offload.h"
#include "model/buffer_scope.h"

namespace parka {
namespace {

constexpr int64_t kMostGpus = 1024;

// Numbers of GPUs above `num_gpus` that divide the batch into micro-batches.
std::vector<int64_t> possible_gpus(const Config& config, int64_t num_gpus) {
  std::vector<int64_t> result;
  for (int64_t gpus = num_gpus + 1; gpus <= kMostGpus; ++gpus) {
    const bool whole_nodes = gpus <= kGpusPerNode || gpus % kGpusPerNode == 0;
    if (whole_nodes && config.divides_batch(gpus)) result.push_back(gpus);
  }
  return result;
}

// Changes of a config, of each key at most one, that are made until it fits.
class Ladder {
 public:
  Ladder(const GivenConfig& config, std::vector<MemoryChange> possible, int64_t num_gpus, const MemoryBytes& limit)
      : config_(config), possible_(std::move(possible)), num_gpus_(num_gpus), limit_(limit) {}

  std::optional<MemoryAdvice> climb() {
    Chosen chosen(possible_.size(), false);
    for (size_t i = 0; i < possible_.size() && !fits(chosen); ++i) {
      if (!make(i, chosen)) continue;
      // It may have made way: smaller states take less host memory, too.
      for (size_t j = 0; j < i && !fits(chosen); ++j) {
        if (left_out_[j]) make(j, chosen);
      }
    }
    if (!fits(chosen)) return std::nullopt;
    take_back(chosen);
    MemoryAdvice advice = {.changes = {}, .num_gpus = num_gpus_, .planned = *planned(chosen)};
    for (size_t i = 0; i < possible_.size(); ++i) {
      if (chosen[i]) advice.changes.push_back(possible_[i]);
    }
    return advice;
  }

 private:
  using Chosen = std::vector<bool>;

  // With change i, in the place of another of its key.
  Chosen with(Chosen chosen, size_t i) const {
    for (size_t j = 0; j < possible_.size(); ++j) {
      if (possible_[j].key() == possible_[i].key()) chosen[j] = i == j;
    }
    return chosen;
  }

  // nullopt where they contradict each other or the config.
  const std::optional<MemoryBytes>& planned(const Chosen& chosen) {
    const auto [known, is_new] = planned_.try_emplace(chosen);
    if (!is_new) return known->second;
    std::vector<std::string> overrides;
    for (size_t i = 0; i < possible_.size(); ++i) {
      if (chosen[i]) overrides.push_back(possible_[i].override);
    }
    try {
      known->second = planned_memory(config_.with(overrides), num_gpus_);
    } catch (const Error&) {
    }
    return known->second;
  }

  bool fits(const Chosen& chosen) {
    const std::optional<MemoryBytes>& bytes = planned(chosen);
    return bytes && bytes->within(limit_);
  }

  // True if `after` is possible, and takes less memory of the GPU than `before`, as offload need not.
  bool saves(const Chosen& after, const Chosen& before) {
    const std::optional<MemoryBytes>&with = planned(after), &without = planned(before);
    return with && with->host <= limit_.host && (!without || with->gpu < without->gpu);
  }

  // Makes change i if that saves memory, in place of one that it contradicts or that takes the host's memory.
  bool make(size_t i, Chosen& chosen) {
    if (chosen[i]) return false;
    Chosen changed = with(chosen, i);
    for (size_t j = 0; j < possible_.size() && !saves(changed, chosen); ++j) {
      if (!chosen[j]) continue;
      changed = with(chosen, i);
      changed[j] = false;
    }
    left_out_[i] = !saves(changed, chosen);
    if (left_out_[i]) return false;
    chosen = std::move(changed);
    return true;
  }

  // Takes changes back, or replaces them by earlier ones of the same key, while the others fit.
  void take_back(Chosen& chosen) {
    for (bool changed = true; changed;) {
      changed = false;
      for (size_t i = possible_.size(); i-- > 0;) changed = (chosen[i] && take_back(i, chosen)) || changed;
    }
  }
  bool take_back(size_t i, Chosen& chosen) {
    Chosen without = chosen;
    without[i] = false;
    for (size_t j = 0; !fits(without); ++j) {
      while (j < i && possible_[j].key() != possible_[i].key()) ++j;
      if (j == i) return false;
      without = with(chosen, j);
    }
    chosen = std::move(without);
    return true;
  }

  const GivenConfig& config_;
  std::vector<MemoryChange> possible_;
  int64_t num_gpus_;
  MemoryBytes limit_;
  Chosen left_out_ = Chosen(possible_.size(), false);     // changes that saved nothing when they were tried
  std::map<Chosen, std::optional<MemoryBytes>> planned_;  // a plan takes milliseconds
};

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

// More ranks than now that may share each sequence, where it is long: else GEMMs would be small.
std::vector<int64_t> sharing_ranks_to_try(const Config& config, int64_t num_gpus) {
  constexpr int64_t kShortestPart = 8192;
  std::vector<int64_t> numbers;
  for (int64_t ranks = 2 * config.distributed.context_parallel;
       num_gpus % ranks == 0 && config.data.sequence_length / ranks >= kShortestPart; ranks *= 2) {
    numbers.push_back(ranks);
  }
  return numbers;
}

// True if a higher stage of ZeRO adds gradients, or the squares of their norm, in another order. From stage 1 on a
// rank squares its own pieces, and from 2 on ranks add up every micro-batch's gradients.
bool changes_sums(const Config& config, int64_t num_gpus) {
  const int64_t stage = config.distributed.zero_stage;
  const bool is_one_sum = config.divides_batch(num_gpus) && config.micro_batches_per_step(num_gpus) == 1;
  return stage == 0 || (stage == 1 && !is_one_sum);
}

}  // namespace

std::vector<std::string> MemoryAdvice::overrides() const {
  std::vector<std::string> result;
  for (const MemoryChange& change : changes) result.push_back(change.override);
  return result;
}

std::string MemoryAdvice::arguments() const {
  std::string result;
  for (const MemoryChange& change : changes) result += (result.empty() ? "--set " : " --set ") + change.override;
  return result;
}

std::optional<MemoryAdvice> cheapest_changes(const GivenConfig& config, int64_t num_gpus, const MemoryBytes& limit,
                                             ChangeOrder order) {
  std::vector<MemoryChange> changes = memory_changes(config.with({}), num_gpus);
  if (order == ChangeOrder::kSameBitsFirst) {
    std::ranges::stable_sort(changes, {}, &MemoryChange::taken_among);
  }
  return Ladder(config, std::move(changes), num_gpus, limit).climb();
}

std::optional<MemoryAdvice> fewest_gpus(const GivenConfig& config, int64_t num_gpus,
                                        const std::function<MemoryBytes(int64_t gpus)>& limit_of, MoreGpus with) {
  const Config read = config.with({});
  for (const int64_t gpus : possible_gpus(read, num_gpus)) {
    std::vector<MemoryChange> changes = memory_changes(read, gpus);
    if (with == MoreGpus::kWithStages) {
      std::erase_if(changes, [](const MemoryChange& change) { return change.key() != kZeroStageKey; });
    }
    auto advice = Ladder(config, std::move(changes), gpus, limit_of(gpus)).climb();
    if (advice) return advice;
  }
  return std::nullopt;
}

std::string advice_without_gpus(const Config& config, int64_t num_gpus) {
  constexpr std::string_view kSmaller = "use a smaller model or a shorter data.sequence_length";
  if (num_gpus >= kMostGpus) return std::string(kSmaller);
  return fmt::format(
      "{}, or a larger training.global_batch_size, as {} is divided by no number of GPUs up to {} that is enough",
      kSmaller, config.training.global_batch_size, kMostGpus);
}

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
  // Behind stages, which hide what they send (docs/moe.md). It saves memory where stage 3 does not go.
  const MoeConfig& moe = config.model.moe;
  for (int64_t ranks = 2 * config.distributed.expert_parallel;
       moe.exists() && num_gpus % ranks == 0 && moe.num_experts % ranks == 0; ranks *= 2) {
    add(fmt::format("distributed.expert_parallel={}", ranks), kOtherSums,
        fmt::format("communication between GPUs, {} of which divide the experts", ranks));
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
  if (config.optimizer.master == MasterForm::kFp32) {
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

int64_t group_bytes(const Config& config, int64_t num_gpus) {
  const Mesh mesh = zero_of(config, 0, num_gpus).mesh;
  return kNcclGroupBytes * std::ranges::count_if(kAllPeers, [&](Peers peers) { return mesh.is_group(peers); });
}

GpuPlan plan_for_gpus(const Config& config, int64_t num_gpus) {
  const Zero zero = zero_of(config, 0, num_gpus);
  const DeclaredRun run(config, DeviceKind::kCuda, zero);
  Config whole = config;
  whole.distributed.context_parallel = 1;
  const DeclaredRun alone(whole, DeviceKind::kCuda, {0, Mesh(0, static_cast<int>(num_gpus))});
  std::map<std::string, int64_t> unsharded;
  for (const MemoryPlan::CategoryTotal& total : alone.plan.summary()) unsharded[total.category] = total.bytes;
  GpuPlan result;
  result.host_bytes = run.model.host_bytes(run.plan);
  result.host_lines = run.plan.host_summary();
  result.staging_bytes = staging_bytes(config, run, num_gpus);
  for (const MemoryPlan::CategoryTotal& total : run.plan.summary()) {
    result.lines.push_back({total.category, unsharded[total.category], total.bytes});
    result.total_bytes += total.bytes;
    if (total.category == kSavedActivationsCategory) {
      const auto tokens = static_cast<double>(config.micro_batch_shape().num_tokens());
      result.saved_bytes_per_token_layer = static_cast<double>(total.bytes + result.host_bytes) / tokens /
                                           static_cast<double>(config.model.num_layers);
    }
  }
  if (const int64_t bytes = group_bytes(config, num_gpus); bytes > 0) {
    result.lines.push_back({"NCCL of groups of GPUs", 0, bytes});
    result.total_bytes += bytes;
  }
  return result;
}

MemoryBytes planned_memory(const Config& config, int64_t num_gpus) {
  const DeclaredRun run(config, DeviceKind::kCuda, zero_of(config, 0, num_gpus));
  return {.gpu = run.plan.total_bytes() + group_bytes(config, num_gpus),
          .host = run.model.host_bytes(run.plan) + run.plan.total_host_bytes()};
}

int64_t planned_bytes(const Config& config, int64_t num_gpus) { return planned_memory(config, num_gpus).gpu; }

}  // namespace parka
