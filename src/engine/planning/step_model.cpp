#include "engine/planning/step_model.h"

#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "core/tensor.h"
#include "engine/planning/stream_timeline.h"

namespace parka {
namespace {

using Kind = StepAction::Kind;

// Bytes that each GPU sends in a ring: all shards but one, for a reduction and again for the gathering of its
// result.
double bytes_sent(int64_t num_gpus, Kind kind, int64_t bytes) {
  const double once =
      static_cast<double>(bytes) * static_cast<double>(num_gpus - 1) / static_cast<double>(num_gpus);
  return kind == Kind::kAllReduce ? 2 * once : once;
}

// Bytes that each GPU reads and writes in its memory. An all-gather reads the local shard once per GPU and writes
// every shard. A reduction reads what it sends and writes what it receives.
double bytes_in_memory(int64_t num_gpus, Kind kind, int64_t bytes) {
  if (kind == Kind::kAllGather) return 2 * static_cast<double>(bytes);
  return 2 * bytes_sent(num_gpus, kind, bytes);
}

double latency(const Links& links, int64_t num_gpus, Kind kind) {
  const auto gpus = static_cast<double>(num_gpus), nodes = static_cast<double>(links.nodes);
  if (kind == Kind::kAllReduce) {
    const double up = (gpus / nodes - 1) * links.link_latency + std::ceil(std::log2(nodes)) * links.network_latency;
    return links.start_latency + 2 * up;
  }
  if (kind == Kind::kAllToAll) {  // all messages at once
    return links.start_latency + (gpus > nodes ? links.link_latency : 0) + (nodes > 1 ? links.network_latency : 0);
  }
  return links.start_latency + (gpus - nodes) * links.link_latency + (nodes - 1) * links.network_latency;
}

// The GPUs of a collective, and the nodes that they are in.
struct Group {
  int64_t num_gpus;
  Links links;
};
Group group_of(Peers peers, const Links& links, int64_t num_gpus, int64_t shard_size, int64_t context_size) {
  const int64_t per_node = num_gpus / links.nodes;
  Group group = {num_gpus, links};
  if (peers == Peers::kAll) return group;
  const bool is_across = peers == Peers::kAcross;
  const int64_t consecutive = peers == Peers::kContext ? context_size : shard_size;
  group.num_gpus = is_across ? num_gpus / consecutive : consecutive;
  // A group spans as few nodes as possible. Of the ranks across groups, each node has as many as it has groups.
  const int64_t in_a_node =
      is_across ? std::max<int64_t>(1, per_node / consecutive) : std::min(consecutive, per_node);
  group.links.nodes = ceil_div(group.num_gpus, in_a_node);
  return group;
}

void transfer(const RecordedTransfer& what, const Links& links, StreamTimeline& timeline,
              StepPrediction& prediction) {
  using Transfer = RecordedTransfer::Kind;
  const auto bytes = static_cast<double>(what.bytes);
  PARKA_REQUIRE(bytes == 0 || links.host_bandwidth > 0);
  switch (what.kind) {
    case Transfer::kFollowDevice: timeline.follow_device(); break;
    case Transfer::kLoad:
      timeline.load(what.slot, bytes / links.host_bandwidth);
      prediction.host_bytes_in += bytes;
      break;
    case Transfer::kWaitLoaded: timeline.wait_loaded(what.slot); break;
    case Transfer::kSave:
      timeline.save(bytes / links.host_bandwidth);
      prediction.host_bytes_out += bytes;
      break;
    case Transfer::kWaitSaved: timeline.wait_saved(); break;
  }
}

// What the actions so far take.
class PredictedStep {
 public:
  PredictedStep(const Links& links, int64_t num_gpus, int64_t shard_size, int64_t context_size)
      : links_(links), num_gpus_(num_gpus), shard_size_(shard_size), context_size_(context_size) {}

  void queue(const StepAction& action) {
    switch (action.kind) {
      case Kind::kCompute:
        timeline_.compute(action.seconds);
        prediction_.compute_seconds += action.seconds;
        break;
      case Kind::kWait: timeline_.wait(action.number); break;
      case Kind::kTransfer: transfer(action.transfer, links_, timeline_, prediction_); break;
      case Kind::kAllReduce:
      case Kind::kReduceScatter:
      case Kind::kAllGather:
      case Kind::kAllToAll: queue_collective(action); break;
      case Kind::kRepeat: throw_internal("a repetition within another");
    }
  }

  void repeat_since(const PredictedStep& before, int64_t times) {
    timeline_.repeat_since(before.timeline_, times);
    for (const auto sum : {&StepPrediction::compute_seconds, &StepPrediction::communicated_bytes,
                           &StepPrediction::host_bytes_in, &StepPrediction::host_bytes_out}) {
      prediction_.*sum += static_cast<double>(times) * (prediction_.*sum - before.prediction_.*sum);
    }
  }

  StepPrediction prediction() const {
    StepPrediction result = prediction_;
    result.seconds = timeline_.now();
    result.slowed_seconds = timeline_.slowed_seconds();
    result.exposed_seconds = timeline_.exposed_seconds();
    result.host_exposed_seconds = timeline_.host_exposed_seconds();
    result.communication_seconds = timeline_.communication_seconds();
    return result;
  }

 private:
  void queue_collective(const StepAction& action) {
    const Group group = group_of(action.peers, links_, num_gpus_, shard_size_, context_size_);
    if (group.num_gpus == 1) {
      timeline_.collective(0, 0);
      return;
    }
    const double seconds = collective_seconds(group.links, group.num_gpus, action.kind, action.bytes);
    PARKA_REQUIRE(links_.memory_bandwidth > 0);
    const double in_memory = bytes_in_memory(group.num_gpus, action.kind, action.bytes) / links_.memory_bandwidth;
    constexpr double kMost = 0.9;  // something gets on
    timeline_.collective(seconds, std::min(kMost, links_.interference * in_memory / seconds));
    prediction_.communicated_bytes += bytes_sent(group.num_gpus, action.kind, action.bytes);
  }

  const Links& links_;
  int64_t num_gpus_, shard_size_, context_size_;
  StreamTimeline timeline_;
  StepPrediction prediction_;  // but for the times, which the timeline has
};

}  // namespace

double collective_seconds(const Links& links, int64_t num_gpus, Kind kind, int64_t bytes) {
  PARKA_REQUIRE(num_gpus > 1 && links.nodes >= 1 && links.nodes <= num_gpus);
  if (kind == Kind::kAllToAll) {
    const double to_one = static_cast<double>(bytes) / static_cast<double>(num_gpus);
    const int64_t in_a_node = num_gpus / links.nodes;
    const double near = to_one * static_cast<double>(in_a_node - 1),
                 far = to_one * static_cast<double>(num_gpus - in_a_node);
    return latency(links, num_gpus, kind) + near / links.link_bandwidth +
           (far > 0 ? far / links.network_bandwidth : 0);
  }
  double bandwidth = links.link_bandwidth;
  if (links.nodes > 1) {
    // A ring leaves a node once, and there are as many rings as it takes to use all of a node's network cards.
    const int64_t gpus_per_node = num_gpus / links.nodes;  // of the node with fewest
    const double out = links.network_bandwidth * static_cast<double>(gpus_per_node);
    bandwidth = std::min(bandwidth, out);
  }
  return latency(links, num_gpus, kind) + bytes_sent(num_gpus, kind, bytes) / bandwidth;
}

StepPrediction predict_step(const std::vector<StepAction>& actions, const Links& links, int64_t num_gpus,
                            int64_t shard_size, int64_t context_size) {
  PredictedStep step(links, num_gpus, shard_size == 0 ? num_gpus : shard_size, context_size);
  for (size_t i = 0; i < actions.size(); ++i) {
    if (actions[i].kind != Kind::kRepeat) {
      step.queue(actions[i]);
      continue;
    }
    const PredictedStep before = step;
    const StepAction& repeat = actions[i];
    for (uint64_t n = 0; n < repeat.number; ++n) step.queue(actions[++i]);
    step.repeat_since(before, repeat.times);
  }
  return step.prediction();
}

}  // namespace parka
