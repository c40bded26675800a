#include <algorithm>
#include <cmath>
#include <cstdio>
#include <numeric>

#include "core/philox.h"
#include "engine/commands.h"
#include "engine/device_setup.h"
#include "engine/inference_run.h"
#include "kernels/ops/cross_entropy.h"

namespace parka {
namespace {

// scripts/prepare_data.py's byte tokenizer: ids 0 to 255 are bytes, 256 ends a document.
constexpr int32_t kEndOfDocument = 256;
constexpr int64_t kMaxByteVocabulary = 1024;  // more rows than that are another tokenizer's

// Draws a token from softmax(logits / temperature), among the top_k likeliest if that is not 0.
int32_t sample(const std::vector<float>& logits, const GenerateOptions& options, uint64_t index) {
  std::vector<int32_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  const auto likelier = [&](int32_t a, int32_t b) {
    return logits[a] != logits[b] ? logits[a] > logits[b] : a < b;
  };
  const size_t k = options.top_k > 0 ? std::min(static_cast<size_t>(options.top_k), order.size()) : order.size();
  std::partial_sort(order.begin(), order.begin() + static_cast<int64_t>(k), order.end(), likelier);
  if (options.temperature == 0) return order.front();
  std::vector<double> weight(k);
  double sum = 0;
  for (size_t i = 0; i < k; ++i) {
    weight[i] = std::exp((static_cast<double>(logits[order[i]]) - logits[order[0]]) / options.temperature);
    sum += weight[i];
  }
  double rest = sum * uniform_open(philox4x32(static_cast<uint64_t>(options.seed), 0, index)[0]);
  for (size_t i = 0; i < k; ++i) {
    rest -= weight[i];
    if (rest <= 0) return order[i];
  }
  return order[k - 1];
}

std::vector<int32_t> prompt_of(const GenerateOptions& options, const Config& config) {
  if (!options.prompt.empty() && !options.prompt_tokens.empty())
    throw_bad_input("give --prompt or --prompt-tokens, not both");
  std::vector<int32_t> prompt = options.prompt_tokens;
  if (prompt.empty()) {
    if (config.model.vocab_size <= kEndOfDocument || config.model.vocab_size > kMaxByteVocabulary) {
      throw_bad_input(
          "--prompt is for models trained on bytes, and this one's vocabulary is {}; give --prompt-tokens instead",
          config.model.vocab_size);
    }
    for (unsigned char byte : options.prompt) prompt.push_back(byte);
  }
  if (prompt.empty()) prompt.push_back(kEndOfDocument);  // what stands before every document but the first
  for (int32_t id : prompt) {
    if (id < 0 || id >= config.model.vocab_size) {
      throw_bad_input("prompt token {} is outside of the vocabulary of {}", id, config.model.vocab_size);
    }
  }
  return prompt;
}

}  // namespace

int run_generate(const GenerateOptions& options) {
  const LoadedCheckpoint checkpoint = open_checkpoint(options.checkpoint);
  Config config = config_of(checkpoint, options.overrides);
  config.training.micro_batch_size = 1;
  const std::unique_ptr<Device> device = make_device(config);
  InferenceRun run(*device, checkpoint, config);
  const int64_t max_context = run.config().data.sequence_length;
  std::vector<int32_t> tokens = prompt_of(options, run.config());
  const bool as_text = options.prompt_tokens.empty();
  std::fputs(options.prompt.c_str(), stdout);
  for (int64_t i = 0; i < options.num_tokens; ++i) {
    // The model sees its training context at most: the latest tokens.
    const int64_t context = std::min<int64_t>(max_context, static_cast<int64_t>(tokens.size()));
    const int32_t* first = tokens.data() + static_cast<int64_t>(tokens.size()) - context;
    const std::vector<int32_t> targets(static_cast<size_t>(context), kIgnoreTarget);
    const std::vector<float> logits =
        run.model().logits(*device, {first, targets.data(), {1, context}}, context - 1, 1);
    const int32_t token = sample(logits, options, static_cast<uint64_t>(i));
    tokens.push_back(token);
    if (as_text) {
      if (token >= kEndOfDocument) break;
      std::putchar(token);
    } else {
      std::printf("%s%d", i == 0 ? "" : ",", token);
    }
    std::fflush(stdout);
  }
  std::putchar('\n');
  return 0;
}

}  // namespace parka
