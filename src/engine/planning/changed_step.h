#pragma once
#include <cstdint>
#include <optional>

#include "engine/config/config.h"
#include "engine/planning/step_measurement.h"
#include "engine/planning/step_model.h"

namespace parka {

// Bytes that a rank copies to host memory in a step, and as many back.
struct HostCopies {
  int64_t micro_batch = 0;  // in each micro-batch: out beside the blocks' forward, back beside their backward
};
HostCopies host_copies(const Config& config, int64_t num_gpus);

// What a step takes longer for these copies: what they slow the work beside them, and what it waits for the rest.
double host_copy_seconds(const RecordedStep& step, const WorkSeconds& work, const HostCopies& copies,
                         const Links& links);

// Expected steps of a run under changes that save memory (memory_changes.h).
class ChangedSteps {
 public:
  // From a measurement on one GPU, whose config may differ from `config` in what such changes change, too; throws
  // Error(kBadInput) naming other keys that differ. `slowest`: as for measured_work().
  ChangedSteps(const StepMeasurement& one, const Config& config, const Links& links, int64_t num_gpus,
               double slowest);

  // nullopt where the measurement has not what the step needs: other number formats of GEMMs or moments.
  std::optional<StepPrediction> predict(const Config& changed) const;

 private:
  const StepMeasurement& one_;
  WorkSeconds work_;
  Links links_;
  int64_t num_gpus_;
  double measured_copies_;  // host_copy_seconds() of the measured step, which are in what its work took
};

}  // namespace parka
