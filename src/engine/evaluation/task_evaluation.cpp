#include "engine/evaluation/task_evaluation.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <numbers>
#include <numeric>
#include <sstream>

#include <fmt/format.h>

#include "core/error.h"
#include "core/log/work_progress.h"
#include "kernels/ops/elementwise/cross_entropy.h"

namespace parka {
namespace {

// Lengths of batches are multiples of it, so that a GPU meets few shapes.
constexpr int64_t kLengthUnit = 16;

// A sequence without its last token, and the targets that count: those of the continuation.
struct Query {
  std::vector<int32_t> tokens, targets;
  std::vector<TaskImage> images;
  std::vector<int32_t> positions;  // of their slots, -1 for those that are cut
};

Query make_query(const std::vector<int32_t>& context, const std::vector<int32_t>& continuation,
                 int64_t sequence_length, const ImageRules& rules, const std::vector<TaskImage>& images) {
  std::vector<int32_t> all = context;
  all.insert(all.end(), continuation.begin(), continuation.end());
  const int64_t length = std::min(static_cast<int64_t>(all.size()) - 1, sequence_length);
  Query query;
  query.tokens.assign(all.end() - 1 - length, all.end() - 1);
  query.targets.assign(all.end() - length, all.end());
  std::fill(query.targets.begin(), query.targets.end() - static_cast<int64_t>(continuation.size()), kIgnoreTarget);
  if (images.empty()) return query;
  query.images = images;
  const int64_t cut = static_cast<int64_t>(all.size()) - 1 - length;
  for (size_t i = 0; i < context.size(); ++i) {
    if (context[i] != rules.token) continue;
    query.positions.push_back(static_cast<int32_t>(std::max<int64_t>(static_cast<int64_t>(i) - cut, -1)));
  }
  return query;
}

// Queries of similar length, by their numbers, and the room that each has.
struct QueryBatch {
  std::vector<size_t> queries;
  int64_t length;
};

int64_t most_images(const std::vector<Query>& queries, const std::vector<size_t>& chosen) {
  size_t most = 0;
  for (const size_t index : chosen) most = std::max(most, queries[index].images.size());
  return static_cast<int64_t>(most);
}

std::vector<QueryBatch> make_batches(const std::vector<Query>& queries, const BatchShape& shape) {
  std::vector<size_t> order(queries.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::ranges::stable_sort(order,
                           [&](size_t a, size_t b) { return queries[a].tokens.size() > queries[b].tokens.size(); });
  std::vector<QueryBatch> batches;
  for (size_t begin = 0; begin < order.size();) {
    const auto longest = static_cast<int64_t>(queries[order[begin]].tokens.size());
    const int64_t length = std::min(ceil_div(longest, kLengthUnit) * kLengthUnit, shape.sequence_length);
    auto count = std::min(static_cast<size_t>(shape.num_tokens() / length), order.size() - begin);
    const auto first = order.begin() + static_cast<int64_t>(begin);
    const int64_t most = most_images(queries, {first, first + static_cast<int64_t>(count)});
    if (most > 0) count = std::min(count, static_cast<size_t>(shape.num_images() / most));
    batches.push_back({{first, first + static_cast<int64_t>(count)}, length});
    begin += count;
  }
  return batches;
}

// The images of a batch's queries, each with room for `most`, as Model::Batch has them.
struct BatchImages {
  std::vector<uint8_t> pixels;
  std::vector<int32_t> positions;
};

BatchImages read_images(const EvalTask& task, const std::vector<Query>& queries, const QueryBatch& batch,
                        int64_t most) {
  BatchImages read;
  if (most == 0) return read;
  const int64_t bytes = task.pixels->image_bytes(), slots = task.images.slots;
  const int64_t room = static_cast<int64_t>(batch.queries.size()) * most;
  read.pixels.resize(static_cast<size_t>(room * bytes));
  read.positions.assign(static_cast<size_t>(room * slots), -1);
  int64_t next = 0;
  for (size_t row = 0; row < batch.queries.size(); ++row) {
    const Query& query = queries[batch.queries[row]];
    for (size_t i = 0; i < query.images.size(); ++i, ++next) {
      task.pixels->read(query.images[i].image, query.images[i].checksum,
                        &read.pixels[static_cast<size_t>(next * bytes)]);
      for (int64_t k = 0; k < slots; ++k) {
        const int32_t position = query.positions.at(i * static_cast<size_t>(slots) + static_cast<size_t>(k));
        if (position < 0) continue;
        read.positions[static_cast<size_t>(next * slots + k)] =
            static_cast<int32_t>(static_cast<int64_t>(row) * batch.length + position);
      }
    }
  }
  return read;
}

// The log-likelihood of each query of the batch, whose losses are all that the targets leave.
std::vector<double> run_batch(Device& device, Model& model, const std::vector<Query>& queries,
                              const QueryBatch& batch, int64_t most_images, const BatchImages& images) {
  std::vector<int32_t> tokens, targets;
  for (size_t index : batch.queries) {
    const Query& query = queries[index];
    tokens.insert(tokens.end(), query.tokens.begin(), query.tokens.end());
    targets.insert(targets.end(), query.targets.begin(), query.targets.end());
    // A token that occurs fills the rest: no query sees it, and it does not widen the range of a tensor.
    const size_t rest = static_cast<size_t>(batch.length) - query.tokens.size();
    tokens.insert(tokens.end(), rest, query.tokens.back());
    targets.insert(targets.end(), rest, kIgnoreTarget);
  }
  const BatchShape shape{static_cast<int64_t>(batch.queries.size()), batch.length, false, most_images};
  model.evaluate(
      device, {tokens.data(), targets.data(), shape, nullptr, {}, images.pixels.data(), images.positions.data()});
  const std::vector<float> losses = model.losses(device);
  std::vector<double> sums;
  for (size_t i = 0; i < batch.queries.size(); ++i) {
    const auto first = losses.begin() + static_cast<int64_t>(i) * batch.length;
    sums.push_back(-std::accumulate(first, first + batch.length, 0.0));
  }
  return sums;
}

std::vector<double> score(Device& device, Model& model, const EvalTask& task, const std::vector<Query>& queries,
                          const BatchShape& shape, Communicator& communicator,
                          const BeforeEvaluationBatch& before_each) {
  const std::vector<QueryBatch> batches = make_batches(queries, shape);
  const auto count = static_cast<int64_t>(batches.size());
  const int64_t ranks = communicator.size();
  std::string own_scores;
  const int64_t rounds = ceil_div(count, ranks);
  WorkProgress progress(fmt::format("evaluating {}", task.name), rounds);
  for (int64_t round = 0; round < rounds; ++round, progress.add(1)) {
    // A rank without a batch does the last one again, and does not count it, as in evaluate_loss().
    const int64_t own = round * ranks + communicator.rank(), index = std::min(own, count - 1);
    const QueryBatch& batch = batches[index];
    const int64_t most = most_images(queries, batch.queries);
    BatchImages images;
    std::exception_ptr read_failure;
    try {
      images = read_images(task, queries, batch, most);
    } catch (...) {
      read_failure = std::current_exception();
    }
    if (before_each) before_each(read_failure);
    if (read_failure) std::rethrow_exception(read_failure);
    const std::vector<double> sums = run_batch(device, model, queries, batch, most, images);
    if (own != index) continue;
    for (size_t i = 0; i < sums.size(); ++i) own_scores += fmt::format("{} {:a}\n", batch.queries[i], sums[i]);
  }
  std::vector<double> scores(queries.size());
  for (const std::string& of_rank : communicator.gather_text(own_scores)) {
    std::istringstream lines(of_rank);
    size_t query = 0;
    for (std::string value; lines >> query >> value;) scores.at(query) = std::strtod(value.c_str(), nullptr);
  }
  return scores;
}

int64_t first_largest(const std::vector<double>& x) { return std::ranges::max_element(x) - x.begin(); }

// The choice that the metric makes.
int64_t choice_of(TaskMetric metric, const TaskDocument& document, const TaskResult::Document& scored) {
  std::vector<double> x = scored.log_likelihood;
  for (size_t i = 0; i < x.size(); ++i) {
    if (metric == TaskMetric::kLenNorm) x[i] /= static_cast<double>(document.choices[i].num_characters);
    if (metric == TaskMetric::kPmiDc) x[i] -= scored.domain_log_likelihood[i];
  }
  return first_largest(x);
}

void add_document(const EvalTask& task, const TaskResult::Document& scored, TaskResult& result) {
  const TaskDocument& document = task.documents[scored.index];
  const auto is_right = [&](TaskMetric metric) {
    return choice_of(metric, document, scored) == document.label ? 1.0 : 0.0;
  };
  result.score += is_right(task.metric);
  result.acc += is_right(TaskMetric::kAcc);
  result.len_norm += is_right(TaskMetric::kLenNorm);
  const auto bytes = static_cast<double>(document.choices[document.label].num_bytes);
  result.bits_per_byte -= scored.log_likelihood[document.label] / bytes * std::numbers::log2e;
}

}  // namespace

TaskResult evaluate_task(Device& device, Model& model, const EvalTask& task, const BatchShape& shape,
                         int64_t max_documents, Communicator& communicator,
                         const BeforeEvaluationBatch& before_each) {
  const auto total = static_cast<int64_t>(task.documents.size());
  const int64_t count = max_documents > 0 ? std::min(max_documents, total) : total;
  std::vector<Query> queries;
  for (int64_t i = 0; i < count; ++i) {
    const TaskDocument& document = task.documents[i * total / count];
    if (static_cast<int64_t>(document.images.size()) > shape.num_images()) {
      throw_bad_input(
          "{}: a document has {} images, and there is room for {}; make data.images_per_sequence larger", task.path,
          document.images.size(), shape.num_images());
    }
    for (const TaskChoice& choice : document.choices) {
      queries.push_back(
          make_query(choice.context, choice.continuation, shape.sequence_length, task.images, document.images));
      if (task.metric == TaskMetric::kPmiDc) {
        queries.push_back(make_query(choice.domain, choice.continuation, shape.sequence_length, task.images, {}));
      }
    }
  }
  // NaN would make every choice the first one, and look like a score.
  const std::vector<double> scores = score(device, model, task, queries, shape, communicator, before_each);
  if (!std::ranges::all_of(scores, [](double x) { return std::isfinite(x); })) {
    throw Error(ExitCode::kNonFinite,
                fmt::format("{}: a log-likelihood is not finite: the weights are damaged or diverged", task.path));
  }
  TaskResult result;
  auto next = scores.begin();
  for (int64_t i = 0; i < count; ++i) {
    TaskResult::Document scored{i * total / count, {}, {}};
    for (size_t c = 0; c < task.documents[scored.index].choices.size(); ++c) {
      scored.log_likelihood.push_back(*next++);
      if (task.metric == TaskMetric::kPmiDc) scored.domain_log_likelihood.push_back(*next++);
    }
    add_document(task, scored, result);
    result.documents.push_back(std::move(scored));
  }
  for (double* mean : {&result.score, &result.acc, &result.len_norm, &result.bits_per_byte}) {
    *mean /= static_cast<double>(count);
  }
  return result;
}

}  // namespace parka
