#include "engine/training/run_evaluation.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "core/error.h"
#include "core/log/log.h"
#include "engine/training/metrics_log.h"
#include "engine/training/progress.h"
#include "engine/training/stop_signal.h"

namespace parka {
namespace {

struct EndedEarly {  // thrown on all ranks before the same batch
  RunEvaluation::End end;
};

}  // namespace

RunEvaluation::RunEvaluation(TrainingRun& run, Communicator& communicator, RunRecords& records,
                             DeferredError& deferred, std::function<void()> progress)
    : run_(run),
      communicator_(communicator),
      records_(records),
      deferred_(deferred),
      progress_(std::move(progress)) {
  run_.on_evaluation_batch([this](const std::exception_ptr& read_failure) { before_batch(read_failure); });
}

bool RunEvaluation::is_due(int64_t step) const {
  const TrainingConfig& training = run_.config().training;
  if (training.eval_interval == 0 || suite_.empty()) return false;
  return step % training.eval_interval == 0 || step == training.steps;
}

bool RunEvaluation::is_missing(int64_t step, const std::set<std::string>& recorded) const {
  const bool is_missing = is_due(step) && !std::ranges::includes(recorded, names());
  return communicator_.max(communicator_.rank() == 0 && is_missing ? 1.0 : 0.0) > 0;
}

std::set<std::string> RunEvaluation::names() const {
  std::set<std::string> all;
  if (suite_.held_out) all.insert(evaluated({{"kind", "eval"}}));
  for (const EvaluationSuite::Set& set : suite_.sets)
    all.insert(evaluated({{"kind", "eval_set"}, {"set", set.name}}));
  for (const EvalTask& task : suite_.tasks) all.insert(evaluated({{"kind", "task"}, {"task", task.name}}));
  return all;
}

RunEvaluation::End RunEvaluation::evaluate() {
  progress_();
  try {
    if (suite_.held_out) report_loss(run_.evaluate(*suite_.held_out), "held-out", "data.eval", {{"kind", "eval"}});
    for (const EvaluationSuite::Set& set : suite_.sets) {
      report_loss(run_.evaluate(set.files), set.name, set.name, {{"kind", "eval_set"}, {"set", set.name}});
    }
    for (const EvalTask& task : suite_.tasks) report_task(task, run_.evaluate(task));
  } catch (const EndedEarly& early) {
    return early.end;
  }
  return End::kDone;
}

void RunEvaluation::before_batch(const std::exception_ptr& read_failure) {
  progress_();
  deferred_.keep(read_failure);
  const double most = communicator_.max((deferred_ ? 2 : 0) + (stop_signal() != 0 ? 1 : 0));
  if (most > 0) throw EndedEarly{most >= 2 ? End::kDeferred : End::kStopped};
}

// `record` says in metrics.jsonl what was evaluated, `key` in an error. All ranks have the same result.
void RunEvaluation::report_loss(const EvaluationResult& result, const std::string& name, const std::string& key,
                                nlohmann::ordered_json record) {
  if (result.num_targets == 0) end_without_targets(key, result);  // there is no loss to record
  log_info("step {}: {} loss {:.4f} (perplexity {:.3f}) over {} tokens", run_.completed_steps(), name, result.loss,
           std::exp(result.loss), format_count(static_cast<double>(result.num_targets)));
  record.update({{"step", run_.completed_steps()}, {"loss", result.loss}, {"num_targets", result.num_targets}});
  records_.write(record);
  check_evaluation(key, result);
}

// Because of the data, not of the weights, which are saved. On all ranks.
void RunEvaluation::end_without_targets(const std::string& key, const EvaluationResult& result) {
  try {
    check_evaluation(key, result);
  } catch (const Error&) {
    deferred_.keep(std::current_exception());
  }
  throw EndedEarly{End::kDeferred};
}

void RunEvaluation::report_task(const EvalTask& task, const TaskResult& result) {
  log_info("step {}: {} {} {:.4f} over {} documents", run_.completed_steps(), task.name, name_of(task.metric),
           result.score, result.documents.size());
  records_.write({{"kind", "task"},
                  {"step", run_.completed_steps()},
                  {"task", task.name},
                  {"metric", name_of(task.metric)},
                  {"score", result.score},
                  {"acc", result.acc},
                  {"len_norm", result.len_norm},
                  {"bits_per_byte", result.bits_per_byte},
                  {"documents", result.documents.size()}});
}

}  // namespace parka
