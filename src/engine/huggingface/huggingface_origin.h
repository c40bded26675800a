#pragma once
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "engine/config/config.h"
#include "engine/huggingface/huggingface_weights.h"

namespace parka {

// The subfolder in which an imported model keeps the files that came with it, and a run that starts from it a copy.
inline constexpr const char* kHuggingFaceFolder = "huggingface";
// The key under which the state of an imported model's checkpoint has encode_formats(), or null: named for the
// layout of files that earlier versions kept there.
inline constexpr const char* kFormatsKey = "huggingface_layout";
// And where it was imported from.
inline constexpr const char* kImportedFromKey = "imported_from";

// The Hugging Face model that a checkpoint comes from, or that --like names.
struct HuggingFaceOrigin {
  std::string folder;          // has config.json and the tokenizer's files
  TensorFormats formats = {};  // of its weights, if the checkpoint comes from it
  // The longest sequence that the model supports, if the checkpoint comes from it: VILA's config.json does not say.
  std::optional<int64_t> max_positions = {};
};

// The existing files that an export copies besides the weights: the tokenizer's files, and generation_config.json.
std::vector<std::string> carried_files(const std::string& folder);

// The checkpoint's folder from what checkpoint.init_from may name; empty when nothing is there any more.
std::string checkpoint_at(const std::string& path);

// Calls `visit` for the checkpoint in folder `path` with this state, then for the model or run that its config's
// checkpoint.init_from names, or the base of its adapters, and so on, until it returns true. Returns the init_from
// that no longer exists; empty if there is none such.
std::string follow_sources(const std::string& path, const json& state,
                           const std::function<bool(const std::string& path, const json& state)>& visit);

// The origin of the checkpoint in folder `path` with this state: its own if it is an imported model, the copy of
// its run, or that of what init_from leads to. nullopt without one; `report` gets an init_from that is gone.
std::optional<HuggingFaceOrigin> find_origin(const std::string& path, const json& state,
                                             const std::function<void(const std::string& gone)>& report);

// Throws Error(kBadInput) if a run of `config` that has not begun would start from weights of another model, and
// says so where that is one of shorter sequences. A model that is not there says nothing.
void check_start(const Config& config);

// Copies what came with the imported model that `init_from` leads to into a run's folder, unless there is a copy
// already. A run does not end because this cannot be done. For the rank that has locked the folder.
void keep_origin(const std::string& run_folder, const std::string& init_from);

}  // namespace parka
