#pragma once
#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "engine/evaluation/evaluation.h"
#include "engine/text/text_codec.h"
#include "engine/training/run_records.h"
#include "engine/training/training_run.h"

// The evaluations that a run makes between its steps: the held-out loss (data.eval), named sets, tasks and prompts.
// Each leaves a line in the log, and in metrics.jsonl a record of kind "eval", "eval_set", "task" or "sample".
namespace parka {

// All that a suite evaluates on, as evaluated() names it.
std::set<std::string> evaluated_by(const EvaluationSuite& suite);

// Every training.eval_interval steps and after the last, where there is something to evaluate on.
bool evaluation_is_due(const TrainingConfig& training, const EvaluationSuite& suite, int64_t step);

// The texts of evaluation.prompts as ids, the same on all ranks. Throws Error(kBadInput) where a run has no
// tokenizer for them.
class RunPrompts {
 public:
  RunPrompts(const Config& config, Communicator& communicator);

  size_t size() const { return tokens_.size(); }
  // What the run's model writes behind a prompt, on rank 0; all ranks call it.
  std::string sample(size_t prompt, TrainingRun& run, Communicator& communicator,
                     const BeforeEvaluationBatch& before_each) const;

 private:
  std::unique_ptr<TextCodec> codec_;  // on rank 0
  std::vector<std::vector<int32_t>> tokens_;
  std::vector<int32_t> stop_tokens_;
};

enum class EvaluationEnd : uint8_t {
  kDone,
  kStopped,   // a signal asks the run to stop
  kDeferred,  // some rank has a deferred error, which ends the run when its state is saved
};
// Evaluates the model after the last completed step, on all ranks. Ends early, on all before the same batch, when a
// rank is asked to stop or has a deferred error; of data that cannot be read or has no target it defers one itself.
// Throws Error(kNonFinite), on all ranks, when a loss is not finite, once it is recorded.
EvaluationEnd evaluate_run(TrainingRun& run, Communicator& communicator, const EvaluationSuite& suite,
                           const RunPrompts& prompts, RunRecords& records);

}  // namespace parka
