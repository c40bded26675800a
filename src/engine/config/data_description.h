#pragma once
#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "data/read_only_file.h"
#include "engine/config/config.h"
#include "engine/files/json.h"

// The data.json of parka prepare or parka prepare-images describes the token files beside it.
namespace parka {

// The data.json of folders, each read once.
class DataDescriptions {
 public:
  // The description of a token file; null if none names the file, in `split` alone where that is given.
  const json* of(const std::filesystem::path& file, std::string_view split = {});

  // Throws Error(kBadInput) if a token file or mask is not the one that a data.json beside it describes: by its
  // size and its first and last 4 KiB; and by what `checksum` returns, that of all of its bytes, where it is given.
  // A data.json of an older version does not tell.
  void check_content(const ReadOnlyFile& file, const std::function<std::string()>& checksum = {});

  // Throws Error(kBadInput) if `files`, which a pattern takes, lack one that was prepared with others of them and
  // that it would take, or have one beside them that was not.
  void check_complete(const std::string& pattern, const std::vector<std::string>& files);

  // Warns of each data.json, of those that were looked for, that describes no token files.
  void warn_of_others() const;

 private:
  struct Folder {
    json description;                                // null if there is none
    std::map<std::string, std::string> splits = {};  // of which files are, by their names
  };
  const Folder& of_folder(const std::filesystem::path& file);

  std::map<std::filesystem::path, Folder> folders_;
};

// The data.json that describes a token file.
std::filesystem::path description_path(const std::filesystem::path& file);

// Throws Error(kBadInput) if `description`, that of `file`, tells another type of ids, or is of wrong types.
void check_described_type(const std::filesystem::path& file, const json& description, TokenType type);

// Throws Error(kBadInput), naming the keys to set, if `description` says of `file` that the config would read other
// ids in it, learn what is no target, or cut sequences or documents elsewhere than they begin.
void check_described(const std::filesystem::path& file, const json& description, const Config& config);

// What the data.json in a folder says of its files, as overrides of a config. Where some are held out, they are
// evaluated every `eval_interval` steps; 0: as the config says.
std::vector<std::string> overrides_of_data(const std::string& folder, int64_t eval_interval);

// Warns if the tokenizer has ids that the model lacks.
void warn_of_vocabulary(const std::filesystem::path& file, const json& description, int64_t vocab_size);

// Returns the text under a key; empty where there is none.
std::string described_text(const json& description, const char* key);

// The tokenizer that made ids, as a data.json or request file says: its file's SHA-256, or "bytes"; or empty.
std::string described_tokenizer(const json& description);

// Calls `called` with the first token file of each folder whose data.json describes it, and with that data.json.
// Sources that are not there any more, as training data may be where a run is evaluated, say nothing.
void for_each_description(const std::vector<std::string>& sources,
                          const std::function<void(const std::string& file, const json&)>& called);

}  // namespace parka
