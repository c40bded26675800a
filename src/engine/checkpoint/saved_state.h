#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "data/data_order.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/config/config.h"

// What the state of a checkpoint says. Its bytes are what was saved, but another version of Parka or another
// program may have saved them: all of these throw Error(kBadInput) that names the checkpoint where something is
// missing or of another type.
namespace parka {

// The checkpoint's own config with `overrides` applied.
Config config_of(const LoadedCheckpoint& checkpoint, const std::vector<std::string>& overrides);

// Longest sequence that an imported model is meant for; `otherwise` for a run's.
int64_t max_positions_of(const LoadedCheckpoint& checkpoint, int64_t otherwise);

// How far a run had come.
struct SavedProgress {
  int64_t applied_steps = 0;
  DataPosition position;
  uint64_t fingerprint = 0;  // TokenFiles::fingerprint
  nlohmann::json files;      // describe_files(); null in a checkpoint that has none
};
// Throws for an imported model, too, which has no progress, and for a progress that no run makes in the
// checkpoint's steps.
SavedProgress read_progress(const LoadedCheckpoint& checkpoint);

}  // namespace parka
