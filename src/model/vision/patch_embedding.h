#pragma once
#include <optional>

#include "model/layers/linear.h"
#include "model/layers/norm.h"
#include "model/vision/vision_config.h"

namespace parka {

inline constexpr const char* kPatchEmbedding = "vision.patch_embedding";  // its weight, [v, columns of a patch]

// From pixels to the input of a tower's blocks: a linear layer over the pixels of each patch, learned positions,
// and of CLIP a class token and a LayerNorm. All of it in the compute format.
class PatchEmbedding {
 public:
  static void add_parameters(ParameterList& list, const TowerConfig& config);

  // The scope is the tower's, of TowerConfig::num_tokens() rows for each image.
  PatchEmbedding(const TowerConfig& config, const ParameterTable& table, BufferScope& scope);

  // `pixels` [B, 3, size, size] are bytes, or fp32 that is normalised already; out [T, v].
  void forward(const StepContext& step, const TensorView& pixels, const TensorView& out) const;
  // Gradients of the parameters; d_out [T, v] is overwritten.
  void backward(const StepContext& step, const TensorView& d_out) const;

 private:
  int64_t num_patches(const StepContext& step) const { return step.shape.num_sequences * config_.num_patches(); }
  TensorView patches(const StepContext& step) const {
    return step.tensor(patches_, num_patches(step), config_.patch_columns());
  }

  TowerConfig config_;
  Linear patch_;
  int positions_, class_token_;  // -1: none
  std::optional<Norm> norm_;
  TensorId patches_;    // [B P, K] rows of pixels, kept
  TensorId embedded_;   // [B P, v] of patches alone; invalid without a class token: the output has the same rows
  TensorId d_patches_;  // [B P, v] likewise
};

}  // namespace parka
