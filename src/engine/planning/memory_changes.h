#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "engine/config/config.h"

namespace parka {

// A change of a config that makes a run take less memory.
struct MemoryChange {
  // The effect on a run's results: the same bits; the same but for the order of sums; fewer bits of a number.
  enum class Results : uint8_t { kSameBits, kOtherSums, kOtherPrecision };

  std::string override;  // "section.key=value", as --set takes it
  Results results = Results::kSameBits;
  std::string cost;  // in words

  std::string_view key() const { return std::string_view(override).substr(0, override.find('=')); }
  // Among which changes it is taken, where those with the same bits come first: ZeRO's stages among these, because
  // nothing saves as much for as little, and the number of GPUs decides on the order of sums anyway.
  Results taken_among() const;
};

inline constexpr std::string_view kZeroStageKey = "distributed.zero_stage";

// The changes that `config` does not have yet, from the cheapest to the dearest (docs/troubleshooting.md). If two
// changes have one key, the later saves more, and replaces the earlier.
std::vector<MemoryChange> memory_changes(const Config& config, int64_t num_gpus);

// "--set section.key=value --set ...", for a shell.
std::string arguments_of(const std::vector<MemoryChange>& changes);

}  // namespace parka
