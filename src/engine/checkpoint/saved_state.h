#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "data/data_order.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/config/config.h"
#include "optim/spike_guard.h"

// Readers of a checkpoint's state. Its bytes are intact, but another version or program may have written them. So
// all throw Error(kBadInput), which names the checkpoint, if something is missing or has another type.
namespace parka {

// The checkpoint's own config.
Config config_of(const LoadedCheckpoint& checkpoint);
Config config_of(const json& state, const std::string& path);
// The config to evaluate or sample with: the checkpoint's, of one process with all weights on its device, with
// `overrides` applied, which must not make another model of its weights.
Config inference_config_of(const LoadedCheckpoint& checkpoint, const std::vector<std::string>& overrides);

// The key of the following in the state of what was imported.
inline constexpr const char* kMaxPositionsKey = "max_positions";
// The longest sequence that an imported model supports; `otherwise` for a checkpoint of a run.
int64_t max_positions_of(const LoadedCheckpoint& checkpoint, int64_t otherwise);

// The progress of a run.
struct SavedProgress {
  int64_t applied_steps = 0;
  DataPosition position;
  uint64_t fingerprint = 0;                    // TokenFiles::fingerprint
  json files;                                  // describe_files(); null in a checkpoint that has none
  json source_sequences;                       // of a mixture; null where none is known
  double last_norm = 0;                        // of gradients; 0 where optimizer.release_gradients was off
  int64_t skipped_in_a_row = 0;                // newest steps that were not finite; 0 where the state does not say
  std::vector<SpikeGuard::Step> recent_steps;  // the oldest first; none in a run that had no training.spike_window
};
// Throws also for an imported model, which has no progress, and for progress of another step.
SavedProgress read_progress(const LoadedCheckpoint& checkpoint);

}  // namespace parka
