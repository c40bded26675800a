#include "engine/evaluation/evaluation_suite.h"

#include <algorithm>
#include <iterator>
#include <set>

#include "core/error.h"
#include "core/log/log.h"
#include "data/read_only_file.h"
#include "engine/config/data_description.h"
#include "engine/config/data_sources.h"
#include "engine/files/file_io.h"

namespace parka {
namespace {

// Ids of two tokenizers mean different texts, and a model of both learns and is scored on neither; where
// vocabularies are of one size nothing else tells. Likewise turns of two chat templates.
class OriginCheck {
 public:
  OriginCheck(std::string_view what, std::string_view advice) : what_(what), advice_(advice) {}

  void add(const std::string& path, const std::string& origin) {
    if (origin.empty() || !seen_.insert(origin).second) return;
    if (first_.empty()) {
      first_ = path;
    } else {
      log_warning("{} was made with another {} than {}: {}", path, what_, first_, advice_);
    }
  }

 private:
  std::string_view what_, advice_;
  std::string first_;
  std::set<std::string> seen_;
};

}  // namespace

void warn_of_tokenizers(const std::vector<std::string>& sources, const std::vector<EvalTask>& tasks) {
  OriginCheck tokenizers(
      "tokenizer",
      "its ids mean other texts, and losses and scores of one model on both mean nothing; prepare "
      "both with one --tokenizer");
  OriginCheck templates("chat template", "turns begin and end otherwise in it; prepare both with one --chat");
  for_each_description(sources, [&](const std::string& file, const nlohmann::json& description) {
    tokenizers.add(file, described_tokenizer(description));
    templates.add(file, described_text(description, "chat_template_sha256"));
  });
  for (const EvalTask& task : tasks) tokenizers.add(task.path, task.tokenizer);
}

void warn_of_tokenizers(const Config& config, const EvaluationSuite& suite) {
  std::vector<std::string> sources = config.data.train;
  const auto add = [&](const std::vector<std::string>& more) {
    sources.insert(sources.end(), more.begin(), more.end());
  };
  add(config.data.eval);
  for (const NamedFiles& set : parse_sets(config.evaluation.sets, "evaluation.sets")) add(set.files);
  warn_of_tokenizers(sources, suite.tasks);
}

void warn_of_gaps(std::vector<const ReadOnlyFile*> files, const EvaluationSuite& suite) {
  const auto add = [&](const TokenFiles& more) { std::ranges::copy(more.files(), std::back_inserter(files)); };
  if (suite.held_out) add(*suite.held_out);
  for (const EvaluationSuite::Set& set : suite.sets) add(set.files);
  const auto has_gap = [](const ReadOnlyFile* file) { return file->first_gap() >= 0; };
  const auto first = std::ranges::find_if(files, has_gap);
  if (first == files.end()) return;
  const auto others = std::count_if(first + 1, files.end(), has_gap);
  log_warning(
      "{}: was never written at byte {}, and has id 0 there{}; wait until it is whole, or copy it again",
      (*first)->path(), (*first)->first_gap(),
      others == 0 ? "" : fmt::format(", as {} other file{} somewhere", others, others == 1 ? " has" : "s have"));
}

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
