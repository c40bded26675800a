#include <algorithm>
#include <cmath>
#include <cstdio>

#include <nlohmann/json.hpp>

#include "engine/checkpoint/saved_state.h"
#include "engine/commands/argument_values.h"
#include "engine/commands/commands.h"
#include "engine/commands/device_setup.h"
#include "engine/evaluation/generator.h"
#include "engine/evaluation/inference_run.h"

namespace parka {
namespace {

// scripts/prepare_data.py's byte tokenizer: ids 0 to 255 are bytes, 256 ends a document.
constexpr int32_t kEndOfDocument = 256;
constexpr int64_t kMaxByteVocabulary = 1024;  // more rows than that are another tokenizer's

std::vector<int32_t> bytes_of(const std::string& text) {
  std::vector<int32_t> tokens;
  for (unsigned char byte : text) tokens.push_back(byte);
  if (tokens.empty()) tokens.push_back(kEndOfDocument);  // what stands before every document but the first
  return tokens;
}

void check_tokens(const char* what, const std::vector<int32_t>& tokens, int64_t vocab_size) {
  for (int32_t id : tokens) {
    if (id < 0 || id >= vocab_size) {
      throw_bad_input("{} {} is outside of the vocabulary of {}", what, id, vocab_size);
    }
  }
}

std::vector<std::vector<int32_t>> prompts_of(const GenerateOptions& options, int64_t vocab_size) {
  if (!options.prompts.empty() && !options.prompt_tokens.empty())
    throw_bad_input("give --prompt or --prompt-tokens, not both");
  std::vector<std::vector<int32_t>> prompts;
  if (options.prompt_tokens.empty()) {
    if (vocab_size <= kEndOfDocument || vocab_size > kMaxByteVocabulary) {
      throw_bad_input(
          "--prompt is for models trained on bytes, but this model's vocabulary is {}; give --prompt-tokens "
          "instead",
          vocab_size);
    }
    for (const std::string& text : options.prompts) prompts.push_back(bytes_of(text));
    if (prompts.empty()) prompts.push_back(bytes_of(""));
  }
  for (const std::string& text : options.prompt_tokens) prompts.push_back(parse_token_list(text));
  for (const std::vector<int32_t>& prompt : prompts) check_tokens("prompt token", prompt, vocab_size);
  return prompts;
}

// The model sees its training context at most, and no more is computed or kept than what these prompts can come to.
int64_t context_of(const std::vector<std::vector<int32_t>>& prompts, int64_t num_tokens, int64_t max_context) {
  int64_t longest = 0;
  for (const auto& prompt : prompts) longest = std::max(longest, static_cast<int64_t>(prompt.size()));
  return std::min(longest, max_context) + std::min(num_tokens, max_context) > max_context ? max_context
                                                                                          : longest + num_tokens;
}

std::string text_of(const std::vector<int32_t>& bytes) { return {bytes.begin(), bytes.end()}; }

void print_json(const std::vector<int32_t>& prompt, const Continuation& continuation, bool as_text) {
  nlohmann::ordered_json line = {{"prompt_tokens", prompt}};
  if (as_text) line["text"] = text_of(continuation.tokens);
  line["tokens"] = continuation.tokens;
  line["stopped"] = continuation.stopped;
  // A model of bytes may write what is no UTF-8.
  std::printf("%s\n", line.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace).c_str());
}

// Prints a continuation while it is drawn, behind its prompt if that is text.
void print_streaming(Device& device, Model& model, const CacheShape& shape,
                     const std::vector<std::vector<int32_t>>& prompts, const GenerationOptions& generation,
                     const GenerateOptions& options) {
  const bool as_text = options.prompt_tokens.empty();
  if (as_text && !options.prompts.empty()) std::fputs(options.prompts.front().c_str(), stdout);
  bool first = true;
  generate(device, model, shape, prompts, generation, [&](size_t, int32_t token) {
    if (as_text) {
      std::putchar(token);
    } else {
      std::printf("%s%d", first ? "" : ",", token);
    }
    first = false;
    std::fflush(stdout);
  });
  std::putchar('\n');
}

}  // namespace

int run_generate(const GenerateOptions& options) {
  if (!std::isfinite(options.sampling.temperature) || std::isnan(options.sampling.top_p)) {
    throw_bad_input("--temperature and --top-p must be finite numbers");
  }
  const LoadedCheckpoint checkpoint = open_checkpoint(options.checkpoint);
  Config config = config_of(checkpoint, options.overrides);
  const std::vector<std::vector<int32_t>> prompts = prompts_of(options, config.model.vocab_size);
  check_tokens("--stop-token", options.stop_tokens, config.model.vocab_size);
  GenerationOptions generation{options.sampling, options.num_tokens, options.stop_tokens};
  const bool as_text = options.prompt_tokens.empty();
  if (as_text) {  // what is no byte ends a text
    for (int64_t id = kEndOfDocument; id < config.model.vocab_size; ++id)
      generation.stop_tokens.push_back(static_cast<int32_t>(id));
  }
  const CacheShape shape{std::min(options.batch, static_cast<int64_t>(prompts.size())),
                         context_of(prompts, options.num_tokens, config.data.sequence_length)};
  config.training.micro_batch_size = 1;
  config.data.sequence_length = std::max(shape.max_length, shape.num_slots);  // a step has a row for each slot
  const std::unique_ptr<Device> device = make_device(config);
  InferenceRun run(*device, checkpoint, config, shape);
  if (prompts.size() == 1 && !options.json) {
    print_streaming(*device, run.model(), shape, prompts, generation, options);
    return 0;
  }
  const std::vector<Continuation> continuations = generate(*device, run.model(), shape, prompts, generation);
  for (size_t i = 0; i < prompts.size(); ++i) print_json(prompts[i], continuations[i], as_text);
  return 0;
}

}  // namespace parka
