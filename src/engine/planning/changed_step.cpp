#include "engine/planning/changed_step.h"

#include <algorithm>
#include <variant>

#include "core/error.h"
#include "engine/step/declared_run.h"

namespace parka {
namespace {

double section_seconds(const RecordedStep::Part& part, StepSection section, const WorkSeconds& work) {
  double sum = 0;
  for (const RecordedStep::Work& done : part.work) {
    const auto* op = std::get_if<RecordedOp>(&done);
    if (op != nullptr && op->section == section) sum += work.of_op(*op);
  }
  return sum;
}

}  // namespace

HostCopies host_copies(const Config& config, int64_t num_gpus) {
  HostCopies copies;
  if (config.precision.offload_blocks > 0) {
    const Zero zero = zero_of(config, 0, num_gpus);
    const DeclaredRun run(config, DeviceKind::kCuda, zero, /*workspace_bytes=*/0);
    copies.micro_batch = run.model.host_bytes(run.plan);
  }
  return copies;
}

double host_copy_seconds(const RecordedStep& step, const WorkSeconds& work, const HostCopies& copies,
                         const Links& links) {
  if (copies.micro_batch == 0) return 0;
  PARKA_REQUIRE(links.host_bandwidth > 0 && links.memory_bandwidth > 0);
  const auto bytes = static_cast<double>(copies.micro_batch);
  const double copy = bytes / links.host_bandwidth, slowdown = links.interference * bytes / links.memory_bandwidth;
  double sum = 0;
  for (const RecordedStep::Part& part : step.parts) {
    const double forward = section_seconds(part, StepSection::kBlockForward, work);
    if (forward == 0) continue;  // the update
    const double backward = section_seconds(part, StepSection::kBlockBackward, work);
    // Blocks that are copied are spread evenly over the model, so that copies run beside all of it.
    const double longer = std::max(slowdown, copy - forward) + std::max(slowdown, copy - backward);
    sum += static_cast<double>(part.times) * longer;
  }
  return sum;
}

ChangedSteps::ChangedSteps(const StepMeasurement& one, const Config& config, const Links& links, int64_t num_gpus,
                           double slowest)
    : one_(one), work_(measured_work(one, slowest)), links_(links), num_gpus_(num_gpus) {
  require_same_speed(one, config, SpeedOf::kBeforeChanges);
  const RecordedStep step = record_step(one.config, 1, one.one_kernel());
  measured_copies_ = host_copy_seconds(step, work_, host_copies(one.config, 1), links_);
}

std::optional<StepPrediction> ChangedSteps::predict(const Config& changed) const {
  if (!speed_differences(one_.config, changed, SpeedOf::kBeforeChanges).empty()) return std::nullopt;
  const RecordedStep step = record_step(changed, num_gpus_, one_.one_kernel());
  StepPrediction prediction = predict_step(step_actions(step, work_), links_, num_gpus_,
                                           changed.distributed.shard_size, changed.distributed.context_parallel);
  const double copies = host_copy_seconds(step, work_, host_copies(changed, num_gpus_), links_) - measured_copies_;
  prediction.host_exposed_seconds += copies;
  prediction.seconds += copies;
  return prediction;
}

}  // namespace parka
