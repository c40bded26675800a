#pragma once
#include <cstdint>
#include <exception>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "data/token_files.h"
#include "engine/config/config.h"
#include "engine/evaluation/eval_requests.h"
#include "kernels/device/device.h"
#include "model/model.h"

namespace parka {

struct EvaluationResult {
  double loss = 0;  // mean cross-entropy over all targets, nats per token
  int64_t num_targets = 0;
  int64_t num_sequences = 0;
};

// Throws kBadInput if nothing was evaluated, for a mean over nothing would look like the loss of a perfect model,
// and kNonFinite if the loss is infinite or NaN. `name`: of what was evaluated.
void check_evaluation(const std::string& name, const EvaluationResult& result);

// Called before each forward pass of an evaluation, on all ranks before the same one, with the error of reading
// this rank's data for it, or null. It may throw, on all of them; else an error of reading is thrown afterwards.
using BeforeEvaluationBatch = std::function<void(const std::exception_ptr& read_failure)>;

// Mean loss over `max_sequences` sequences spread evenly over `files` (0: all of them), `micro_batch` at a time.
// Rank r of several takes every size-th micro-batch; groups that share sequences (Peers::kContext) do so together.
EvaluationResult evaluate_loss(Device& device, Model& model, const TokenFiles& files, int64_t micro_batch,
                               int64_t max_sequences, Communicator& communicator,
                               const BeforeEvaluationBatch& before_each = {});

// All that a config evaluates on, opened and checked.
struct EvaluationSuite {
  struct Set {
    std::string name;
    TokenFiles files;
  };
  std::optional<TokenFiles> held_out;  // data.eval
  std::vector<Set> sets;               // evaluation.sets
  std::vector<EvalTask> tasks;         // evaluation.tasks
  std::vector<std::string> prompts;    // evaluation.prompts

  bool empty() const { return !held_out && sets.empty() && tasks.empty() && prompts.empty(); }
};

// Throws Error(kBadInput) for files that cannot be used, and for two tasks with the same name.
EvaluationSuite open_suite(const Config& config);

// Warns of token files and tasks that were made with another tokenizer or chat template than the first of them,
// where the data.json beside them, or a request file's header, says with which.
void warn_of_tokenizers(const std::vector<std::string>& sources, const std::vector<EvalTask>& tasks);
// Takes the sources and tasks of `suite`, and data.train.
void warn_of_tokenizers(const Config& config, const EvaluationSuite& suite);
// Throws Error(kBadInput) for a file or task whose tokenizer is known not to be the one in folder `own`.
void check_tokenizers(const Config& config, const EvaluationSuite& suite, const std::string& own);

// Warns of the first file of which a large part is one id again and again, and that no mask or image explains.
void warn_of_repeats(const std::vector<const TokenFile*>& files, const ImageRules& images = {});

// Warns of files with parts that were never written, as those of a copy that is not done, which are read as id 0:
// of `files` and the token files of `suite`. Calls warn_of_repeats() for the latter.
void warn_of_gaps(std::vector<const ReadOnlyFile*> files, const EvaluationSuite& suite);

// A line for each file that distinguishes suites whose files have the same names, the same on all ranks.
std::string describe_suite(const EvaluationSuite& suite);

}  // namespace parka
