#include "engine/huggingface/huggingface_origin.h"

#include <array>
#include <filesystem>

#include "core/error.h"
#include "data/read_only_file.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/checkpoint/checkpoint_layout.h"

namespace parka {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr std::array<std::string_view, 12> kCarriedFiles = {
    "added_tokens.json", "chat_template.jinja",     "chat_template.json", "generation_config.json",
    "merges.txt",        "special_tokens_map.json", "spiece.model",       "tokenizer.json",
    "tokenizer.model",   "tokenizer_config.json",   "vocab.json",         "vocab.txt"};

// A checkpoint's folder from what init_from may name; empty when nothing is there any more.
std::string checkpoint_at(const std::string& path) {
  if (file_exists(fs::path(path) / kManifestName)) return path;
  if (!file_exists(path)) return {};
  const std::vector<CheckpointInfo> checkpoints = list_checkpoints(path);
  return checkpoints.empty() ? std::string() : checkpoints.front().path;
}

// checkpoint.init_from in the config of a checkpoint's state; empty where there is none.
std::string init_from_of(const json& state) {
  const json::json_pointer place("/config/checkpoint/init_from");
  return state.contains(place) && state.at(place).is_string() ? state.at(place).get<std::string>() : std::string();
}

}  // namespace

std::vector<std::string> carried_files(const std::string& folder) {
  std::vector<std::string> names;
  for (const std::string_view name : kCarriedFiles) {
    std::error_code ignored;
    if (fs::is_regular_file(fs::path(folder) / name, ignored)) names.emplace_back(name);
  }
  return names;
}

std::optional<HuggingFaceOrigin> find_origin(const std::string& path, const json& state,
                                             const std::function<void(const std::string& message)>& report) {
  constexpr int kLongestChain = 32;  // a chain that is longer goes round
  std::string at = path;
  json here = state;
  for (int link = 0; link < kLongestChain; ++link) {
    if (const auto layout = here.find(kLayoutKey); layout != here.end()) {
      HuggingFaceOrigin origin{(fs::path(at) / kHuggingFaceFolder).string(), {}};
      if (!layout->is_null()) origin.layout = parse_layout(*layout, at);
      return origin;
    }
    const std::string init_from = init_from_of(here);
    if (init_from.empty()) return std::nullopt;
    at = checkpoint_at(init_from);
    if (at.empty()) {
      report(
          fmt::format("{}, named by checkpoint.init_from, is gone, so the tokenizer is unknown; give --like FOLDER",
                      init_from));
      return std::nullopt;
    }
    here = read_manifest_alone(at).state;
  }
  return std::nullopt;
}

HuggingFaceOrigin open_origin(const std::string& folder) {
  if (!file_exists(fs::path(folder) / kHuggingFaceConfigName)) {
    throw_bad_input("{}: has no {}, so it is not the folder of a Hugging Face model", folder,
                    kHuggingFaceConfigName);
  }
  return {folder, {}};
}

}  // namespace parka
