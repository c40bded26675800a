#pragma once
#include <cstdint>
#include <optional>

#include "data/token_files.h"
#include "engine/config/config.h"
#include "engine/training/speed.h"
#include "engine/training/training_run.h"
#include "kernels/device/device.h"

// The lines that a run leaves in its log, beside its progress.
namespace parka {

// At the start: the size of the model and the memory that is planned for it, and what it trains on.
void log_model(const TrainingRun& run, const ModelSpeed& speed);
void log_data(const TokenFiles& data, const Config& config);
// Warns where a run with more checkpoints than it keeps, as after a smaller checkpoint.keep, will remove some.
void log_removals(const CheckpointConfig& config);

// True if the config ends the run at a step whose loss or gradients are not finite, the last of `skipped_in_a_row`.
bool ends_run(const Config& config, int64_t skipped_in_a_row);
// Throws Error(kNonFinite) for that step. `saved_step`: the newest checkpoint's, if it has the state before.
[[noreturn]] void throw_bad_step(const StepReport& report, const Config& config, int64_t skipped_in_a_row,
                                 std::optional<int64_t> saved_step);
// Warns of a step that was skipped, because it is not finite or a spike.
void log_skipped_step(const StepReport& report, const Config& config);

// At the end: the memory in use; where the model is, and what can be done with it. `newest_step`: of a checkpoint.
void log_memory(const TrainingRun& run, const Device& device);
void log_end(const Config& config, int64_t step, int64_t newest_step);

}  // namespace parka
