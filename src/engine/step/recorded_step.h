#pragma once
#include <cstdint>
#include <set>
#include <string>
#include <variant>
#include <vector>

#include "comm/recording_communicator.h"
#include "core/placement.h"
#include "engine/config/config.h"
#include "kernels/device/recording_device.h"
#include "kernels/ops/gemm/gemm.h"

// The step that a run would queue, without a GPU, on a device and a communicator that record.
namespace parka {

// The work that a rank queues in a step of training, in its order.
struct RecordedStep {
  using Work = std::variant<RecordedOp, RecordedFill, RecordedTransfer, RecordedCollective, RecordedWait>;
  struct Part {
    std::vector<Work> work;
    int64_t times = 1;  // that it is queued one after the other
  };
  // The first micro-batch; those between, which are alike; the last one; the update with what follows it. The first
  // is also the last where the step has no other.
  std::vector<Part> parts;
};

// Records rank 0 of `num_gpus`, whose number must divide the batch of `config` into whole micro-batches. All ops
// with these names are one kernel (Device::fuses()).
RecordedStep record_step(const Config& config, int64_t num_gpus, const std::set<std::string>& one_kernel = {});

// A GEMM of a step. Its tensors have addresses without memory, which are aligned as those of a run.
struct RecordedProduct {
  Gemm gemm;
  int64_t count = 0;  // in a step
};

// The products of the step that record_step() records, each key_of() once, those with the most FLOP first.
std::vector<RecordedProduct> record_products(const Config& config, int64_t num_gpus);

// The workspace that the ops of a run take on a GPU, where a rank holds what `zero` says: those of training with
// its telemetry and checks, and of evaluation.
int64_t record_workspace_bytes(const Config& config, const Zero& zero);

}  // namespace parka
