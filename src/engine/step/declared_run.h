#pragma once
#include <cstdint>
#include <optional>

#include "core/memory/memory_plan.h"
#include "core/placement.h"
#include "engine/config/config.h"
#include "engine/step/integrity.h"
#include "engine/step/telemetry.h"
#include "kernels/device/device.h"
#include "model/model.h"
#include "optim/optimizer.h"

namespace parka {

// How a run of `size` ranks divides them, and what they divide, for one of them. Throws Error(kBadInput) where
// distributed.shard_size, context_parallel or expert_parallel, or released gradients do not go with that number of
// ranks.
Zero zero_of(const Config& config, int64_t rank, int64_t size);

// Model and optimizer of a config with all their tensors declared; nothing is allocated. The output of `parka plan`
// and the memory of a run come from the same declarations.
struct DeclaredRun {
  // With the workspace that the ops of the run take, which recording them tells (recorded_step.h).
  DeclaredRun(const Config& config, DeviceKind device, const Zero& zero = {});
  // With a workspace of so many bytes; 0: none.
  DeclaredRun(const Config& config, DeviceKind device, const Zero& zero, int64_t workspace_bytes);

  MemoryPlan plan;
  Model model;
  Optimizer optimizer;
  std::optional<Telemetry> telemetry;  // absent when telemetry.interval is 0
  IntegrityChecks checks;
  TensorId workspace;        // of the ops; invalid on the CPU
  TensorId exchange_buffer;  // Communicator::set_exchange_buffer(); on GPUs with divided gradients
  TensorId target_share;     // [1] fp32, 1 / targets of the step; only where steps differ in that
};

}  // namespace parka
