#include "engine/evaluation.h"

#include <algorithm>

#include "kernels/ops/cross_entropy.h"

namespace parka {

std::vector<int32_t> next_token_targets(const std::vector<int32_t>& tokens, int64_t sequence_length) {
  std::vector<int32_t> targets(tokens.size(), kIgnoreTarget);
  for (size_t t = 0; t + 1 < tokens.size(); ++t) {
    if (static_cast<int64_t>(t + 1) % sequence_length != 0) targets[t] = tokens[t + 1];
  }
  return targets;
}

EvaluationResult evaluate_loss(Device& device, Model& model, const TokenFiles& files, int64_t micro_batch,
                               int64_t max_sequences) {
  const int64_t S = files.sequence_length();
  EvaluationResult result;
  const int64_t total = files.num_sequences();
  result.num_sequences = max_sequences > 0 ? std::min(max_sequences, total) : total;
  double sum = 0;
  for (int64_t begin = 0; begin < result.num_sequences; begin += micro_batch) {
    const int64_t count = std::min(micro_batch, result.num_sequences - begin);
    std::vector<int32_t> tokens(static_cast<size_t>(count * S));
    for (int64_t i = 0; i < count; ++i)
      files.read((begin + i) * total / result.num_sequences, tokens.data() + i * S);
    const std::vector<int32_t> targets = next_token_targets(tokens, S);
    model.evaluate(device, {tokens.data(), targets.data(), {count, S}});
    for (float loss : model.losses(device)) sum += loss;
    result.num_targets += count * (S - 1);
  }
  result.loss = result.num_targets > 0 ? sum / static_cast<double>(result.num_targets) : 0.0;
  return result;
}

}  // namespace parka
