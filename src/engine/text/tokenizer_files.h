#pragma once
#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "engine/config/config.h"
#include "engine/files/json.h"

// The folder of a model's tokenizer: it has tokenizer.json, and some of the files of carried_files().
namespace parka {

// The subfolder of a run, and of what parka prepare makes, that is such a folder.
inline constexpr const char* kTokenizerFolder = "tokenizer";
inline constexpr const char* kTokenizerName = "tokenizer.json";

// The tokenizer of the checkpoint in folder `path` with this state: its own, that of the run that it lies in, or
// that of the model or run that its config's checkpoint.init_from names, and so on. nullopt if there is none.
std::optional<std::string> find_tokenizer(const std::string& path, const json& state);

// The folder that a path of the user's means, which may also be that of its tokenizer.json. Throws
// Error(kBadInput), whose message begins with `where`, if there is none.
std::string open_tokenizer(const std::string& path, const std::string& where);

// The tokenizer that a run has, or will have when it begins; empty if it has none.
std::string tokenizer_of_run(const Config& config);

// Copies the tokenizer of a run into the run folder, unless there is one already: that of data.tokenizer, or else
// of checkpoint.init_from, or else what parka prepare has left beside the first file of data.train. Where
// that is the same tokenizer as the one of checkpoint.init_from, its chat template, its ends of texts and what it
// puts around them are taken: the run learns those. So is the processor of images by which data.train was made,
// unless data.tokenizer is given. For the rank that has locked the folder. Throws
// Error(kBadInput) if data.tokenizer is missing and there is no copy either.
void keep_tokenizer(const Config& config);

// Throws what keep_tokenizer() would throw; it writes nothing. Throws Error(kBadInput), too, if files of data.train
// were made with several tokenizers, or not with data.tokenizer or else checkpoint.init_from's.
void check_tokenizer(const Config& config);
// Likewise, but a tokenizer or a model that is not there says nothing.
void check_present_tokenizer(const Config& config);

// All tokens of a tokenizer, by their ids; and the XXH3-128 of their lines "ID TOKEN", as request files have it.
std::map<int64_t, std::string> tokens_of(const std::string& folder);
std::string checksum_of_tokens(const std::string& folder);

// The special tokens of a tokenizer, which are no text, by their ids.
std::map<int32_t, std::string> special_tokens(const std::string& folder);

// True if both folders have a tokenizer.json, and these are not the same but for the tokens put around a text.
bool have_different_tokenizers(const std::string& one, const std::string& other);

// bos_token_id, eos_token_id and pad_token_id of config.json, by the files of a tokenizer, or null.
json special_token_ids(const std::string& folder);

}  // namespace parka
