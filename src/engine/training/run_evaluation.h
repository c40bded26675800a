#pragma once
#include <cstdint>
#include <exception>
#include <functional>
#include <set>
#include <string>

#include <nlohmann/json.hpp>

#include "comm/communicator.h"
#include "engine/evaluation/evaluation.h"
#include "engine/evaluation/evaluation_suite.h"
#include "engine/training/deferred_error.h"
#include "engine/training/run_records.h"
#include "engine/training/training_run.h"

namespace parka {

// The evaluations that a run makes between its steps: the held-out loss (data.eval), named sets and tasks
// (evaluation). Each leaves a line in the log, and in metrics.jsonl a record of kind "eval", "eval_set" or "task";
// losses are in nats per token. All ranks must make the same calls.
class RunEvaluation {
 public:
  // All that is referred to must outlive it. `progress` is called before each batch.
  RunEvaluation(TrainingRun& run, Communicator& communicator, RunRecords& records, DeferredError& deferred,
                std::function<void()> progress);
  RunEvaluation(const RunEvaluation&) = delete;  // the run refers to it
  RunEvaluation& operator=(const RunEvaluation&) = delete;

  // Before all else opens what the config evaluates on. Throws Error(kBadInput) for files that cannot be used.
  void open() { suite_ = open_suite(run_.config()); }
  const EvaluationSuite& suite() const { return suite_; }

  // All that it evaluates on, as evaluated() names it.
  std::set<std::string> names() const;

  // Every training.eval_interval steps and after the last, where there is something to evaluate on.
  bool is_due(int64_t step) const;
  // Whether the one that is due after `step` lacks a record: it was cut off, never began, or the config evaluates
  // on more by now. `recorded`: what metrics.jsonl has, by evaluated(), of which rank 0 knows.
  bool is_missing(int64_t step, const std::set<std::string>& recorded) const;

  enum class End : uint8_t {
    kDone,
    kStopped,   // a signal asks the run to stop
    kDeferred,  // some rank has a deferred error, which ends the run when its state is saved
  };
  // Evaluates the model after the last completed step. Ends early, on all ranks before the same batch, when a rank
  // is asked to stop or has a deferred error; of data that cannot be read or has no target it defers one itself.
  // Throws Error(kNonFinite), on all ranks, when a loss is not finite, once it is recorded.
  End evaluate();

 private:
  void before_batch(const std::exception_ptr& read_failure);
  void report_loss(const EvaluationResult& result, const std::string& name, const std::string& key,
                   nlohmann::ordered_json record);
  [[noreturn]] void end_without_targets(const std::string& key, const EvaluationResult& result);
  void report_task(const EvalTask& task, const TaskResult& result);

  TrainingRun& run_;
  Communicator& communicator_;
  RunRecords& records_;
  DeferredError& deferred_;
  std::function<void()> progress_;
  EvaluationSuite suite_;
};

}  // namespace parka
