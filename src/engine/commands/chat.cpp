#include <algorithm>
#include <cstdio>
#include <iostream>

#include <unistd.h>

#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/log/log.h"
#include "engine/commands/device_setup.h"
#include "engine/commands/generate_text.h"
#include "engine/evaluation/inference_run.h"
#include "engine/text/text_tokenizer.h"

namespace parka {
namespace {

using nlohmann::json;

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

  // The ids up to where the assistant speaks. A quarter of the context is left to it; to make that room the oldest
  // turns are forgotten, but not the system message. If the last message alone is too long, nothing is
  // forgotten, and there are more than the context holds.
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

}  // namespace

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

}  // namespace parka
