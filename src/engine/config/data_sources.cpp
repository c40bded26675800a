#include "engine/config/data_sources.h"

#include <algorithm>
#include <filesystem>
#include <map>
#include <set>

#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "engine/files/file_io.h"
#include "engine/files/json_text.h"
#include "model/vision/image_embedding.h"

namespace parka {

std::vector<NamedFiles> parse_sets(const std::vector<std::string>& entries, const char* key) {
  std::vector<NamedFiles> sets;
  for (const std::string& entry : entries) {
    const size_t equals = entry.find('=');
    if (equals == std::string::npos || equals == 0 || equals + 1 == entry.size()) {
      throw_bad_input("{}: \"{}\" is not of the form NAME=FILE", key, printable(entry));
    }
    const std::string name = entry.substr(0, equals), file = entry.substr(equals + 1);
    const auto found =
        std::find_if(sets.begin(), sets.end(), [&](const NamedFiles& set) { return set.name == name; });
    if (found != sets.end()) {
      found->files.push_back(file);
    } else {
      sets.push_back({name, {file}});
    }
  }
  return sets;
}

ExampleRules example_rules(const Config& config) {
  const DataConfig& data = config.data;
  ExampleRules rules{.loss_mask = data.loss_mask,
                     .separate_documents = data.documents == DocumentMode::kSeparate,
                     .document_ids = data.document_ids()};
  const VisionConfig& vision = config.model.vision;
  if (vision.exists()) {
    rules.images = {vision.image_token, ImageEmbedding::num_slots(vision), vision.tower.image_size};
  }
  return rules;
}

namespace {

namespace fs = std::filesystem;

// The file's content where it is that of a data.json; null where it is not there, or anything else.
nlohmann::json read_description(const fs::path& path) {
  constexpr uintmax_t kMost = uintmax_t{1} << 24;  // a data set of another program may have the name, too
  std::error_code failed;
  const uintmax_t size = fs::file_size(path, failed);
  if (failed || size > kMost) return nullptr;
  try {
    nlohmann::json read = nlohmann::json::parse(read_text(path.string(), kMost), nullptr, false);
    return read.is_object() && read.value("dtype", nlohmann::json()).is_string() ? read : nullptr;
  } catch (const Error&) {
    return nullptr;
  }
}

// Whether one of its splits has the file.
bool describes(const nlohmann::json& description, const std::string& file) {
  return std::ranges::any_of(description, [&](const nlohmann::json& split) {
    if (!split.is_object() || !split.contains("files")) return false;
    const nlohmann::json& files = split.at("files");
    return std::find(files.begin(), files.end(), file) != files.end();
  });
}

}  // namespace

void check_token_type(const std::vector<std::string>& sources, TokenType type) {
  std::map<fs::path, nlohmann::json> described;  // by folder
  for (const std::string& source : sources) {
    for (const fs::path path : expand_source(source)) {
      const fs::path beside = path.parent_path() / "data.json";
      const auto [found, is_new] = described.try_emplace(path.parent_path());
      nlohmann::json& info = found->second;
      if (is_new) info = read_description(beside);
      if (info.is_null() || info.at("dtype") == name_of(type) || !describes(info, path.filename().string()))
        continue;
      throw_bad_input("{}: its ids are {}, as {} says, and would be read as {}; set data.token_dtype, or --dtype",
                      path.string(), info.at("dtype").get<std::string>(), beside.string(), name_of(type));
    }
  }
}

std::string described_tokenizer(const nlohmann::json& description) {
  const auto text = [&](const char* key) {
    const auto found = description.find(key);
    return found != description.end() && found->is_string() ? found->get<std::string>() : "";
  };
  const std::string checksum = text("tokenizer_sha256");
  return checksum.empty() && text("tokenizer") == "bytes" ? "bytes" : checksum;
}

void for_each_description(const std::vector<std::string>& sources,
                          const std::function<void(const std::string& file, const nlohmann::json&)>& called) {
  std::set<fs::path> described;
  for (const std::string& source : sources) {
    std::vector<std::string> files;
    try {
      files = expand_source(source);
    } catch (const Error&) {
    }
    for (const std::string& file : files) {
      const fs::path path = file, folder = path.parent_path();
      if (described.contains(folder)) continue;
      const nlohmann::json description = read_description(folder / "data.json");
      if (description.is_null() || !describes(description, path.filename().string())) continue;
      described.insert(folder);
      called(file, description);
    }
  }
}

TokenFiles open_token_files(const std::vector<std::string>& sources, const Config& config) {
  check_token_type(sources, config.data.token_dtype);
  TokenFiles files(sources, config.data.token_dtype, config.data.sequence_length, config.model.vocab_size,
                   example_rules(config));
  const int64_t most = files.most_images();
  if (most > config.data.images_per_sequence) {
    throw_bad_input(
        "a sequence of {} has {} images, more than data.images_per_sequence = {}; make that larger, or prepare the "
        "data with a smaller --max-images",
        fmt::join(sources, ", "), most, config.data.images_per_sequence);
  }
  return files;
}

TokenFiles open_training_files(const Config& config) {
  TokenFiles files = open_token_files(config.data.train, config);
  if (!files.targets_vary()) return files;
  if (const auto source = files.source_without_targets()) {
    throw_bad_input("data.train: none of {} sequences of {} has a target; check the file, and the mask beside it",
                    files.source_sequences()[*source], config.data.train[*source]);
  }
  return files;
}

}  // namespace parka
