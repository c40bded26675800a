#pragma once
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/memory/memory_plan.h"
#include "engine/config/config.h"
#include "engine/config/config_io.h"

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

// Plans what a rank of `config` on `num_gpus` GPUs allocates under config.distributed. Allocates nothing.
GpuPlan plan_for_gpus(const Config& config, int64_t num_gpus);

// The sums alone.
MemoryBytes planned_memory(const Config& config, int64_t num_gpus);
int64_t planned_bytes(const Config& config, int64_t num_gpus);

// A change of a config that makes a run take less memory.
struct MemoryChange {
  // The effect on a run's results: the same bits; the same but for the order of sums; fewer bits of a number.
  enum class Results : uint8_t { kSameBits, kOtherSums, kOtherPrecision };

  std::string override;  // "section.key=value", as --set takes it
  Results results = Results::kSameBits;
  std::string cost;  // in words

  std::string_view key() const { return std::string_view(override).substr(0, override.find('=')); }
  // Among which changes it is taken, where those with the same bits come first: ZeRO's stages among these, because
  // nothing saves as much for as little, and the number of GPUs decides on the order of sums anyway.
  Results taken_among() const;
};

inline constexpr std::string_view kZeroStageKey = "distributed.zero_stage";

// The changes that `config` does not have yet, from the cheapest to the dearest (docs/troubleshooting.md). If two
// changes have one key, the later saves more, and replaces the earlier.
std::vector<MemoryChange> memory_changes(const Config& config, int64_t num_gpus);

// Changes that make a run fit, and what it then is.
struct MemoryAdvice {
  std::vector<MemoryChange> changes;  // from the cheapest to the dearest, each key once; empty: fits as it is
  int64_t num_gpus = 1;
  MemoryBytes planned = {.gpu = 0, .host = 0};  // for each GPU, with the changes

  std::vector<std::string> overrides() const;
  std::string arguments() const;  // "--set section.key=value --set ...", for a shell
};

// In which order changes are made: that of memory_changes(), or equal bits first, then changes of sums alone.
enum class ChangeOrder : uint8_t { kCheapest, kSameBitsFirst };

// The cheapest changes with which a run on `num_gpus` GPUs plans at most `limit` on each: a fixed list of changes
// is made from the first on until the run fits, and then taken back from the last on as far as it still does. So it
// does not fit without any one of them. nullopt where no more changes save memory and it still does not fit.
std::optional<MemoryAdvice> cheapest_changes(const GivenConfig& config, int64_t num_gpus, const MemoryBytes& limit,
                                             ChangeOrder order = ChangeOrder::kCheapest);

enum class MoreGpus : uint8_t { kWithStages, kWithChanges };

// The fewest GPUs, more than `num_gpus`, that divide the batch and that the run fits on as it is but for its ZeRO
// stage, or, kWithChanges, with the cheapest changes. Each of so many GPUs has `limit_of` of memory. Numbers are
// those up to 8 and multiples of 8 up to 1024; nullopt where none is enough.
std::optional<MemoryAdvice> fewest_gpus(const GivenConfig& config, int64_t num_gpus,
                                        const std::function<MemoryBytes(int64_t gpus)>& limit_of, MoreGpus with);

// Advice in words if fewest_gpus() finds none: it tries only numbers that divide the batch.
std::string advice_without_gpus(const Config& config, int64_t num_gpus);

}  // namespace parka
