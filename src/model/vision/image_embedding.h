#pragma once
#include "model/vision/projector.h"
#include "model/vision/vision_tower.h"

namespace parka {

// The rows that images have in the residual stream of a language model, where text has embeddings of tokens: a
// tower and a projector, whose parameters are in unit 0 beside the table of embeddings. They compute in the compute
// format, as the method's released code has it, but for the blocks of a tower with precision.tower = fp8. A batch
// has a fixed number of images. Images without a place in it change nothing, but for the scales of such a tower.
class ImageEmbedding {
 public:
  // Into the unit at hand. Throws Error(kBadInput) for a projector that does not fit the tower.
  static void add_parameters(ParameterList& list, const ModelConfig& model);
  // Rows of an image.
  static int64_t num_slots(const VisionConfig& vision);

  // The scope is the language model's, with BatchShape::num_images() images. Frozen parts save nothing.
  ImageEmbedding(const ModelConfig& model, const ParameterTable& table, BufferScope& scope);

  int64_t num_slots() const { return num_slots_; }
  void bind(Device& device, const Arena& arena) { tower_.bind(device, arena); }

  // Copies a batch to the device: pixels [n, 3, size, size], and where in it each row of an image belongs,
  // [n, num_slots()], negative: nowhere.
  void load(const StepContext& step, const uint8_t* pixels, const int32_t* positions) const;
  // Writes the rows of images to `out` [T, d]. Other rows stay as they are.
  void forward(const StepContext& step, const TensorView& out) const;
  // Gradients of the parameters that are trained, from d_out [T, d]. Forward has run with step.keep.
  void backward(const StepContext& step, const TensorView& d_out) const;

 private:
  struct Scopes;
  ImageEmbedding(const ModelConfig& model, const ParameterTable& table, BufferScope& scope, Scopes&& scopes);

  StepContext step_of(const StepContext& step, const BatchShape& shape, bool goes_backward) const;
  StepContext tower_step(const StepContext& step) const;
  StepContext projector_step(const StepContext& step) const;
  TensorView pixels(const StepContext& step) const;
  TensorView positions(const StepContext& step) const;
  TensorView rows(const StepContext& step, TensorId id) const;

  TowerConfig config_;
  PrecisionConfig tower_precision_;
  int64_t num_slots_, d_model_;
  bool trains_tower_, trains_any_;
  VisionTower tower_;
  Projector projector_;
  TensorId pixels_;         // [n, 3, size, size] uint8
  TensorId positions_;      // [n num_slots] int32
  TensorId rows_, d_rows_;  // [n num_slots, d]
};

}  // namespace parka
