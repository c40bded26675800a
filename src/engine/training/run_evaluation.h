#pragma once
#include <cstdint>
#include <set>
#include <string>

#include "comm/communicator.h"
#include "engine/evaluation/evaluation.h"
#include "engine/training/run_records.h"
#include "engine/training/training_run.h"

// The evaluations that a run makes between its steps: the held-out loss (data.eval), named sets and tasks. Each
// leaves a line in the log, and in metrics.jsonl a record of kind "eval", "eval_set" or "task".
namespace parka {

// All that a suite evaluates on, as evaluated() names it.
std::set<std::string> evaluated_by(const EvaluationSuite& suite);

// Every training.eval_interval steps and after the last, where there is something to evaluate on.
bool evaluation_is_due(const TrainingConfig& training, const EvaluationSuite& suite, int64_t step);

enum class EvaluationEnd : uint8_t {
  kDone,
  kStopped,   // a signal asks the run to stop
  kDeferred,  // some rank has a deferred error, which ends the run when its state is saved
};
// Evaluates the model after the last completed step, on all ranks. Ends early, on all before the same batch, when a
// rank is asked to stop or has a deferred error; of data that cannot be read or has no target it defers one itself.
// Throws Error(kNonFinite), on all ranks, when a loss is not finite, once it is recorded.
EvaluationEnd evaluate_run(TrainingRun& run, Communicator& communicator, const EvaluationSuite& suite,
                           RunRecords& records);

}  // namespace parka
