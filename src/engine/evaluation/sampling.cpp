#include "engine/evaluation/sampling.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/error.h"
#include "core/philox.h"

namespace parka {
namespace {

// The tokens that may be drawn, most likely first, those of equal logits in their order.
std::vector<int32_t> most_likely(const std::vector<float>& logits, int64_t top_k) {
  std::vector<int32_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  const auto likelier = [&](int32_t a, int32_t b) {
    return logits[a] != logits[b] ? logits[a] > logits[b] : a < b;
  };
  const auto count = static_cast<int64_t>(order.size()), k = top_k > 0 ? std::min(top_k, count) : count;
  std::partial_sort(order.begin(), order.begin() + k, order.end(), likelier);
  order.resize(static_cast<size_t>(k));
  return order;
}

}  // namespace

int32_t sample_token(const std::vector<float>& logits, const SamplingOptions& options, uint64_t stream,
                     uint64_t index) {
  for (size_t i = 0; i < logits.size(); ++i) {
    if (!std::isfinite(logits[i])) {
      throw Error(ExitCode::kNonFinite,
                  fmt::format("the logit of token {} is {}: the checkpoint's weights are damaged or diverged", i,
                              logits[i]));
    }
  }
  if (options.temperature == 0) {
    return static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
  }
  const std::vector<int32_t> order = most_likely(logits, options.top_k);
  std::vector<double> weight;
  double sum = 0;
  for (int32_t token : order) {
    weight.push_back(std::exp((static_cast<double>(logits[token]) - logits[order[0]]) / options.temperature));
    sum += weight.back();
  }
  if (options.top_p < 1) {
    double kept = 0;
    size_t count = 0;
    while (count < weight.size() && kept < options.top_p * sum) kept += weight[count++];
    weight.resize(std::max<size_t>(count, 1));
    sum = std::max(kept, weight[0]);
  }
  double rest = sum * uniform_open(philox4x32(static_cast<uint64_t>(options.seed), stream, index)[0]);
  for (size_t i = 0; i < weight.size(); ++i) {
    rest -= weight[i];
    if (rest <= 0) return order[i];
  }
  return order[weight.size() - 1];
}

}  // namespace parka
