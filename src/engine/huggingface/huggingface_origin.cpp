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

std::string checkpoint_at(const std::string& path) {
  if (file_exists(fs::path(path) / kManifestName)) return path;
  if (!file_exists(path)) return {};
  const std::vector<CheckpointInfo> checkpoints = list_checkpoints(path);
  return checkpoints.empty() ? std::string() : checkpoints.front().path;
}

std::string follow_sources(const std::string& path, const json& state,
                           const std::function<bool(const std::string& path, const json& state)>& visit) {
  constexpr int kLongestChain = 32;  // a chain that is longer goes round
  std::string at = path;
  json here = state;
  for (int link = 0; link < kLongestChain && !visit(at, here); ++link) {
    const std::string init_from = init_from_of(here);
    if (init_from.empty()) return {};
    at = checkpoint_at(init_from);
    if (at.empty()) return init_from;
    here = read_manifest_alone(at).state;
  }
  return {};
}

std::optional<HuggingFaceOrigin> find_origin(const std::string& path, const json& state,
                                             const std::function<void(const std::string& gone)>& report) {
  std::optional<HuggingFaceOrigin> origin;
  const std::string gone = follow_sources(path, state, [&](const std::string& at, const json& here) {
    const auto layout = here.find(kLayoutKey);
    if (layout == here.end()) return false;
    origin = HuggingFaceOrigin{(fs::path(at) / kHuggingFaceFolder).string(), {}};
    if (!layout->is_null()) origin->layout = parse_layout(*layout, at);
    return true;
  });
  if (!gone.empty()) report(gone);
  return origin;
}

HuggingFaceOrigin open_origin(const std::string& folder) {
  if (!file_exists(fs::path(folder) / kHuggingFaceConfigName)) {
    throw_bad_input("{}: has no {}, so it is not the folder of a Hugging Face model", folder,
                    kHuggingFaceConfigName);
  }
  return {folder, {}};
}

}  // namespace parka
