#pragma once
#include <optional>

#include "kernels/ops/elementwise/vision.h"
#include "model/layers/linear.h"
#include "model/layers/norm.h"
#include "model/vision/vision_config.h"

namespace parka {

// With what the names of a projector's parameters and buffers begin.
inline constexpr std::string_view kProjector = "projector.";
inline constexpr const char* kProjectorInput = "projector.fc1";  // the weight of its first linear layer

// From a tower's features to rows of a language model's residual stream. All of it in the compute format, as what
// FP8 recipes leave out; its steps have the shape of what it makes.
class Projector {
 public:
  // Rows of an image in what it makes of a tower's features.
  static int64_t num_tokens(const ProjectorConfig& config, const TowerConfig& tower);
  // Throws Error(kBadInput) for a tower whose features are no square grid, where it needs one.
  static void add_parameters(ParameterList& list, const ProjectorConfig& config, const TowerConfig& tower);

  // The scope is of a precision without FP8, and of num_tokens() rows for each image.
  Projector(const ProjectorConfig& config, const TowerConfig& tower, const ParameterTable& table,
            BufferScope& scope);

  // x [B F, v], what the tower hands on; out [B N, d].
  void forward(const StepContext& step, const TensorView& x, const TensorView& out) const;
  // Gradients of the parameters from d_out [B N, d], and d_x [B F, v]; empty: not wanted, of a frozen tower.
  void backward(const StepContext& step, const TensorView& x, const TensorView& d_out, const TensorView& d_x) const;

 private:
  TensorView view(const StepContext& step, TensorId id, int64_t cols) const {
    return step.tensor(id, step.num_tokens(), cols);
  }
  // The input of the first linear layer.
  TensorView input(const StepContext& step, const TensorView& x) const;
  TensorView down_one_layer(const StepContext& step, const TensorView& d_out) const;

  ProjectorConfig config_;
  TokenMerge merge_;
  int64_t input_width_;  // of the first linear layer
  std::optional<Norm> norm_;
  Linear fc1_;
  std::optional<Linear> fc2_;
  TensorId normalized_, d_normalized_;  // [B N, 4 v] with norm_
  TensorId hidden_, activated_;         // [B N, d] what GELU reads and makes, with fc2_
  TensorId d_hidden_;                   // [B N, d]
};

}  // namespace parka
