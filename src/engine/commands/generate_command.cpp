#include <algorithm>
#include <cmath>
#include <cstdio>
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <unistd.h>

#include "core/error.h"
#include "core/log/log.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/checkpoint/saved_state.h"
#include "engine/commands/argument_values.h"
#include "engine/commands/commands.h"
#include "engine/commands/device_setup.h"
#include "engine/config/config.h"
#include "engine/config/config_io.h"
#include "engine/evaluation/generator.h"
#include "engine/evaluation/inference_run.h"
#include "engine/text/image_geometry.h"
#include "engine/text/text_codec.h"
#include "engine/text/tokenizer_files.h"

namespace parka {
namespace {

// --tokenizer, or the tokenizer that belongs to the checkpoint; nullopt if there is none.
std::optional<std::string> tokenizer_folder(const GenerateOptions& options, const LoadedCheckpoint& checkpoint) {
  if (!options.tokenizer.empty()) return open_tokenizer(options.tokenizer, "--tokenizer");
  return find_tokenizer(checkpoint.path(), checkpoint.state());
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
  ordered_json line = {{"prompt_tokens", prompt}};
  if (codec != nullptr) line["text"] = text_of(*codec, prompt, continuation.tokens);
  line["tokens"] = continuation.tokens;
  line["stopped"] = continuation.stopped;
  // A model of bytes may write what is no UTF-8.
  std::printf("%s\n", line.dump(-1, ' ', false, json::error_handler_t::replace).c_str());
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

// Throws Error(kBadInput), which calls the tokens `what`, if one is not of the vocabulary.
void check_tokens(const char* what, const std::vector<int32_t>& tokens, int64_t vocab_size) {
  for (int32_t id : tokens) {
    if (id < 0 || id >= vocab_size) {
      throw_bad_input("{} {} is outside of the vocabulary of {}", what, id, vocab_size);
    }
  }
}

// Throws Error(kBadInput) if one is the slot of an image, for a prompt without images: the row that a model with
// `vision` has there is an image's, and its embedding was never trained.
void check_without_slots(const std::vector<int32_t>& tokens, const VisionConfig& vision) {
  if (!vision.exists() || std::ranges::count(tokens, vision.image_token) == 0) return;
  throw_bad_input("the prompt's token {} is the slot of an image; give --image FILE with one --prompt",
                  vision.image_token);
}

// Prints the text of a continuation while it is drawn, and a line end. Adds the text to `shown`, if given.
Continuation print_streaming(Device& device, Model& model, const CacheShape& shape,
                             const std::vector<int32_t>& prompt, const GenerationOptions& generation,
                             TextCodec& codec, std::string* shown = nullptr) {
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

// The messages of a chat, as many of the latest as the model's context holds.
class Conversation {
 public:
  Conversation(TextTokenizer& tokenizer, const std::string& system, int64_t context)
      : tokenizer_(tokenizer), context_(context) {
    if (!system.empty()) add("system", system);
    num_kept_ = messages_.size();
  }

  void add(const char* role, const std::string& text) { messages_.push_back({{"role", role}, {"content", text}}); }

  void take_back() { messages_.erase(messages_.size() - 1); }

  // The ids up to where the assistant speaks. A quarter of the context is left to it: the oldest turns are
  // forgotten, but not the system message. If the last message alone is too long, nothing is forgotten.
  std::vector<int32_t> prompt() {
    json messages = messages_;
    std::vector<int32_t> ids = tokenizer_.encode_chat(messages);
    size_t forgotten = 0;
    while (static_cast<int64_t>(ids.size()) > context_ - context_ / 4 && messages.size() > num_kept_ + 2) {
      const auto oldest = messages.begin() + static_cast<std::ptrdiff_t>(num_kept_);
      messages.erase(oldest, oldest + 2);
      ++forgotten;
      ids = tokenizer_.encode_chat(messages);
    }
    if (forgotten == 0 || static_cast<int64_t>(ids.size()) > context_) return ids;
    log_warning("the oldest {} are forgotten: the context (data.sequence_length) has {} tokens",
                forgotten == 1 ? "question and answer" : fmt::format("{} questions and answers", forgotten),
                context_);
    messages_ = std::move(messages);
    return ids;
  }

 private:
  TextTokenizer& tokenizer_;
  int64_t context_;
  json messages_ = json::array();
  size_t num_kept_ = 0;  // the system message
};

// The next line that says something; on a terminal it is asked for.
bool read_message(bool on_terminal, std::string& text) {
  do {
    if (on_terminal) {
      std::fputs("> ", stdout);
      std::fflush(stdout);
    }
    if (!std::getline(std::cin, text)) {
      if (on_terminal) std::putchar('\n');
      return false;
    }
    if (!text.empty() && text.back() == '\r') text.pop_back();
  } while (text.find_first_not_of(" \t") == std::string::npos);
  return true;
}

// Answers each line of standard input on standard output, until it ends. `config` is the checkpoint's.
int run_chat(const GenerateOptions& options, const LoadedCheckpoint& checkpoint, Config config) {
  const std::optional<std::string> folder = tokenizer_folder(options, checkpoint);
  if (!folder) {
    throw_bad_input("{}: has no tokenizer for --chat; name its folder with --tokenizer", checkpoint.path());
  }
  TextTokenizer tokenizer(*folder, TextTokenizer::Use::kChat);
  GenerationOptions generation{options.sampling, options.num_tokens, options.stop_tokens};
  generation.stop_tokens.insert(generation.stop_tokens.end(), tokenizer.stop_tokens().begin(),
                                tokenizer.stop_tokens().end());
  const CacheShape shape{1, config.data.sequence_length};
  config.training.micro_batch_size = 1;
  const std::unique_ptr<Device> device = make_inference_device(config, options.overrides);
  InferenceRun run(*device, checkpoint, config, shape);

  Conversation conversation(tokenizer, options.system, shape.max_length);
  const bool on_terminal = isatty(STDIN_FILENO) != 0 && isatty(STDOUT_FILENO) != 0;
  std::string text;
  while (read_message(on_terminal, text)) {
    conversation.add("user", text);
    const std::vector<int32_t> prompt = conversation.prompt();
    if (static_cast<int64_t>(prompt.size()) > shape.max_length) {
      const std::string message = fmt::format(
          "the last message, with what the chat template adds, has {} tokens and the context {}; write less, or --set data.sequence_length=N",
          prompt.size(), shape.max_length);
      if (!on_terminal) throw_bad_input("{}", message);
      log_warning("{}", message);
      conversation.take_back();
      continue;
    }
    check_tokens("token of the chat", prompt, config.model.vocab_size);
    check_without_slots(prompt, config.model.vision);
    std::string answer;
    const Continuation continuation =
        print_streaming(*device, run.model(), shape, prompt, generation, tokenizer, &answer);
    if (!continuation.stopped) log_info("cut off after {} tokens; see --tokens", continuation.tokens.size());
    conversation.add("assistant", answer);
    ++generation.sampling.seed;  // other random numbers for the next answer
  }
  return 0;
}

}  // namespace

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
  if (options.prompt_tokens.empty()) {
    codec = open_codec(tokenizer_folder(options, checkpoint).value_or(""), config.model.vocab_size);
    if (!codec) {
      throw_bad_input(
          "{}: has no tokenizer for --prompt; name its folder with --tokenizer, or give --prompt-tokens",
          checkpoint.path());
    }
  }
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
