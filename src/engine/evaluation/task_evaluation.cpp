#include "engine/evaluation/task_evaluation.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <numbers>
#include <numeric>
#include <sstream>

#include <fmt/format.h>

#include "core/error.h"
#include "kernels/ops/cross_entropy.h"

namespace parka {
namespace {

// Lengths of batches are multiples of it, so that a GPU meets few shapes.
constexpr int64_t kLengthUnit = 16;

// A sequence without its last token, and the targets that count: those of the continuation.
struct Query {
  std::vector<int32_t> tokens, targets;
};

Query make_query(const std::vector<int32_t>& context, const std::vector<int32_t>& continuation,
                 int64_t sequence_length) {
  std::vector<int32_t> all = context;
  all.insert(all.end(), continuation.begin(), continuation.end());
  const int64_t length = std::min(static_cast<int64_t>(all.size()) - 1, sequence_length);
  Query query;
  query.tokens.assign(all.end() - 1 - length, all.end() - 1);
  query.targets.assign(all.end() - length, all.end());
  std::fill(query.targets.begin(), query.targets.end() - static_cast<int64_t>(continuation.size()), kIgnoreTarget);
  return query;
}

// Queries of similar length, by their numbers, and the room that each has.
struct QueryBatch {
  std::vector<size_t> queries;
  int64_t length;
};

std::vector<QueryBatch> make_batches(const std::vector<Query>& queries, const BatchShape& shape) {
  std::vector<size_t> order(queries.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return queries[a].tokens.size() > queries[b].tokens.size(); });
  std::vector<QueryBatch> batches;
  for (size_t begin = 0; begin < order.size();) {
    const auto longest = static_cast<int64_t>(queries[order[begin]].tokens.size());
    const int64_t length = std::min(ceil_div(longest, kLengthUnit) * kLengthUnit, shape.sequence_length);
    const auto count = std::min(static_cast<size_t>(shape.num_tokens() / length), order.size() - begin);
    const auto first = order.begin() + static_cast<int64_t>(begin);
    batches.push_back({{first, first + static_cast<int64_t>(count)}, length});
    begin += count;
  }
  return batches;
}

// The log-likelihood of each query of the batch, whose losses are all that the targets leave.
std::vector<double> run_batch(Device& device, Model& model, const std::vector<Query>& queries,
                              const QueryBatch& batch) {
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
  const BatchShape shape{static_cast<int64_t>(batch.queries.size()), batch.length};
  model.evaluate(device, {tokens.data(), targets.data(), shape});
  const std::vector<float> losses = model.losses(device);
  std::vector<double> sums;
  for (size_t i = 0; i < batch.queries.size(); ++i) {
    const auto first = losses.begin() + static_cast<int64_t>(i) * batch.length;
    sums.push_back(-std::accumulate(first, first + batch.length, 0.0));
  }
  return sums;
}

std::vector<double> score(Device& device, Model& model, const std::vector<Query>& queries, const BatchShape& shape,
                          Communicator& communicator, const BeforeEvaluationBatch& before_each) {
  const std::vector<QueryBatch> batches = make_batches(queries, shape);
  const auto count = static_cast<int64_t>(batches.size());
  const int64_t ranks = communicator.size();
  std::string own_scores;
  for (int64_t round = 0; round < ceil_div(count, ranks); ++round) {
    // As in evaluate_loss: a rank without a batch does the last one again, and does not count it.
    const int64_t own = round * ranks + communicator.rank(), index = std::min(own, count - 1);
    if (before_each) before_each(nullptr);
    const QueryBatch& batch = batches[index];
    const std::vector<double> sums = run_batch(device, model, queries, batch);
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

int64_t first_largest(const std::vector<double>& x) { return std::max_element(x.begin(), x.end()) - x.begin(); }

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
    for (const TaskChoice& choice : task.documents[i * total / count].choices) {
      queries.push_back(make_query(choice.context, choice.continuation, shape.sequence_length));
      if (task.metric == TaskMetric::kPmiDc) {
        queries.push_back(make_query(choice.domain, choice.continuation, shape.sequence_length));
      }
    }
  }
  // NaN would make every choice the first one, and look like a score.
  const std::vector<double> scores = score(device, model, queries, shape, communicator, before_each);
  if (!std::all_of(scores.begin(), scores.end(), [](double x) { return std::isfinite(x); })) {
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
