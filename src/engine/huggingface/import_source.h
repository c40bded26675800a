#pragma once
#include <string>
#include <vector>

#include "engine/huggingface/huggingface_config.h"
#include "engine/huggingface/huggingface_weights.h"

namespace parka {

// The source of an import: a model in one folder, or one whose parts are in several.
struct ImportSource {
  struct CarriedFile {
    std::string folder, name;
    std::string text = {};  // instead of the folder's file
  };

  HuggingFaceModel described;
  std::string config_path;            // for messages
  std::string config_text;            // of the config.json that goes along; empty: made of `described`
  json special_tokens;                // the config.json that has them, where one is made
  HuggingFaceWeights weights;         // by the names that `llava` says
  const LlavaNames* llava = nullptr;  // of a model with a tower
  bool is_quantized = false;          // by bitsandbytes
  int64_t num_stored_tokens = 0;      // rows of embedding and head in the files; those after them are to be made
  bool has_projector = true;          // whether the files have one; else it is to be drawn
  bool is_one_folder = true;          // whether an export is to have the same formats again
  std::vector<CarriedFile> carried;   // beside config.json
};

// The folder with a model's or adapters' files where `folder` is one of the hub's cache (models--ORG--NAME), its
// only snapshot; else `folder`. Throws Error(kBadInput) for several snapshots, or without a config.json.
std::string model_folder_of(const std::string& folder);

// Opens a folder with a model of transformers. Throws Error(kBadInput) if anything in it is not supported.
ImportSource open_model(const std::string& folder);

// A language model, Llama or Qwen2, and the tower of a CLIP or SigLIP model, with a projector in between that is to
// be drawn; or a model with the names of the original LLaVA, whose projector it has. `image_token` is the id of
// image slots; negative: the first after the vocabulary, which grows to the next multiple of 64.
ImportSource open_model_with_tower(const std::string& folder, const std::string& tower_folder, int64_t image_token);

// True if a folder is VILA's: with language model, tower and projector in folders of their own.
bool is_vila_folder(const std::string& folder);
// Such a model, of VILA 1.5. `image_token` as above.
ImportSource open_vila_model(const std::string& folder, int64_t image_token);

}  // namespace parka
