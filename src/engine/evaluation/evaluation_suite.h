#pragma once
#include <optional>
#include <string>
#include <vector>

#include "data/token_files.h"
#include "engine/config/config.h"
#include "engine/evaluation/eval_requests.h"

namespace parka {

// All that a config evaluates on, opened and checked.
struct EvaluationSuite {
  struct Set {
    std::string name;
    TokenFiles files;
  };
  std::optional<TokenFiles> held_out;  // data.eval
  std::vector<Set> sets;               // evaluation.sets
  std::vector<EvalTask> tasks;         // evaluation.tasks

  bool empty() const { return !held_out && sets.empty() && tasks.empty(); }
};

// Throws Error(kBadInput) for files that cannot be used, and for two tasks with the same name.
EvaluationSuite open_suite(const Config& config);

// Warns of token files and tasks that were made with another tokenizer or chat template than the first of them,
// where the data.json beside them, or a request file's header, says with which.
void warn_of_tokenizers(const std::vector<std::string>& sources, const std::vector<EvalTask>& tasks);
// Of those of `suite`, and of data.train.
void warn_of_tokenizers(const Config& config, const EvaluationSuite& suite);

// Warns of files with parts that were never written, as those of a copy that is not done, which are read as id 0:
// of `files` and the token files of `suite`.
void warn_of_gaps(std::vector<const ReadOnlyFile*> files, const EvaluationSuite& suite);

// A line for each file that distinguishes suites whose files have the same names. All ranks must have the same
// lines.
std::string describe_suite(const EvaluationSuite& suite);

}  // namespace parka
