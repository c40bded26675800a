#include "engine/evaluation.h"

#include <algorithm>
#include <cstdlib>
#include <string>

#include <fmt/format.h>

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
                               int64_t max_sequences, Communicator& communicator,
                               const std::function<void()>& before_each) {
  const int64_t S = files.sequence_length(), total = files.num_sequences();
  EvaluationResult result;
  result.num_sequences = max_sequences > 0 ? std::min(max_sequences, total) : total;
  const int64_t batches = ceil_div(result.num_sequences, micro_batch), ranks = communicator.size();
  double sum = 0;
  for (int64_t round = 0; round < ceil_div(batches, ranks); ++round) {
    // All ranks have to make the same collective calls: one that has no micro-batch left does the last one again,
    // and does not count it.
    const int64_t own = round * ranks + communicator.rank(), batch = std::min(own, batches - 1);
    const int64_t begin = batch * micro_batch, count = std::min(micro_batch, result.num_sequences - begin);
    std::vector<int32_t> tokens(static_cast<size_t>(count * S));
    for (int64_t i = 0; i < count; ++i)
      files.read((begin + i) * total / result.num_sequences, tokens.data() + i * S);
    const std::vector<int32_t> targets = next_token_targets(tokens, S);
    if (before_each) before_each();
    model.evaluate(device, {tokens.data(), targets.data(), {count, S}});
    if (own != batch) continue;
    for (float loss : model.losses(device)) sum += loss;
  }
  result.num_targets = result.num_sequences * (S - 1);
  double sum_of_all = 0;
  for (const std::string& of_rank : communicator.gather_text(fmt::format("{:a}", sum))) {
    sum_of_all += std::strtod(of_rank.c_str(), nullptr);
  }
  result.loss = result.num_targets > 0 ? sum_of_all / static_cast<double>(result.num_targets) : 0.0;
  return result;
}

}  // namespace parka
