#pragma once
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "core/memory/memory_plan.h"
#include "engine/config/config.h"

namespace parka {

// The default for a node.
inline constexpr int64_t kGpusPerNode = 8;

// Bytes of a GPU that the CUDA context, the kernels' code and cuBLASLt take beside the plan: measured on an
// H200 with CUDA 13.0 (docs/results/memory.md), 0.293 and 0.302 GB for models of 1 and 7 billion parameters.
// NCCL 2.28 took 0.94 to 1.27 GB more on two and four of them, and 0.268 GB are the stacks it needs.
inline constexpr int64_t kContextBytes = 302'000'000, kNcclBytes = 1'203'000'000;
inline int64_t nccl_bytes(int64_t num_gpus) { return num_gpus > 1 ? kNcclBytes : 0; }
inline int64_t context_bytes(int64_t num_gpus) { return kContextBytes + nccl_bytes(num_gpus); }

// NCCL takes so much more for each group of ranks that is neither one rank nor all of them: the shards of
// distributed.shard_size, the ranks across them, those that share sequences. Two groups took 0.79 GB
// on each of four H200s (docs/results/memory.md).
inline constexpr int64_t kNcclGroupBytes = 396'000'000;
int64_t group_bytes(const Config& config, int64_t num_gpus);

// Bytes that a rank plans, or may: on its GPU, and in host memory what the run cannot do without.
struct MemoryBytes {
  static constexpr int64_t kUnlimited = std::numeric_limits<int64_t>::max();
  int64_t gpu = kUnlimited, host = kUnlimited;

  bool within(const MemoryBytes& limit) const { return gpu <= limit.gpu && host <= limit.host; }
};

// The memory of one GPU of a run, line by line.
struct GpuPlan {
  struct Line {
    std::string category;
    int64_t unsharded_bytes;  // as if there were one GPU
    int64_t bytes;            // on each of num_gpus
  };
  std::vector<Line> lines;
  int64_t total_bytes = 0;  // sum of `bytes`
  // In memory of the process beside each GPU: tensors, by category; what offloaded blocks keep; what checkpoints
  // that are saved beside the training are copied to.
  std::vector<MemoryPlan::CategoryTotal> host_lines;
  int64_t host_bytes = 0;
  int64_t staging_bytes = 0;
  double saved_bytes_per_token_layer = 0;  // kept for backward, per token and block
};

// The plan of `config` on `num_gpus` GPUs under config.distributed: what a rank of such a run allocates. Allocates
// nothing.
GpuPlan plan_for_gpus(const Config& config, int64_t num_gpus);

// The sums alone.
MemoryBytes planned_memory(const Config& config, int64_t num_gpus);
int64_t planned_bytes(const Config& config, int64_t num_gpus);

}  // namespace parka
