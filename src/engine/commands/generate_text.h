#pragma once
#include <optional>
#include <string>
#include <vector>

#include "engine/checkpoint/checkpoint.h"
#include "engine/commands/commands.h"
#include "engine/config/config.h"
#include "engine/evaluation/generator.h"
#include "engine/text/text_codec.h"

// Code that `parka generate` and its --chat share.
namespace parka {

// --tokenizer, or the tokenizer that belongs to the checkpoint; nullopt if there is none.
std::optional<std::string> tokenizer_folder(const GenerateOptions& options, const LoadedCheckpoint& checkpoint);

// Throws Error(kBadInput), which calls the tokens `what`, if one is not of the vocabulary.
void check_tokens(const char* what, const std::vector<int32_t>& tokens, int64_t vocab_size);

// Throws Error(kBadInput) if one is the slot of an image, for a prompt without images: the row that a model with
// `vision` has there is an image's, and its embedding was never trained.
void check_without_slots(const std::vector<int32_t>& tokens, const VisionConfig& vision);

// Prints the text of a continuation while it is drawn, and a line end. Adds the text to `shown`, if given.
Continuation print_streaming(Device& device, Model& model, const CacheShape& shape,
                             const std::vector<int32_t>& prompt, const GenerationOptions& generation,
                             TextCodec& codec, std::string* shown = nullptr);

// Answers each line of standard input on standard output, until it ends. `config` is the checkpoint's.
int run_chat(const GenerateOptions& options, const LoadedCheckpoint& checkpoint, Config config);

}  // namespace parka
