#pragma once
#include <cstdint>
#include <vector>

#include "comm/communicator.h"
#include "engine/config/config.h"

namespace parka {

// One thing that a rank queues in a step of training.
struct StepAction {
  enum class Kind : uint8_t { kCompute, kAllReduce, kReduceScatter, kAllGather, kWait };
  Kind kind = Kind::kCompute;
  double seconds = 0;  // kCompute: with nothing beside it
  int64_t bytes = 0;   // collectives: of the whole tensor, all ranks' pieces together
  Peers peers = Peers::kAll;
  uint64_t number = 0;  // kWait: for which collective of the step, counted from 1

  bool operator==(const StepAction&) const = default;
};

// What quantizing or transposing a weight reaches of copy bandwidth within a step (docs/results/gpu_fp8.md: 75 to
// 88 %).
inline constexpr double kQuantizeOfCopy = 0.8;

// What a rank's own work takes, in seconds with no collective beside it.
struct ComputeSeconds {
  // Of one micro-batch, and of one block:
  double embedding_forward = 0, block_forward = 0, head = 0, block_backward = 0, embedding_backward = 0;
  // Of a micro-batch that overwrites gradients: clearing those that no GEMM writes.
  double clear_gradients = 0;
  // Of a step:
  double gradient_norm = 0, update = 0, quantize_weights = 0;
  // Of copies within the device, bytes read and written per second: what adding gradients and
  // quantizing gathered weights are counted from.
  double copy_bandwidth = 0;
};

// A step of one of `num_gpus` ranks, in the order in which TrainingRun and ParameterExchange queue it: their
// collectives to the byte, and their waits. Tests hold it against what those really queue.
std::vector<StepAction> schedule_step(const Config& config, int64_t num_gpus, const ComputeSeconds& compute);

}  // namespace parka
