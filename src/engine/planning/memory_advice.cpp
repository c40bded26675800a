#include "engine/planning/memory_advice.h"

#include <algorithm>
#include <map>
#include <string_view>
#include <utility>

#include <fmt/format.h>

#include "core/error.h"

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

  // True if `after` is possible, and takes less memory of the GPU than `before`: buffers of offload take more in a
  // small model.
  bool saves(const Chosen& after, const Chosen& before) {
    const std::optional<MemoryBytes>&with = planned(after), &without = planned(before);
    return with && with->host <= limit_.host && (!without || with->gpu < without->gpu);
  }

  // Makes change i if that saves memory. If it contradicts another, or the host has too little for both, it
  // takes the place of that.
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

}  // namespace

std::vector<std::string> MemoryAdvice::overrides() const {
  std::vector<std::string> result;
  for (const MemoryChange& change : changes) result.push_back(change.override);
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

}  // namespace parka
