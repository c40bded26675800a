#pragma once
#include <functional>
#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "data/token_files.h"
#include "engine/config/config.h"

// The token files that a config or a command names.
namespace parka {

// The files of a set of token files, by its name.
struct NamedFiles {
  std::string name;
  std::vector<std::string> files;
};
// The sets that entries NAME=FILE define, in order of first mention; entries with the same name are one set. Throws
// Error(kBadInput), naming `key`, for an entry that does not have this form.
std::vector<NamedFiles> parse_sets(const std::vector<std::string>& entries, const char* key);

ExampleRules example_rules(const Config& config);

// Throws Error(kBadInput) if a data.json of scripts/prepare_data.py beside one of the files says that its ids are
// of another type: ids of 32 bits, read as twice as many of 16, are all in a large vocabulary.
void check_token_type(const std::vector<std::string>& sources, TokenType type);

// The tokenizer that made ids, as a data.json or the header of a request file says: the SHA-256 of its file, or
// "bytes". Empty where it does not say.
std::string described_tokenizer(const nlohmann::json& description);
// Calls `called` with the first token file of each folder whose data.json, of scripts/prepare_data.py or
// prepare_images.py, describes it, and with that data.json, which may be long: it is of all files of its folder.
// Sources that are not there any more, as training data may be where a run is evaluated, say nothing.
void for_each_description(const std::vector<std::string>& sources,
                          const std::function<void(const std::string& file, const nlohmann::json&)>& called);

// Throws Error(kBadInput) for data that cannot be used, or has more images than there is room for.
TokenFiles open_token_files(const std::vector<std::string>& sources, const Config& config);
// Those of data.train; likewise also where one of its sources has no target.
TokenFiles open_training_files(const Config& config);

}  // namespace parka
