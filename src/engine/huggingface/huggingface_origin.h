#pragma once
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "engine/huggingface/huggingface_weights.h"

namespace parka {

// Where an imported model keeps the files that came with it, below its own folder.
inline constexpr const char* kHuggingFaceFolder = "huggingface";
// Under this key the state of an imported model's checkpoint has encode_layout() of its files.
inline constexpr const char* kLayoutKey = "huggingface_layout";

// The Hugging Face model that a checkpoint comes from, or whose like it is to become.
struct HuggingFaceOrigin {
  std::string folder;                       // has config.json and the tokenizer's files
  std::optional<HuggingFaceLayout> layout;  // of the weights' files, if the checkpoint comes from it
};

// The files beside the weights that an export carries along: of the tokenizer, and generation_config.json. Only
// those that are there.
std::vector<std::string> carried_files(const std::string& folder);

// The origin of the checkpoint in folder `path` with this state: its own where it is an imported model, otherwise
// the one of the model or run that its config's checkpoint.init_from names, and so on. nullopt when there is none;
// `report` is told where something that init_from names is gone.
std::optional<HuggingFaceOrigin> find_origin(const std::string& path, const nlohmann::json& state,
                                             const std::function<void(const std::string& message)>& report);

// A folder that is named on the command line as origin. Throws Error(kBadInput) when it has no config.json.
HuggingFaceOrigin open_origin(const std::string& folder);

}  // namespace parka
