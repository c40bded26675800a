#pragma once
#include "model/layers/stack.h"
#include "model/vision/patch_embedding.h"
#include "model/vision/vision_config.h"

namespace parka {

// With what the names of a tower's parameters and buffers begin.
inline constexpr std::string_view kVision = "vision.";

// The config of a tower's stack.
ModelConfig tower_stack(const TowerConfig& config);

// The number formats of a tower in a model of this precision, and the rows that they want after those of
// `num_images`: sums over rows, of weight gradients, want multiples where they are FP8.
PrecisionConfig tower_precision(const PrecisionConfig& precision);
int64_t tower_padding(const TowerConfig& config, const PrecisionConfig& tower_precision, int64_t num_images);

// A vision transformer up to the hidden state that is selected: a patch embedding, and after it a stack of blocks.
// Its steps have a sequence for each image, of TowerConfig::num_tokens() rows, and tower_padding() rows after
// them.
class VisionTower {
 public:
  // Into the unit at hand.
  static void add_parameters(ParameterList& list, const TowerConfig& config);

  // The scope is of tower_precision(), and of num_tokens() rows for each image with tower_padding() after them.
  // Its steps have no hooks: who has the tower tells them.
  VisionTower(const TowerConfig& config, const ParameterTable& table, BufferScope& scope);

  void bind(Device& device, const Arena& arena) { stack_.bind(device, arena); }

  // Copies to the device what is to be known of the batch. Before forward.
  void load(const StepContext& step) const;
  // `pixels` as PatchEmbedding's.
  void forward(const StepContext& step, const TensorView& pixels) const;
  // [T, v] the input of the first block: hidden state 0.
  TensorView embedded(const StepContext& step) const { return stack_.input(step); }
  // [B F, v] the hidden state that is selected, after forward and until the next one; F = num_features().
  TensorView features(const StepContext& step) const { return handed_on(step, features_); }
  // [B F, v] where backward reads their gradient.
  TensorView d_features(const StepContext& step) const {
    return d_features_.valid() ? handed_on(step, d_features_)
                               : step.rows_of_sequences(stack_.stream().d_residual(step));
  }
  // Gradients of the parameters. Forward has run with step.keep.
  void backward(const StepContext& step) const;

 private:
  TensorView handed_on(const StepContext& step, TensorId id) const {
    return step.tensor(id, step.shape.num_sequences * config_.num_features(), config_.width);
  }
  TensorView patch_rows(const StepContext& step) const {
    return step.vector(patch_rows_, step.shape.num_sequences * config_.num_features());
  }
  void select(const StepContext& step) const;
  void spread_gradient(const StepContext& step) const;

  TowerConfig config_;
  PatchEmbedding embedding_;
  TensorId features_;    // until backward, for the gradients of what reads them
  TensorId d_features_;  // invalid where all rows are handed on
  TensorId patch_rows_;  // int32 [B F] which rows are handed on, likewise
  Stack stack_;
};

}  // namespace parka
