#pragma once
#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include <nlohmann/json.hpp>

#include "engine/files/safetensors.h"
#include "engine/huggingface/huggingface_tensors.h"

// The files that hold a Hugging Face model's weights: model.safetensors, or several that
// model.safetensors.index.json lists.
namespace parka {

inline constexpr const char* kHuggingFaceConfigName = "config.json";
inline constexpr int64_t kMaxHuggingFaceConfigBytes = 16 << 20;  // larger ones are refused
inline constexpr const char* kHuggingFaceFileName = "model.safetensors";
inline constexpr const char* kHuggingFaceIndexName = "model.safetensors.index.json";

// The place of each tensor in the files of a model.
struct HuggingFaceLayout {
  struct File {
    std::string name;         // in the model's folder
    std::string header_text;  // of the safetensors file, as it stands there
    SafetensorsHeader header;
  };
  std::vector<File> files;
  std::string index_text;  // of model.safetensors.index.json; empty: one file and no index
};

// The layout of transformers' save_pretrained for a model in `dtype`: files of at most `max_file_bytes`, or of one
// tensor.
HuggingFaceLayout make_huggingface_layout(const std::vector<HuggingFaceTensor>& tensors, DType dtype,
                                          int64_t max_file_bytes, int64_t num_parameters);

// The form in which a checkpoint's state stores a layout, so that an export can write the same files.
nlohmann::json encode_layout(const HuggingFaceLayout& layout);
HuggingFaceLayout parse_layout(const nlohmann::json& state, const std::string& where);

// Open files of weights.
struct HuggingFaceWeights {
  struct Place {
    size_t file = 0;
    SafetensorsEntry entry;
  };
  HuggingFaceLayout layout;
  std::vector<InputFile> files;
  std::unordered_map<std::string, Place> tensors;  // by name; ignored ones are not among them
};
// Reads headers and index. Throws Error(kBadInput) when a file is missing, damaged or contradicts the index.
HuggingFaceWeights open_huggingface_weights(const std::string& folder);

// Gives a tied matrix the name of the embedding if only its other name is there, as safetensors' save_model writes
// it.
void name_tied_embedding(HuggingFaceWeights& weights, const std::string& embedding, const std::string& head);

// Throws Error(kBadInput) unless the weights are exactly `tensors`, in their shapes and as plain floats. `head` is
// the head's name: a tied one may be there too.
void check_huggingface_weights(const HuggingFaceWeights& weights, const std::vector<HuggingFaceTensor>& tensors,
                               std::string_view head, const std::string& folder);

}  // namespace parka
