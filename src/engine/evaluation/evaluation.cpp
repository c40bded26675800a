#include "engine/evaluation/evaluation.h"

#include <algorithm>
#include <cstdlib>
#include <string>

#include <fmt/format.h>

#include "data/image_batch.h"
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
                               const BeforeEvaluationBatch& before_each) {
  const int64_t S = files.sequence_length(), total = files.num_sequences();
  EvaluationResult result;
  result.num_sequences = max_sequences > 0 ? std::min(max_sequences, total) : total;
  const int64_t batches = ceil_div(result.num_sequences, micro_batch), ranks = communicator.size();
  const bool separate = files.rules().separate_documents;
  const int64_t images_per_sequence = files.rules().images.any() ? model.shape().images_per_sequence : 0;
  int64_t own_targets = 0;
  double sum = 0;
  for (int64_t round = 0; round < ceil_div(batches, ranks); ++round) {
    // All ranks have to make the same collective calls: one that has no micro-batch left does the last one again,
    // and does not count it.
    const int64_t own = round * ranks + communicator.rank(), batch = std::min(own, batches - 1);
    const int64_t begin = batch * micro_batch, count = std::min(micro_batch, result.num_sequences - begin);
    std::vector<int32_t> tokens(static_cast<size_t>(count * S)), targets(tokens.size()), first_keys;
    if (separate) first_keys.resize(tokens.size());
    int64_t num_targets = 0;
    std::vector<int64_t> sequences;
    ImageBatch images;
    std::exception_ptr read_failure;
    try {
      for (int64_t i = 0; i < count; ++i) sequences.push_back((begin + i) * total / result.num_sequences);
      for (int64_t i = 0; i < count; ++i) {
        num_targets += files.read_example(
            sequences[static_cast<size_t>(i)],
            {tokens.data() + i * S, targets.data() + i * S, separate ? first_keys.data() + i * S : nullptr});
      }
      if (images_per_sequence > 0) images = read_image_batch(files, sequences, count * images_per_sequence);
    } catch (...) {
      read_failure = std::current_exception();
    }
    if (before_each) before_each(read_failure);
    if (read_failure) std::rethrow_exception(read_failure);
    model.evaluate(device, {tokens.data(),
                            targets.data(),
                            {count, S, separate, images_per_sequence},
                            separate ? first_keys.data() : nullptr,
                            {},
                            images.pixels.data(),
                            images.positions.data()});
    if (own != batch) continue;
    own_targets += num_targets;
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

}  // namespace parka
