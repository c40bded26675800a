#pragma once
#include <string>
#include <vector>

#include "core/memory/memory_plan.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/config/config.h"
#include "kernels/device/arena.h"
#include "model/model.h"

namespace parka {

// The checkpoint at `path`, which is a checkpoint folder, or a run folder; then it is the newest good one (damaged
// ones are logged). Weights that are in another checkpoint, its base, come with it (attach_base);
// checkpoint.init_from of its config with `overrides` is one of the places where that is looked for. Throws
// Error(kBadInput) if there is no checkpoint or base. All of `ranks` must call this.
LoadedCheckpoint open_checkpoint(const std::string& path, const std::vector<std::string>& overrides = {},
                                 Communicator& ranks = *make_single_communicator());

// The model of a config for inference with its tensors declared: for batches of up to config.training.
// micro_batch_size sequences, and with a cache for generation if `cache` is not empty.
struct DeclaredInference {
  // On a GPU with the workspace that its ops take, which recording them tells.
  DeclaredInference(const Config& config, const CacheShape& cache, DeviceKind device);
  // With a workspace of so many bytes; 0: none.
  DeclaredInference(const Config& config, const CacheShape& cache, int64_t workspace_bytes);

  MemoryPlan plan;
  Model model;
  TensorId workspace;  // of the ops; invalid on the CPU
};

// In which numerics a model is evaluated, for a line of the log: "bf16", or "those of training (recipe coat)".
std::string numerics_of(const Config& config);

// A model with the weights of a checkpoint, for evaluation and generation only.
class InferenceRun {
 public:
  // `config` is that of inference_config_of.
  InferenceRun(Device& device, const LoadedCheckpoint& checkpoint, const Config& config,
               const CacheShape& cache = {});

  const Config& config() const { return config_; }
  Model& model() { return declared_.model; }

 private:
  Config config_;
  DeclaredInference declared_;
  std::unique_ptr<Arena> arena_;
};

}  // namespace parka
