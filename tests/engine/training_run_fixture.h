#pragma once
#include <cstdint>
#include <functional>
#include <string>

#include "engine/config/config_io.h"
#include "engine/training/training_run.h"
#include "tests/engine/checkpoint_fixture.h"
#include "tests/engine/written_tokens.h"

// A run of a tiny model on 40 sequences, ten steps of which are an epoch.
namespace parka::test {

inline constexpr int64_t kSequence = 16;

inline Config tiny_config(const std::string& folder, const std::string& recipe) {
  write_tokens(folder + "/train.npy", 40 * kSequence);
  return parse_config(
      {{"model", {{"vocab_size", 64}, {"d_model", 32}, {"num_layers", 2}, {"num_heads", 2}, {"d_ffn", 64}}},
       {"precision", {{"recipe", recipe}}},
       {"optimizer", {{"lr", 3e-3}, {"schedule", {{"kind", "constant"}}}}},
       {"data", {{"train", {folder + "/train.npy"}}, {"sequence_length", kSequence}}},
       {"training", {{"steps", 10}, {"global_batch_size", 4}, {"micro_batch_size", 2}}},
       {"checkpoint", {{"folder", folder + "/run"}}}},
      "test");
}

// Saves a run's state after `damage` has changed it, and loads the checkpoint.
inline LoadedCheckpoint saved(TrainingRun& run, const std::string& folder,
                              const std::function<void(CheckpointContents&)>& damage) {
  CheckpointContents contents = run.snapshot();
  damage(contents);
  save_checkpoint(folder, contents, {});
  return load_checkpoint(list_checkpoints(folder).front().path);
}

}  // namespace parka::test
