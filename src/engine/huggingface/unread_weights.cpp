#include "engine/huggingface/unread_weights.h"

#include <algorithm>
#include <filesystem>
#include <vector>

#include "core/error.h"
#include "data/read_only_file.h"
#include "engine/files/safetensors.h"

namespace parka {

std::optional<UnreadWeights> UnreadWeights::open(const std::string& folder) {
  const std::string path = (std::filesystem::path(folder) / kUnreadWeightsName).string();
  if (!file_exists(path)) return std::nullopt;
  UnreadWeights weights;
  weights.file_.emplace(path);
  for (const SafetensorsEntry& entry : read_safetensors_header(*weights.file_).tensors) {
    weights.tensors_.emplace(entry.name, entry);
  }
  return weights;
}

UnreadWeights UnreadWeights::last_norm(const TowerConfig& tower) {
  UnreadWeights weights;
  for (const char* name : {"post_layernorm.weight", "post_layernorm.bias"}) {
    weights.tensors_[name] = {.name = name, .dtype = DType::kF32, .shape = {tower.width}};
  }
  return weights;
}

void UnreadWeights::write(const std::string& name, DType dtype, OutputFile& file) const {
  constexpr int64_t kPieceElements = 2 << 20;
  const SafetensorsEntry& entry = tensors_.at(name);
  PARKA_REQUIRE(dtype == entry.dtype || (is_plain_float(dtype) && is_plain_float(entry.dtype)));
  const int64_t count = num_elements_of(entry.shape), size = size_of(entry.dtype);
  for (int64_t begin = 0; begin < count; begin += kPieceElements) {
    const auto elements = static_cast<size_t>(std::min(kPieceElements, count - begin));
    std::vector<float> values(elements, name.ends_with("weight") ? 1.0f : 0.0f);
    if (file_) {
      std::vector<std::byte> bytes(elements * static_cast<size_t>(size));
      file_->read(entry.offset + begin * size, bytes);
      if (dtype == entry.dtype) {
        file.write(bytes);
        continue;
      }
      decode_floats(entry.dtype, bytes, values);
    }
    std::vector<std::byte> encoded(elements * static_cast<size_t>(size_of(dtype)));
    encode_floats(values, dtype, encoded);
    file.write(encoded);
  }
}

}  // namespace parka
