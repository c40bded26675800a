#include "engine/evaluation/evaluation_suite.h"

#include "core/error.h"
#include "data/read_only_file.h"
#include "engine/config/data_sources.h"
#include "engine/files/file_io.h"

namespace parka {

EvaluationSuite open_suite(const Config& config) {
  EvaluationSuite suite;
  if (!config.data.eval.empty()) suite.held_out.emplace(open_token_files(config.data.eval, config));
  for (const NamedFiles& set : parse_sets(config.evaluation.sets, "evaluation.sets")) {
    suite.sets.push_back({set.name, open_token_files(set.files, config)});
  }
  for (const std::string& path : config.evaluation.tasks) {
    EvalTask task =
        read_requests(path, config.model.vocab_size, config.data.sequence_length, example_rules(config).images);
    for (const EvalTask& other : suite.tasks) {
      if (other.name == task.name) {
        throw_bad_input("{} and {} are both of a task \"{}\"; give one another name (prepare_eval.py --name)",
                        other.path, path, task.name);
      }
    }
    suite.tasks.push_back(std::move(task));
  }
  return suite;
}

std::string describe_suite(const EvaluationSuite& suite) {
  std::string lines;
  if (suite.held_out) lines += fmt::format("data.eval {:016x}\n", suite.held_out->fingerprint());
  for (const EvaluationSuite::Set& set : suite.sets) {
    lines += fmt::format("set {} {:016x}\n", set.name, set.files.fingerprint());
  }
  for (const EvalTask& task : suite.tasks) {
    lines += fmt::format("task {} {}\n", task.name, checksum_of(ReadOnlyFile(task.path)));
  }
  return lines;
}

}  // namespace parka
