#pragma once
#include <cstdint>
#include <vector>

#include "engine/planning/step_actions.h"

namespace parka {

// How the GPUs of a run are connected, and what communication costs the work beside it.
struct Links {
  int64_t nodes = 1;             // with as many GPUs each
  double link_bandwidth = 0;     // NCCL's bus bandwidth within a node, bytes per second
  double network_bandwidth = 0;  // of one GPU to other nodes, bytes per second
  double start_latency = 0;      // of a collective, in seconds; then of each hop of its ring
  double link_latency = 0;
  double network_latency = 0;
  double memory_bandwidth = 0;  // of a GPU, bytes read and written per second
  double host_bandwidth = 0;    // between a GPU and its host's memory, bytes per second in each direction
  // What communication costs the work beside it, in times of what the bytes that it reads and writes in a GPU's
  // memory take at memory_bandwidth.
  double interference = 0;
};

// What a collective of `num_gpus` GPUs takes alone. Rings, whose bus bandwidth is that of the slower of a GPU's
// links and a node's way out; sums that all keep (kAllReduce) go between nodes as trees. An all-to-all is no ring:
// each GPU sends to every other, over its own links and its own way into the network.
double collective_seconds(const Links& links, int64_t num_gpus, StepAction::Kind kind, int64_t bytes);

struct StepPrediction {
  double seconds = 0;               // of a step; the sum of the next four
  double compute_seconds = 0;       // of the rank's own work, alone
  double slowed_seconds = 0;        // that this work takes longer beside communication
  double exposed_seconds = 0;       // that it waits for communication
  double host_exposed_seconds = 0;  // and for copies to or from host memory
  double communication_seconds = 0;
  double communicated_bytes = 0;                 // that a GPU sends
  double host_bytes_in = 0, host_bytes_out = 0;  // that it copies from and to host memory

  double hidden_fraction() const {  // of the communication; 1 where there is none
    return communication_seconds > 0 ? 1 - exposed_seconds / communication_seconds : 1;
  }
};
// Of a run whose groups (Peers::kGroup) have `shard_size` GPUs; 0: all. Those of Peers::kContext have
// `context_size`.
StepPrediction predict_step(const std::vector<StepAction>& actions, const Links& links, int64_t num_gpus,
                            int64_t shard_size = 0, int64_t context_size = 1);

}  // namespace parka
