#pragma once
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "engine/config/given_keys.h"
#include "engine/planning/gpu_plan.h"
#include "engine/planning/memory_changes.h"

namespace parka {

// Changes that make a run fit, and what it then is.
struct MemoryAdvice {
  std::vector<MemoryChange> changes;  // from the cheapest to the dearest, each key once; empty: fits as it is
  int64_t num_gpus = 1;
  MemoryBytes planned = {.gpu = 0, .host = 0};  // for each GPU, with the changes

  std::vector<std::string> overrides() const;
  std::string arguments() const { return arguments_of(changes); }
};

// In which order changes are made: that of memory_changes(), or in this order those with the same bits, those of
// sums, and then the others.
enum class ChangeOrder : uint8_t { kCheapest, kSameBitsFirst };

// The cheapest changes with which a run on `num_gpus` GPUs plans at most `limit` on each: a fixed list of changes
// is made from the first on until the run fits, and then taken back from the last on as far as it still does. So it
// does not fit without any one of them. nullopt where no more changes save memory and it still does not fit.
std::optional<MemoryAdvice> cheapest_changes(const GivenConfig& config, int64_t num_gpus, const MemoryBytes& limit,
                                             ChangeOrder order = ChangeOrder::kCheapest);

enum class MoreGpus : uint8_t { kWithStages, kWithChanges };

// The fewest GPUs, more than `num_gpus`, that divide the batch and that the run fits on as it is but for its ZeRO
// stage, or, kWithChanges, with the cheapest changes. Each of so many GPUs has `limit_of` of memory. Numbers are
// those up to 8 and multiples of 8 up to 1024; nullopt where none is enough.
std::optional<MemoryAdvice> fewest_gpus(const GivenConfig& config, int64_t num_gpus,
                                        const std::function<MemoryBytes(int64_t gpus)>& limit_of, MoreGpus with);

// Advice in words if fewest_gpus() finds none: it tries only numbers that divide the batch.
std::string advice_without_gpus(const Config& config, int64_t num_gpus);

}  // namespace parka
