#pragma once
#include <cstdint>

#include "engine/commands/commands.h"
#include "engine/config/config.h"
#include "engine/planning/step_measurement.h"
#include "engine/planning/step_model.h"

namespace parka {

// `parka plan --fit`. Throws Error(kBadInput) where nothing fits.
int run_fit(const PlanOptions& options);

// How the options connect GPUs like the measured one. Throws Error(kBadInput) unless --nodes divides --gpus.
Links links_of(const PlanOptions& options, const StepMeasurement& one);

// Throw Error(kBadInput) unless a step has whole micro-batches, and no more of them than a prediction takes.
void require_whole_micro_batches(const Config& config, int64_t num_gpus);
void require_predicted_batch(const Config& config, int64_t num_gpus);

}  // namespace parka
