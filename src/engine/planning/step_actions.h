#pragma once
#include <cstdint>
#include <functional>
#include <vector>

#include "comm/communicator.h"
#include "engine/step/recorded_step.h"

namespace parka {

// One thing that a rank queues in a step of training, as the step model takes it.
struct StepAction {
  enum class Kind : uint8_t {
    kCompute,
    kAllReduce,
    kReduceScatter,
    kAllGather,
    kAllToAll,
    kWait,
    kTransfer,
    kRepeat
  };
  Kind kind = Kind::kCompute;
  double seconds = 0;  // kCompute: with nothing beside it
  int64_t bytes = 0;   // collectives: see RecordedCollective
  Peers peers = Peers::kAll;
  // kWait: for which collective of the step, counted from 1, without those that are not put down; kRepeat: how many
  // of the next actions are queued `times` more times, which are not put down
  uint64_t number = 0;
  int64_t times = 0;
  RecordedTransfer transfer = {};  // kTransfer: to or from host memory

  bool operator==(const StepAction&) const = default;
};

// The time of a rank's own work, with no collective beside it.
struct WorkSeconds {
  std::function<double(const RecordedOp&)> of_op;
  // Bytes read and written per second: of zeros that are written, and of pieces of gradients that are added up.
  double copy_bandwidth = 0;
};

// The whole step. Work that nothing comes between is one action, but for that of several micro-batches. Adding up
// pieces runs beside other work, which is taken to leave no multiprocessor idle for it. A part that is queued very
// often is put down only the first times: by then each takes as long as the one before.
std::vector<StepAction> step_actions(const RecordedStep& step, const WorkSeconds& seconds);

// The time of all of the step's own work.
double compute_seconds(const RecordedStep& step, const WorkSeconds& seconds);

}  // namespace parka
