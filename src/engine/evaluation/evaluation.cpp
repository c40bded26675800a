#include "engine/evaluation/evaluation.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <iterator>
#include <map>
#include <set>
#include <utility>

#include <fmt/format.h>

#include "core/error.h"
#include "core/log/log.h"
#include "core/log/work_progress.h"
#include "data/batch_loader.h"
#include "data/read_only_file.h"
#include "engine/config/data_description.h"
#include "engine/config/data_sources.h"
#include "engine/files/file_io.h"
#include "engine/text/tokenizer_files.h"
#include "kernels/ops/elementwise/cross_entropy.h"

namespace parka {

namespace {

// The memory of a Model::Batch.
struct LossBatch {
  std::vector<int32_t> tokens, targets, first_keys;
  ImageBatch images;
};

// These sequences, or of each one of some slices, with room for `num_images`.
LossBatch read_batch(const TokenFiles& files, const std::vector<int64_t>& sequences, int64_t slice, int64_t slices,
                     int64_t num_images) {
  const int64_t S = files.sequence_length();
  const bool separate = files.rules().separate_documents;
  LossBatch batch;
  batch.tokens.resize(sequences.size() * static_cast<size_t>(S));
  batch.targets.resize(batch.tokens.size());
  if (separate) batch.first_keys.resize(batch.tokens.size());
  for (size_t i = 0; i < sequences.size(); ++i) {
    const int64_t at = static_cast<int64_t>(i) * S;
    files.read_example(sequences[i], {batch.tokens.data() + at, batch.targets.data() + at,
                                      separate ? batch.first_keys.data() + at : nullptr});
  }
  if (num_images > 0) batch.images = read_image_batch(files, sequences, num_images);
  if (slices == 1) return batch;
  batch.tokens = slices_of(batch.tokens, S, slice, slices);
  batch.targets = slices_of(batch.targets, S, slice, slices);
  return batch;
}

}  // namespace

EvaluationResult evaluate_loss(Device& device, Model& model, const TokenFiles& files, int64_t micro_batch,
                               int64_t max_sequences, Communicator& communicator,
                               const BeforeEvaluationBatch& before_each) {
  const int64_t S = files.sequence_length(), total = files.num_sequences();
  EvaluationResult result;
  result.num_sequences = max_sequences > 0 ? std::min(max_sequences, total) : total;
  // Ranks that share sequences take the same micro-batches, each its slice of them.
  const int64_t slices = model.shape().context_size, slice = communicator.place_in(Peers::kContext);
  PARKA_REQUIRE(slices == 1 || slices == communicator.size_of(Peers::kContext));
  const int64_t batches = ceil_div(result.num_sequences, micro_batch), ranks = communicator.size() / slices;
  const bool separate = files.rules().separate_documents;
  const int64_t images_per_sequence = files.rules().images.any() ? model.shape().images_per_sequence : 0;
  int64_t own_targets = 0;
  double sum = 0;
  const int64_t rounds = ceil_div(batches, ranks);
  WorkProgress progress(fmt::format("evaluating {} sequences", result.num_sequences), rounds);
  for (int64_t round = 0; round < rounds; ++round, progress.add(1)) {
    // All ranks make the same collective calls: one without a micro-batch left repeats its last, uncounted.
    const int64_t own = round * ranks + communicator.rank() / slices, batch = std::min(own, batches - 1);
    const int64_t begin = batch * micro_batch, count = std::min(micro_batch, result.num_sequences - begin);
    // Ranks that exchange tokens have batches of one size: a short one repeats its last sequence, uncounted.
    const int64_t size = model.divides_experts() ? micro_batch : count;
    LossBatch rows;
    std::exception_ptr read_failure;
    try {
      std::vector<int64_t> sequences;
      for (int64_t i = 0; i < count; ++i) sequences.push_back((begin + i) * total / result.num_sequences);
      sequences.resize(static_cast<size_t>(size), sequences.back());
      rows = read_batch(files, sequences, slice, slices, size * images_per_sequence);
      std::fill(rows.targets.begin() + count * (S / slices), rows.targets.end(), kIgnoreTarget);
    } catch (...) {
      read_failure = std::current_exception();
    }
    if (before_each) before_each(read_failure);
    if (read_failure) std::rethrow_exception(read_failure);
    BatchShape shape{size, S / slices, separate, images_per_sequence};
    shape.context_size = slices;
    model.evaluate(device, {rows.tokens.data(),
                            rows.targets.data(),
                            shape,
                            separate ? rows.first_keys.data() : nullptr,
                            {},
                            rows.images.pixels.data(),
                            rows.images.positions.data()});
    if (own != batch) continue;
    own_targets += count_targets(rows.targets);
    for (float loss : model.losses(device)) sum += loss;
  }
  double sum_of_all = 0;
  for (const std::string& of_rank : communicator.gather_text(fmt::format("{:a} {}", sum, own_targets))) {
    char* end = nullptr;
    sum_of_all += std::strtod(of_rank.c_str(), &end);
    result.num_targets += std::strtoll(end, nullptr, 10);
  }
  result.loss = result.num_targets > 0 ? sum_of_all / static_cast<double>(result.num_targets) : 0.0;
  return result;
}

void check_evaluation(const std::string& name, const EvaluationResult& result) {
  if (result.num_targets == 0) {
    throw_bad_input("{}: none of {} sequences has a target; check the files, and the masks beside them", name,
                    result.num_sequences);
  }
  if (!std::isfinite(result.loss)) {
    throw Error(
        ExitCode::kNonFinite,
        fmt::format("{}: the loss is not finite: the weights are damaged or diverged; go on from an earlier "
                    "checkpoint, with a smaller optimizer.lr if they have diverged",
                    name));
  }
}

// Ids of two tokenizers mean different texts, and a model of both learns and is scored on neither; where
// vocabularies are of one size nothing else tells. Likewise turns of two chat templates.
void warn_of_tokenizers(const std::vector<std::string>& sources, const std::vector<EvalTask>& tasks) {
  std::set<std::pair<std::string_view, std::string>> found;
  std::map<std::string_view, std::string> first;
  const auto add = [&](std::string_view what, const std::string& path, const std::string& origin,
                       std::string_view advice) {
    if (origin.empty() || !found.emplace(what, origin).second) return;
    const auto [before, is_first] = first.emplace(what, path);
    if (!is_first) log_warning("{} was made with another {} than {}: {}", path, what, before->second, advice);
  };
  const auto add_tokenizer = [&](const std::string& path, const std::string& tokenizer) {
    add("tokenizer", path, tokenizer,
        "its ids mean other texts, and losses and scores of one model on both mean nothing; prepare both with one "
        "--tokenizer");
  };
  for_each_description(sources, [&](const std::string& file, const json& description) {
    add_tokenizer(file, described_tokenizer(description));
    add("chat template", file, described_text(description, "chat_template_sha256"),
        "turns begin and end otherwise in it; prepare both with one --chat");
  });
  for (const EvalTask& task : tasks) add_tokenizer(task.path, task.tokenizer);
}

void warn_of_tokenizers(const Config& config, const EvaluationSuite& suite) {
  std::vector<std::string> sources = config.data.train;
  std::ranges::copy(held_out_sources(config), std::back_inserter(sources));
  warn_of_tokenizers(sources, suite.tasks);
}

void check_tokenizers(const Config& config, const EvaluationSuite& suite, const std::string& own) {
  if (own.empty()) return;
  const auto refuse = [&](const std::string& path) {
    throw_bad_input(
        "{}: was made with another tokenizer than that of the model, {}, to which its ids mean other texts; prepare it "
        "with --tokenizer {}",
        path, own, own);
  };
  for_each_description(held_out_sources(config), [&](const std::string& file, const json& description) {
    const std::string beside = (std::filesystem::path(file).parent_path() / kTokenizerFolder).string();
    if (described_tokenizer(description) == "bytes" || have_different_tokenizers(own, beside)) refuse(file);
  });
  for (const EvalTask& task : suite.tasks) {
    const bool is_other = !task.tokens.empty() && task.tokens != checksum_of_tokens(own);
    if (task.tokenizer == "bytes" || is_other) refuse(task.path);
    if (task.tokenizer.empty() || !task.tokens.empty()) continue;
    log_warning("{}: does not tell whether it was made with the tokenizer of the model, {}; make it again to see",
                task.path, own);
  }
}

void warn_of_repeats(const std::vector<const TokenFile*>& files, const ImageRules& images) {
  constexpr double kMost = 0.2;
  for (const TokenFile* file : files) {
    const TokenFile::Repeated most = file->most_repeated();
    const bool is_meant = file->has_mask() || (images.any() && most.id == images.token);
    if (most.share < kMost || is_meant || file->files().front()->first_gap() >= 0) continue;
    log_warning(
        "{}: {:.0f} % of its tokens, by a few of its pages, are id {} again and again, which the model learns; copy it "
        "again if it was not written whole, or mask it if it is padding",
        file->path(), 100 * most.share, most.id);
    return;
  }
}

void warn_of_gaps(std::vector<const ReadOnlyFile*> files, const EvaluationSuite& suite) {
  const auto add = [&](const TokenFiles& more) {
    std::ranges::copy(more.files(), std::back_inserter(files));
    warn_of_repeats(more.token_files(), more.rules().images);
  };
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
  suite.prompts = config.evaluation.prompts;
  if (!config.data.eval.empty()) suite.held_out.emplace(open_token_files(config.data.eval, config));
  for (const NamedFiles& set : parse_sets(config.evaluation.sets, "evaluation.sets")) {
    suite.sets.push_back({set.name, open_token_files(set.files, config)});
  }
  for (const std::string& path : config.evaluation.tasks) {
    EvalTask task =
        read_requests(path, config.model.vocab_size, config.data.sequence_length, example_rules(config).images);
    for (const EvalTask& other : suite.tasks) {
      if (other.name == task.name) {
        throw_bad_input("{} and {} are both of a task \"{}\"; give one another name (parka prepare-eval --name)",
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
