#pragma once
#include <string>
#include <vector>

#include "core/memory_plan.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/config/config.h"
#include "kernels/device/arena.h"
#include "model/model.h"

namespace parka {

// The checkpoint at `path`, which is a checkpoint folder, or a run folder; then it is the newest good one (damaged
// ones are logged). Throws Error(kBadInput) if there is none. All ranks of the group must call this.
LoadedCheckpoint open_checkpoint(const std::string& path, const LoadGroup& group = {});

// A model with the weights of a checkpoint, for evaluation and generation only.
class InferenceRun {
 public:
  // `config` is the checkpoint's; batches of up to config.training.micro_batch_size sequences. With a cache for
  // generation if `cache` is not empty.
  InferenceRun(Device& device, const LoadedCheckpoint& checkpoint, const Config& config,
               const CacheShape& cache = {});

  const Config& config() const { return config_; }
  Model& model() { return model_; }

 private:
  Config config_;
  MemoryPlan plan_;
  Model model_;
  std::unique_ptr<Arena> arena_;
};

}  // namespace parka
