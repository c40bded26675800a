#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>

#include "core/error.h"
#include "core/log/log.h"
#include "data/read_only_file.h"
#include "engine/checkpoint/saved_state.h"
#include "engine/commands/commands.h"
#include "engine/commands/device_setup.h"
#include "engine/config/data_sources.h"
#include "engine/evaluation/evaluation.h"
#include "engine/evaluation/inference_run.h"
#include "engine/evaluation/task_evaluation.h"
#include "engine/files/file_io.h"
#include "engine/text/tokenizer_files.h"

namespace parka {
namespace {

// The checkpoint's config with what the command line asks for in place of what it evaluates on itself.
Config eval_config(const LoadedCheckpoint& checkpoint, const EvalOptions& options) {
  parse_sets(options.sets, "--sets");
  Config config = inference_config_of(checkpoint, options.overrides);
  if (options.data.empty() && options.sets.empty() && options.tasks.empty()) return config;
  config.data.eval = options.data;
  config.evaluation.sets = options.sets;
  config.evaluation.tasks = options.tasks;
  return config;
}

// Users of other programs give the names of tasks.
void check_tasks(const std::vector<std::string>& tasks) {
  for (const std::string& task : tasks) {
    if (task.find_first_of("./*") != std::string::npos || file_exists(task)) continue;
    throw_bad_input(
        "--tasks {}: no such file; a task is a request file, which parka prepare-eval makes of its documents for "
        "the model's tokenizer (its --help names the tasks that it knows; docs/after_export.md has a harness for others)",
        task);
  }
}

// On one line; names of files may be no UTF-8.
std::string one_line(const ordered_json& json) {
  return json.dump(-1, ' ', false, ordered_json::error_handler_t::replace) + "\n";
}

ordered_json loss_json(const EvaluationResult& result) {
  return {{"loss", result.loss}, {"perplexity", std::exp(result.loss)}, {"num_targets", result.num_targets}};
}

ordered_json task_json(const EvalTask& task, const TaskResult& result) {
  return {{"metric", name_of(task.metric)},
          {"score", result.score},
          {"acc", result.acc},
          {"len_norm", result.len_norm},
          {"bits_per_byte", result.bits_per_byte},
          {"documents", result.documents.size()}};
}

// One line for each document, for --predictions.
std::string prediction_lines(const EvalTask& task, const TaskResult& result) {
  std::string lines;
  for (const TaskResult::Document& document : result.documents) {
    ordered_json line = {{"task", task.name},
                         {"document", document.index},
                         {"label", task.documents[document.index].label},
                         {"log_likelihood", document.log_likelihood}};
    if (!document.domain_log_likelihood.empty()) {
      line["domain_log_likelihood"] = document.domain_log_likelihood;
    }
    lines += one_line(line);
  }
  return lines;
}

// Files that it reads, or that are its run's, and that --predictions must not replace.
std::vector<std::string> input_files(const LoadedCheckpoint& checkpoint, const Config& config) {
  std::vector<std::string> files = config.evaluation.tasks;
  for (const std::string& source : held_out_sources(config)) {
    for (const std::string& path : expand_source(source)) files.push_back(path);
  }
  const std::filesystem::path run = std::filesystem::path(checkpoint.path()).parent_path();
  for (const char* name : {"metrics.jsonl", "config.json"}) files.push_back((run / name).string());
  return files;
}

// Everything that the suite has, evaluated.
struct Evaluated {
  std::optional<EvaluationResult> held_out;
  std::vector<EvaluationResult> sets;
  std::vector<TaskResult> tasks;
};

Evaluated evaluate(Device& device, InferenceRun& run, const EvaluationSuite& suite, const EvalOptions& options) {
  const std::unique_ptr<Communicator> alone = make_single_communicator();
  // The number of sequences at a time is that of training; the loss does not depend on it beyond rounding.
  const BatchShape shape{run.config().training.micro_batch_size, run.config().data.sequence_length, false,
                         run.config().data.images_per_sequence};
  const auto loss_of = [&](const std::string& name, const TokenFiles& files) {
    const EvaluationResult result =
        evaluate_loss(device, run.model(), files, shape.num_sequences, options.max_sequences, *alone);
    check_evaluation(name, result);
    return result;
  };
  Evaluated evaluated;
  if (suite.held_out) evaluated.held_out = loss_of("data.eval", *suite.held_out);
  for (const EvaluationSuite::Set& set : suite.sets) evaluated.sets.push_back(loss_of(set.name, set.files));
  for (const EvalTask& task : suite.tasks) {
    evaluated.tasks.push_back(evaluate_task(device, run.model(), task, shape, options.max_documents, *alone));
  }
  return evaluated;
}

void print_json(const LoadedCheckpoint& checkpoint, const Config& config, const EvaluationSuite& suite,
                const Evaluated& evaluated) {
  ordered_json line = {{"checkpoint", checkpoint.path()}, {"step", checkpoint.step()}};
  if (evaluated.held_out) {
    line["data"] = config.data.eval;
    line.update(loss_json(*evaluated.held_out));
  }
  for (size_t i = 0; i < suite.sets.size(); ++i) line["sets"][suite.sets[i].name] = loss_json(evaluated.sets[i]);
  for (size_t i = 0; i < suite.tasks.size(); ++i) {
    line["tasks"][suite.tasks[i].name] = task_json(suite.tasks[i], evaluated.tasks[i]);
  }
  std::fputs(one_line(line).c_str(), stdout);
}

void print_tables(const LoadedCheckpoint& checkpoint, const EvaluationSuite& suite, const Evaluated& evaluated) {
  std::printf("%s\n", checkpoint.path().c_str());
  if (evaluated.held_out) {
    const EvaluationResult& result = *evaluated.held_out;
    std::printf("loss        %.6f nats/token\nperplexity  %.4f\ntargets     %lld in %lld sequences\n", result.loss,
                std::exp(result.loss), static_cast<long long>(result.num_targets),
                static_cast<long long>(result.num_sequences));
  }
  size_t width = 4;
  for (const EvaluationSuite::Set& set : suite.sets) width = std::max(width, set.name.size());
  for (const EvalTask& task : suite.tasks) width = std::max(width, task.name.size());
  const int column = static_cast<int>(width);
  if (!suite.sets.empty())
    std::printf("\n%-*s  %10s  %12s  %12s\n", column, "set", "loss", "perplexity", "targets");
  for (size_t i = 0; i < suite.sets.size(); ++i) {
    const EvaluationResult& result = evaluated.sets[i];
    std::printf("%-*s  %10.6f  %12.4f  %12lld\n", column, suite.sets[i].name.c_str(), result.loss,
                std::exp(result.loss), static_cast<long long>(result.num_targets));
  }
  if (!suite.tasks.empty()) {
    std::printf("\n%-*s  %-8s  %7s  %7s  %8s  %9s  %9s\n", column, "task", "metric", "score", "acc", "len_norm",
                "bits/byte", "documents");
  }
  for (size_t i = 0; i < suite.tasks.size(); ++i) {
    const TaskResult& result = evaluated.tasks[i];
    std::printf("%-*s  %-8s  %7.4f  %7.4f  %8.4f  %9.4f  %9zu\n", column, suite.tasks[i].name.c_str(),
                name_of(suite.tasks[i].metric).data(), result.score, result.acc, result.len_norm,
                result.bits_per_byte, result.documents.size());
  }
}

}  // namespace

int run_eval(const EvalOptions& options) {
  check_tasks(options.tasks);
  const LoadedCheckpoint checkpoint = open_checkpoint(options.checkpoint, options.overrides);
  const Config config = eval_config(checkpoint, options);
  EvaluationSuite suite = open_suite(config);
  suite.prompts.clear();  // `parka generate` goes on with these
  if (suite.empty()) {
    throw_bad_input("{}: its config names nothing to evaluate on; give --data, --sets or --tasks",
                    checkpoint.path());
  }
  if (!options.predictions.empty() && suite.tasks.empty()) {
    throw_bad_input("--predictions needs tasks, and there are none; give some with --tasks");
  }
  if (options.max_documents > 0 && suite.tasks.empty()) {
    throw_bad_input("--max-documents needs tasks, and there are none; give some with --tasks");
  }
  check_output(options.predictions, input_files(checkpoint, config));
  check_tokenizers(config, suite, find_tokenizer(checkpoint.path(), checkpoint.state()).value_or(""));
  warn_of_tokenizers(config, suite);
  warn_of_gaps({}, suite);
  log_info("numerics: {}", numerics_of(config));
  const std::unique_ptr<Device> device = make_inference_device(config, options.overrides);
  InferenceRun run(*device, checkpoint, config);
  const Evaluated evaluated = evaluate(*device, run, suite, options);
  if (options.json) {
    print_json(checkpoint, config, suite, evaluated);
  } else {
    print_tables(checkpoint, suite, evaluated);
  }
  if (!options.predictions.empty()) {
    std::string lines;
    for (size_t i = 0; i < suite.tasks.size(); ++i) lines += prediction_lines(suite.tasks[i], evaluated.tasks[i]);
    write_output(options.predictions, lines);
  }
  return 0;
}

}  // namespace parka
