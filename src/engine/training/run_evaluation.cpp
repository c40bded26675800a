#include "engine/training/run_evaluation.h"

#include <algorithm>
#include <cmath>
#include <exception>
#include <utility>

#include "core/error.h"
#include "core/heartbeat.h"
#include "core/log/log.h"
#include "engine/evaluation/generator.h"
#include "engine/files/json_text.h"
#include "engine/text/tokenizer_files.h"
#include "engine/training/metrics_log.h"
#include "engine/training/progress.h"
#include "engine/training/stop_signal.h"

namespace parka {
namespace {

struct EndedEarly {  // thrown on all ranks before the same batch
  EvaluationEnd end;
};

// `record` says in metrics.jsonl what was evaluated, `key` in an error. All ranks have the same result.
void report_loss(int64_t step, RunRecords& records, const EvaluationResult& result, const std::string& name,
                 const std::string& key, ordered_json record) {
  if (result.num_targets == 0) {  // because of the data, not of the weights, which are saved
    try {
      check_evaluation(key, result);
    } catch (const Error&) {
      records.deferred().keep(std::current_exception());
    }
    throw EndedEarly{EvaluationEnd::kDeferred};
  }
  log_info("step {}: {} loss {:.4f} (perplexity {:.3f}) over {} tokens", step, name, result.loss,
           std::exp(result.loss), format_count(static_cast<double>(result.num_targets)));
  record.update({{"step", step}, {"loss", result.loss}, {"num_targets", result.num_targets}});
  records.write(record);
  check_evaluation(key, result);
}

void report_task(int64_t step, RunRecords& records, const EvalTask& task, const TaskResult& result) {
  log_info("step {}: {} {} {:.4f} over {} documents", step, task.name, name_of(task.metric), result.score,
           result.documents.size());
  records.write({{"kind", "task"},
                 {"step", step},
                 {"task", task.name},
                 {"metric", name_of(task.metric)},
                 {"score", result.score},
                 {"acc", result.acc},
                 {"len_norm", result.len_norm},
                 {"bits_per_byte", result.bits_per_byte},
                 {"documents", result.documents.size()}});
}

void report_sample(int64_t step, RunRecords& records, const std::string& prompt, const std::string& written) {
  // A model of bytes may write what is no UTF-8.
  const json text = json::parse(json(written).dump(-1, ' ', false, json::error_handler_t::replace));
  log_info("step {}: \"{}\" goes on \"{}\"", step, prompt, text.get<std::string>());
  records.write({{"kind", "sample"}, {"step", step}, {"prompt", prompt}, {"text", text}});
}

}  // namespace

RunPrompts::RunPrompts(const Config& config, Communicator& communicator) {
  if (config.evaluation.prompts.empty()) return;
  json own = json::object();
  if (communicator.rank() == 0) {
    codec_ = open_codec(tokenizer_of_run(config), config.model.vocab_size);
    if (!codec_) {
      throw_bad_input("evaluation.prompts: the run has no tokenizer for them; name its folder in data.tokenizer");
    }
    own["tokens"] = json::array();
    for (const std::string& prompt : config.evaluation.prompts) {
      const std::vector<int32_t> ids = codec_->encode(prompt);
      if (ids.empty() || std::ranges::max(ids) >= config.model.vocab_size) {
        throw_bad_input("evaluation.prompts: \"{}\" has {}; give a text of the model's tokenizer",
                        printable(prompt), ids.empty() ? "no tokens" : "tokens beyond model.vocab_size");
      }
      own["tokens"].push_back(ids);
    }
    own["stop"] = codec_->stop_tokens();
  }
  const json all = json::parse(communicator.gather_text(own.dump()).front());
  tokens_ = all.at("tokens").get<std::vector<std::vector<int32_t>>>();
  stop_tokens_ = all.at("stop").get<std::vector<int32_t>>();
}

std::string RunPrompts::sample(size_t prompt, TrainingRun& run, Communicator& communicator,
                               const BeforeEvaluationBatch& before_each) const {
  constexpr uint64_t kTokens = 64;
  std::vector<int32_t> tokens = tokens_[prompt];
  std::string text;
  if (codec_) codec_->begin(tokens);
  for (uint64_t i = 0; i < kTokens; ++i) {
    const int32_t drawn = sample_token(run.next_logits(tokens, before_each), {}, prompt, i);
    // On unlike GPUs logits may differ by a bit: ranks take one token, so that all go on or none.
    const auto token = static_cast<int32_t>(communicator.max(drawn));
    if (std::ranges::find(stop_tokens_, token) != stop_tokens_.end()) break;
    tokens.push_back(token);
    if (codec_) text += codec_->next(token);
  }
  return codec_ ? text + codec_->end() : text;
}

std::set<std::string> evaluated_by(const EvaluationSuite& suite) {
  std::set<std::string> all;
  if (suite.held_out) all.insert(evaluated({{"kind", "eval"}}));
  for (const EvaluationSuite::Set& set : suite.sets)
    all.insert(evaluated({{"kind", "eval_set"}, {"set", set.name}}));
  for (const EvalTask& task : suite.tasks) all.insert(evaluated({{"kind", "task"}, {"task", task.name}}));
  for (const std::string& prompt : suite.prompts) all.insert(evaluated({{"kind", "sample"}, {"prompt", prompt}}));
  return all;
}

bool evaluation_is_due(const TrainingConfig& training, const EvaluationSuite& suite, int64_t step) {
  if (training.eval_interval == 0 || suite.empty()) return false;
  return step % training.eval_interval == 0 || step == training.steps;
}

EvaluationEnd evaluate_run(TrainingRun& run, Communicator& communicator, const EvaluationSuite& suite,
                           const RunPrompts& prompts, RunRecords& records) {
  const int64_t step = run.completed_steps();
  const auto before_batch = [&](const std::exception_ptr& read_failure) {
    heartbeat("evaluation", step);
    records.deferred().keep(read_failure);
    const double most = communicator.max((records.deferred() ? 2 : 0) + (stop_signal() != 0 ? 1 : 0));
    if (most > 0) throw EndedEarly{most >= 2 ? EvaluationEnd::kDeferred : EvaluationEnd::kStopped};
  };
  heartbeat("evaluation", step);
  try {
    if (suite.held_out) {
      report_loss(step, records, run.evaluate(*suite.held_out, before_batch), "held-out", "data.eval",
                  {{"kind", "eval"}});
    }
    for (const EvaluationSuite::Set& set : suite.sets) {
      report_loss(step, records, run.evaluate(set.files, before_batch), set.name, set.name,
                  {{"kind", "eval_set"}, {"set", set.name}});
    }
    for (const EvalTask& task : suite.tasks) report_task(step, records, task, run.evaluate(task, before_batch));
    for (size_t i = 0; i < suite.prompts.size(); ++i)
      report_sample(step, records, suite.prompts[i], prompts.sample(i, run, communicator, before_batch));
  } catch (const EndedEarly& early) {
    return early.end;
  }
  return EvaluationEnd::kDone;
}

}  // namespace parka
