#pragma once
#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "engine/config/config.h"

// What the data.json of scripts/prepare_data.py or prepare_images.py says of the token files beside it. One may be
// long: it is of all files of its folder.
namespace parka {

// The data.json of folders, each read once.
class DataDescriptions {
 public:
  // That of a token file; null if there is none which names the file, in `split` alone where that is given.
  const nlohmann::json* of(const std::filesystem::path& file, std::string_view split = {});

 private:
  std::map<std::filesystem::path, nlohmann::json> folders_;
};

// The data.json that describes a token file.
std::filesystem::path description_path(const std::filesystem::path& file);

// Throws Error(kBadInput) if `description`, that of `file`, says that its ids are of another type.
void check_described_type(const std::filesystem::path& file, const nlohmann::json& description, TokenType type);

// Throws Error(kBadInput), naming the keys to set, if `description` says of `file` that the config would read other
// ids in it, learn what is no target, or cut sequences or documents elsewhere than they begin.
void check_described(const std::filesystem::path& file, const nlohmann::json& description, const Config& config);

// Warns if the tokenizer has ids that the model lacks.
void warn_of_vocabulary(const std::filesystem::path& file, const nlohmann::json& description, int64_t vocab_size);

// The tokenizer that made ids, as a data.json or the header of a request file says: the SHA-256 of its file, or
// "bytes". Empty where it does not say.
std::string described_tokenizer(const nlohmann::json& description);

// Calls `called` with the first token file of each folder whose data.json describes it, and with that data.json.
// Sources that are not there any more, as training data may be where a run is evaluated, say nothing.
void for_each_description(const std::vector<std::string>& sources,
                          const std::function<void(const std::string& file, const nlohmann::json&)>& called);

}  // namespace parka
