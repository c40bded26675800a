#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

namespace parka {

// Changes that make a run fit, and what it then is. All configs here are JSON as parse_config() reads it: what a
// file gives, not every key with its value, because precision.recipe sets only keys that are not given.
struct MemoryAdvice {
  struct Change {
    std::string override;  // "section.key=value", as --set takes it
    std::string cost;      // in words
  };
  std::vector<Change> changes;  // from the cheapest to the dearest, each key once; empty: fits as it is
  int64_t num_gpus = 1;
  int64_t planned_bytes = 0;  // on each GPU, with the changes

  std::vector<std::string> overrides() const;
  std::string arguments() const;  // "--set section.key=value --set ...", for a shell
};

// The cheapest changes with which a run on `num_gpus` GPUs plans at most `limit_bytes` on each: a fixed list of
// changes is made from the cheapest on until the run fits, and then taken back from the dearest on as far as it
// still does. So it does not fit without any one of them. nullopt where even all of them are not enough.
std::optional<MemoryAdvice> cheapest_changes(const nlohmann::json& config, int64_t num_gpus, int64_t limit_bytes);

enum class MoreGpus : uint8_t { kWithStages, kWithChanges };

// The fewest GPUs, more than `num_gpus`, that divide the batch and that the run fits on as it is but for its ZeRO
// stage, or, kWithChanges, with the cheapest changes. One GPU has `gpu_bytes` of memory, CUDA's and NCCL's
// included. Numbers are those up to 8 and multiples of 8 up to 1024; nullopt where none is enough.
std::optional<MemoryAdvice> fewest_gpus(const nlohmann::json& config, int64_t num_gpus, int64_t gpu_bytes,
                                        MoreGpus with);

}  // namespace parka
