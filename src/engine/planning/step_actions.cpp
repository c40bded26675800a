#include "engine/planning/step_actions.h"

#include <algorithm>
#include <variant>

#include "core/error.h"

namespace parka {
namespace {

using Kind = StepAction::Kind;

constexpr int64_t kMostPutDown = 64;  // of the times that a part is queued

Kind kind_of(RecordedCollective::Kind kind) {
  switch (kind) {
    case RecordedCollective::Kind::kAllReduce: return Kind::kAllReduce;
    case RecordedCollective::Kind::kReduceScatter: return Kind::kReduceScatter;
    case RecordedCollective::Kind::kAllGather: return Kind::kAllGather;
    case RecordedCollective::Kind::kAllToAll: return Kind::kAllToAll;
  }
  throw_internal("unknown collective {}", static_cast<int>(kind));
}

// Puts down the work of a part. The number of a kWait is how many collectives are newer.
class PartActions {
 public:
  explicit PartActions(const WorkSeconds& seconds) : seconds_(seconds) {}

  void operator()(const RecordedOp& op) { compute(seconds_.of_op(op)); }
  void operator()(const RecordedFill& fill) { move(fill.bytes); }
  void operator()(const RecordedTransfer& transfer) {
    actions_.push_back({.kind = Kind::kTransfer, .transfer = transfer});
  }
  void operator()(const RecordedCollective& collective) {
    move(collective.summed_bytes);
    actions_.push_back({.kind = kind_of(collective.kind), .bytes = collective.bytes, .peers = collective.peers});
  }
  void operator()(const RecordedWait& wait) { actions_.push_back({.kind = Kind::kWait, .number = wait.newer}); }

  const std::vector<StepAction>& actions() const { return actions_; }

 private:
  void move(int64_t bytes) { compute(static_cast<double>(bytes) / seconds_.copy_bandwidth); }
  void compute(double seconds) {
    if (seconds == 0) return;
    if (actions_.empty() || actions_.back().kind != Kind::kCompute) actions_.push_back({.kind = Kind::kCompute});
    actions_.back().seconds += seconds;
  }

  const WorkSeconds& seconds_;
  std::vector<StepAction> actions_;
};

}  // namespace

double compute_seconds(const RecordedStep& step, const WorkSeconds& seconds) {
  double sum = 0;
  for (const RecordedStep::Part& part : step.parts) {
    PartActions once(seconds);
    for (const RecordedStep::Work& work : part.work) std::visit(once, work);
    for (const StepAction& action : once.actions()) sum += static_cast<double>(part.times) * action.seconds;
  }
  return sum;
}

std::vector<StepAction> step_actions(const RecordedStep& step, const WorkSeconds& seconds) {
  std::vector<StepAction> actions;
  uint64_t queued = 0;  // collectives
  for (const RecordedStep::Part& part : step.parts) {
    PartActions once(seconds);
    for (const RecordedStep::Work& work : part.work) std::visit(once, work);
    const int64_t times = std::min(part.times, kMostPutDown);
    for (int64_t i = 0; i < times; ++i) {
      if (i + 1 == times && times < part.times) {
        actions.push_back({.kind = Kind::kRepeat, .number = once.actions().size(), .times = part.times - times});
      }
      for (StepAction action : once.actions()) {
        if (action.kind == Kind::kWait) {
          PARKA_REQUIRE(action.number < queued);
          action.number = queued - action.number;
        } else if (action.kind != Kind::kCompute && action.kind != Kind::kTransfer) {
          ++queued;
        }
        actions.push_back(action);
      }
    }
  }
  return actions;
}

}  // namespace parka
