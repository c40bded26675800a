#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/files/safetensors.h"
#include "engine/huggingface/huggingface_tensors.h"

// The files of a Hugging Face model's weights: model.safetensors, or those that its .index.json lists.
namespace parka {

inline constexpr const char* kHuggingFaceConfigName = "config.json";
inline constexpr int64_t kMaxHuggingFaceConfigBytes = 16 << 20;  // larger ones are refused
inline constexpr const char* kHuggingFaceFileName = "model.safetensors";
inline constexpr const char* kHuggingFaceIndexName = "model.safetensors.index.json";

// The formats of tensors by name, as an import records them: an export keeps names and formats.
using TensorFormats = std::map<std::string, DType>;
json encode_formats(const TensorFormats& formats);
TensorFormats parse_formats(const json& record, const std::string& where);

// Writes the files of transformers' save_pretrained into `folder`, each of at most `max_file_bytes` or of one
// tensor. Name, dtype and shape of `tensors` count; `write` writes the bytes of one. Returns the number of files.
size_t write_huggingface_weights(const std::string& folder, const std::vector<SafetensorsEntry>& tensors,
                                 int64_t max_file_bytes,
                                 const std::function<void(size_t tensor, OutputFile& file)>& write);

// Open files of weights.
struct HuggingFaceWeights {
  struct Place {
    size_t file = 0;
    SafetensorsEntry entry;
  };
  std::vector<InputFile> files;
  std::unordered_map<std::string, Place> tensors;  // by name; ignored ones are not among them
};
// Reads headers and index. Throws Error(kBadInput) when a file is missing, damaged or contradicts the index.
HuggingFaceWeights open_huggingface_weights(const std::string& folder);

// Gives a tied matrix the name of the embedding if only its other name is there (safetensors' save_model).
void name_tied_embedding(HuggingFaceWeights& weights, const std::string& embedding, const std::string& head);

// Throws Error(kBadInput) unless the weights are exactly `tensors`, in their shapes and as plain floats. `head` is
// the head's name: a tied one may be there too.
void check_huggingface_weights(const HuggingFaceWeights& weights, const std::vector<HuggingFaceTensor>& tensors,
                               std::string_view head, const std::string& folder);

}  // namespace parka
