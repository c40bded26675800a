#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>
#include <optional>

#include <nlohmann/json.hpp>

#include "core/log/log.h"
#include "engine/checkpoint/saved_state.h"
#include "engine/commands/argument_values.h"
#include "engine/commands/commands.h"
#include "engine/commands/device_setup.h"
#include "engine/commands/generate_text.h"
#include "engine/config/given_keys.h"
#include "engine/evaluation/generator.h"
#include "engine/evaluation/inference_run.h"
#include "engine/text/byte_codec.h"
#include "engine/text/image_prompt.h"
#include "engine/text/text_tokenizer.h"
#include "engine/text/tokenizer_files.h"

namespace parka {
namespace {

std::unique_ptr<TextCodec> open_codec(const GenerateOptions& options, const LoadedCheckpoint& checkpoint,
                                      int64_t vocab_size) {
  if (const std::optional<std::string> folder = tokenizer_folder(options, checkpoint)) {
    return std::make_unique<TextTokenizer>(*folder, TextTokenizer::Use::kPrompts);
  }
  if (ByteCodec::fits(vocab_size)) return std::make_unique<ByteCodec>(vocab_size);
  throw_bad_input("{}: has no tokenizer for --prompt; name its folder with --tokenizer, or give --prompt-tokens",
                  checkpoint.path());
}

// `codec` is of text; null where the options give ids.
std::vector<std::vector<int32_t>> prompts_of(const GenerateOptions& options, TextCodec* codec) {
  std::vector<std::vector<int32_t>> prompts;
  for (const std::string& text : options.prompt_tokens) prompts.push_back(parse_token_list(text));
  for (const std::string& text : options.prompts) prompts.push_back(codec->encode(text));
  if (prompts.empty()) prompts.push_back(codec->encode(""));
  return prompts;
}

// The prompt of --image; nullopt if there is none.
std::optional<ImagePrompt> image_prompt_of(const GenerateOptions& options, const LoadedCheckpoint& checkpoint,
                                           const Config& config, TextCodec* codec) {
  if (options.images.empty()) {
    const auto shows = [](const std::string& prompt) { return prompt.find("<image>") != std::string::npos; };
    if (config.model.vision.exists() && std::ranges::any_of(options.prompts, shows)) {
      throw_bad_input("the prompt has <image> and no picture is given; add --image FILE, or leave <image> out");
    }
    return std::nullopt;
  }
  if (!config.model.vision.exists()) {
    throw_bad_input("{}: --image needs a model that sees images, and model.vision.tower is none",
                    checkpoint.path());
  }
  if (options.prompts.size() != 1) throw_bad_input("--image goes with one --prompt, not with several");
  const std::string processor = tokenizer_folder(options, checkpoint).value_or("");
  return make_image_prompt(options.prompts.front(), options.images, options.geometry, processor,
                           config.model.vision, *codec);
}

// The length that an imported model is made for, which is more than its config.json proposes to train with; for
// a run the length it was trained on, and always what --set says.
int64_t longest_context(const LoadedCheckpoint& checkpoint, const Config& config, const GenerateOptions& options) {
  const int64_t given = config.data.sequence_length;
  return is_overridden(options.overrides, "data.sequence_length") ? given : max_positions_of(checkpoint, given);
}

// An exported model is used in bf16, and samples shall be like its own, unless the command line asks for others.
void choose_numerics(const GenerateOptions& options, Config& config) {
  if (!config.precision.has_fp8() || config.precision.compute != DType::kBF16) return;
  const bool is_given =
      is_overridden(options.overrides, "precision.eval") || is_overridden(options.overrides, "precision.recipe");
  if (!is_given) config.precision.eval = EvalNumerics::kBf16;
  log_info("numerics: {}{}", numerics_of(config),
           is_given ? "" : "; --set precision.eval=same takes those of training");
}

void warn_of_cut_prompts(const std::vector<std::vector<int32_t>>& prompts, int64_t max_context) {
  for (const auto& prompt : prompts) {
    if (static_cast<int64_t>(prompt.size()) <= max_context) continue;
    log_warning(
        "a prompt has {} tokens, of which the model sees the last {}; --set data.sequence_length=N lets it see more",
        prompt.size(), max_context);
  }
}

// The model sees its context at most, and no more is computed or kept than what these prompts can come to.
int64_t context_of(const std::vector<std::vector<int32_t>>& prompts, int64_t num_tokens, int64_t max_context) {
  int64_t longest = 0;
  for (const auto& prompt : prompts) longest = std::max(longest, static_cast<int64_t>(prompt.size()));
  return std::min(longest, max_context) + std::min(num_tokens, max_context) > max_context ? max_context
                                                                                          : longest + num_tokens;
}

std::string text_of(TextCodec& codec, const std::vector<int32_t>& prompt, const std::vector<int32_t>& tokens) {
  codec.begin(prompt);
  std::string text;
  for (const int32_t token : tokens) text += codec.next(token);
  return text + codec.end();
}

void print_json(const std::vector<int32_t>& prompt, const Continuation& continuation, TextCodec* codec) {
  nlohmann::ordered_json line = {{"prompt_tokens", prompt}};
  if (codec != nullptr) line["text"] = text_of(*codec, prompt, continuation.tokens);
  line["tokens"] = continuation.tokens;
  line["stopped"] = continuation.stopped;
  // A model of bytes may write what is no UTF-8.
  std::printf("%s\n", line.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace).c_str());
}

// Prints the ids of a continuation while they are drawn.
void print_streaming_ids(Device& device, Model& model, const CacheShape& shape, const std::vector<int32_t>& prompt,
                         const GenerationOptions& generation) {
  bool first = true;
  generate(device, model, shape, {prompt}, generation, [&](size_t, int32_t token) {
    std::printf("%s%d", first ? "" : ",", token);
    first = false;
    std::fflush(stdout);
  });
  std::putchar('\n');
}

}  // namespace

std::optional<std::string> tokenizer_folder(const GenerateOptions& options, const LoadedCheckpoint& checkpoint) {
  if (!options.tokenizer.empty()) return open_tokenizer(options.tokenizer, "--tokenizer");
  return find_tokenizer(checkpoint.path(), checkpoint.state());
}

void check_tokens(const char* what, const std::vector<int32_t>& tokens, int64_t vocab_size) {
  for (int32_t id : tokens) {
    if (id < 0 || id >= vocab_size) {
      throw_bad_input("{} {} is outside of the vocabulary of {}", what, id, vocab_size);
    }
  }
}

void check_without_slots(const std::vector<int32_t>& tokens, const VisionConfig& vision) {
  if (!vision.exists() || std::ranges::count(tokens, vision.image_token) == 0) return;
  throw_bad_input("the prompt's token {} is the slot of an image; give --image FILE with one --prompt",
                  vision.image_token);
}

Continuation print_streaming(Device& device, Model& model, const CacheShape& shape,
                             const std::vector<int32_t>& prompt, const GenerationOptions& generation,
                             TextCodec& codec, std::string* shown) {
  const auto show = [&](const std::string& text) {
    std::fwrite(text.data(), 1, text.size(), stdout);
    std::fflush(stdout);
    if (shown != nullptr) *shown += text;
  };
  codec.begin(prompt);
  const std::vector<Continuation> result =
      generate(device, model, shape, {prompt}, generation, [&](size_t, int32_t token) { show(codec.next(token)); });
  show(codec.end());
  std::putchar('\n');
  return result.front();
}

int run_generate(const GenerateOptions& options) {
  if (!std::isfinite(options.sampling.temperature) || std::isnan(options.sampling.top_p)) {
    throw_bad_input("--temperature and --top-p must be finite numbers");
  }
  if (!options.prompts.empty() && !options.prompt_tokens.empty())
    throw_bad_input("give --prompt or --prompt-tokens, not both");
  const LoadedCheckpoint checkpoint = open_checkpoint(options.checkpoint, options.overrides);
  Config config = inference_config_of(checkpoint, options.overrides);
  check_tokens("--stop-token", options.stop_tokens, config.model.vocab_size);
  choose_numerics(options, config);
  if (options.chat) return run_chat(options, checkpoint, config);
  std::unique_ptr<TextCodec> codec;
  if (options.prompt_tokens.empty()) codec = open_codec(options, checkpoint, config.model.vocab_size);
  const std::optional<ImagePrompt> image_prompt = image_prompt_of(options, checkpoint, config, codec.get());
  const std::vector<std::vector<int32_t>> prompts =
      image_prompt ? std::vector<std::vector<int32_t>>{image_prompt->tokens} : prompts_of(options, codec.get());
  for (const std::vector<int32_t>& prompt : prompts) {
    check_tokens("prompt token", prompt, config.model.vocab_size);
    if (!image_prompt) check_without_slots(prompt, config.model.vision);
  }
  GenerationOptions generation{options.sampling, options.num_tokens, options.stop_tokens};
  if (codec) {
    generation.stop_tokens.insert(generation.stop_tokens.end(), codec->stop_tokens().begin(),
                                  codec->stop_tokens().end());
  }
  const int64_t max_context = longest_context(checkpoint, config, options);
  warn_of_cut_prompts(prompts, max_context);
  const CacheShape shape{std::min(options.batch, static_cast<int64_t>(prompts.size())),
                         context_of(prompts, options.num_tokens, max_context)};
  // Without images the tower takes no room but that of its weights.
  config.data.images_per_sequence = static_cast<int64_t>(options.images.size());
  if (image_prompt) generation.images = &image_prompt->images;
  config.training.micro_batch_size = 1;
  config.data.sequence_length = std::max(shape.max_length, shape.num_slots);  // a step has a row for each slot
  const std::unique_ptr<Device> device = make_inference_device(config, options.overrides);
  InferenceRun run(*device, checkpoint, config, shape);
  if (prompts.size() == 1 && !options.json) {
    if (!codec) {
      print_streaming_ids(*device, run.model(), shape, prompts.front(), generation);
      return 0;
    }
    if (!options.prompts.empty()) std::fputs(options.prompts.front().c_str(), stdout);
    print_streaming(*device, run.model(), shape, prompts.front(), generation, *codec);
    return 0;
  }
  const std::vector<Continuation> continuations = generate(*device, run.model(), shape, prompts, generation);
  for (size_t i = 0; i < prompts.size(); ++i) print_json(prompts[i], continuations[i], codec.get());
  return 0;
}

}  // namespace parka
