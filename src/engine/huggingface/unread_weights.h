#pragma once
#include <map>
#include <optional>
#include <string>

#include "engine/files/safetensors.h"
#include "model/vision/vision_config.h"

namespace parka {

// The file with them in the folder of what came with an imported model.
inline constexpr const char* kUnreadWeightsName = "unread_weights.safetensors";

// Weights of a tower that no model reads (is_unread_by_models()), by their names after LlavaNames::tower. They
// train nothing and change nothing, but an export has them as the imported model had.
class UnreadWeights {
 public:
  // Opens the file in the folder of what came with a model; nullopt if it has none.
  static std::optional<UnreadWeights> open(const std::string& folder);
  // For a tower whose last block is the one that is read: its last LayerNorm with weight 1 and bias 0.
  static UnreadWeights last_norm(const TowerConfig& tower);

  const std::map<std::string, SafetensorsEntry>& tensors() const { return tensors_; }
  // Its values in `dtype`; what is no float has its own alone.
  void write(const std::string& name, DType dtype, OutputFile& file) const;

 private:
  std::optional<InputFile> file_;  // absent: weights are 1, and biases 0
  std::map<std::string, SafetensorsEntry> tensors_;
};

}  // namespace parka
