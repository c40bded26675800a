#pragma once
#include <string>
#include <vector>

#include "core/memory_plan.h"
#include "engine/checkpoint.h"
#include "engine/config.h"
#include "kernels/arena.h"
#include "model/model.h"

namespace parka {

// The checkpoint at `path`: a checkpoint folder itself, or a run folder, whose newest good one is taken (damaged
// ones are logged). Throws Error(kBadInput) when there is none.
LoadedCheckpoint open_checkpoint(const std::string& path);

// A model with the weights of a checkpoint, for evaluation and generation only.
class InferenceRun {
 public:
  // The checkpoint's own config with `overrides` applied; batches of up to micro_batch sequences.
  InferenceRun(Device& device, const LoadedCheckpoint& checkpoint, const std::vector<std::string>& overrides,
               int64_t micro_batch);

  const Config& config() const { return config_; }
  Model& model() { return model_; }

 private:
  Config config_;
  MemoryPlan plan_;
  Model model_;
  std::unique_ptr<Arena> arena_;
};

}  // namespace parka
