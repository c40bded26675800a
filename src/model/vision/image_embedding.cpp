#include "model/vision/image_embedding.h"

#include "kernels/ops/elementwise/embedding.h"
#include "model/precision_recipe.h"

namespace parka {
namespace {

using Purpose = BufferScope::Purpose;

constexpr int64_t kChannels = 3;

// A sequence for each image.
BatchShape tower_shape(const TowerConfig& config, const PrecisionConfig& precision, int64_t num_images) {
  BatchShape shape{num_images, config.num_tokens()};
  shape.padding = tower_padding(config, precision, num_images);
  return shape;
}

Purpose purpose_of(const BufferScope& scope, bool goes_backward) {
  return scope.purpose() == Purpose::kTraining && !goes_backward ? Purpose::kForwardOnly : scope.purpose();
}

}  // namespace

struct ImageEmbedding::Scopes {
  Scopes(const VisionConfig& vision, const ParameterTable& table, const BufferScope& scope)
      : of_tower(tower_precision(scope.precision())),
        plain(without_fp8(scope.precision())),
        tower(of_tower, tower_shape(vision.tower, of_tower, scope.shape().num_images()),
              purpose_of(scope, table.trains_any(kVision)), scope.plan()),
        projector(plain, {scope.shape().num_images(), num_slots(vision)},
                  purpose_of(scope, table.trains_any(kVision) || table.trains_any(kProjector)), scope.plan()) {}

  PrecisionConfig of_tower, plain;
  BufferScope tower, projector;
};

void ImageEmbedding::add_parameters(ParameterList& list, const ModelConfig& model) {
  VisionTower::add_parameters(list, model.vision.tower);
  Projector::add_parameters(list, model.vision.projector_into(model.d_model), model.vision.tower);
}

int64_t ImageEmbedding::num_slots(const VisionConfig& vision) {
  return Projector::num_tokens(vision.projector, vision.tower);
}

ImageEmbedding::ImageEmbedding(const ModelConfig& model, const ParameterTable& table, BufferScope& scope)
    : ImageEmbedding(model, table, scope, Scopes(model.vision, table, scope)) {}

ImageEmbedding::ImageEmbedding(const ModelConfig& model, const ParameterTable& table, BufferScope& scope,
                               Scopes&& scopes)
    : config_(model.vision.tower),
      tower_precision_(scopes.of_tower),
      num_slots_(num_slots(model.vision)),
      d_model_(model.d_model),
      trains_tower_(table.trains_any(kVision)),
      trains_any_(trains_tower_ || table.trains_any(kProjector)),
      tower_(config_, table, scopes.tower),
      projector_(model.vision.projector_into(d_model_), config_, table, scopes.projector) {
  const int64_t n = scope.shape().num_images(), size = config_.image_size;
  pixels_ = scope.batch("pixels", DType::kU8, {n, kChannels, size, size});
  positions_ = scope.batch("image_positions", DType::kI32, {n * num_slots_});
  const auto add_rows = [&](const char* name) {
    return scope.workspace(name, scope.compute(), {n * num_slots_, d_model_}, kStep);
  };
  rows_ = add_rows("image_rows");
  if (scope.has_backward() && trains_any_) d_rows_ = add_rows("d_image_rows");
}

// Neither the tower nor the projector has units or telemetry.
StepContext ImageEmbedding::step_of(const StepContext& step, const BatchShape& shape, bool goes_backward) const {
  StepContext own{.device = step.device, .arena = step.arena, .weights = step.weights};
  own.shape = shape;
  own.keep = step.keep && goes_backward;
  own.gradients = step.gradients;
  own.accumulation = step.accumulation;
  return own;
}

StepContext ImageEmbedding::tower_step(const StepContext& step) const {
  return step_of(step, tower_shape(config_, tower_precision_, step.shape.num_images()), trains_tower_);
}

StepContext ImageEmbedding::projector_step(const StepContext& step) const {
  return step_of(step, {step.shape.num_images(), num_slots_}, trains_any_);
}

TensorView ImageEmbedding::positions(const StepContext& step) const {
  return step.vector(positions_, step.shape.num_images() * num_slots_);
}

TensorView ImageEmbedding::rows(const StepContext& step, TensorId id) const {
  return step.tensor(id, step.shape.num_images() * num_slots_, d_model_);
}

TensorView ImageEmbedding::pixels(const StepContext& step) const {
  const TensorView all = step.arena[pixels_];
  return all.rows(0, step.shape.num_images());
}

void ImageEmbedding::load(const StepContext& step, const uint8_t* pixels, const int32_t* positions) const {
  tower_.load(tower_step(step));
  const TensorView images = this->pixels(step), places = this->positions(step);
  step.device.copy_to_device(images.data, pixels, images.bytes());
  step.device.copy_to_device(places.data, positions, places.bytes());
}

void ImageEmbedding::forward(const StepContext& step, const TensorView& out) const {
  const StepContext of_tower = tower_step(step);
  tower_.forward(of_tower, pixels(step));
  projector_.forward(projector_step(step), tower_.features(of_tower), rows(step, rows_));
  scatter_rows(step.device, {.positions = positions(step), .x = rows(step, rows_), .out = out});
}

void ImageEmbedding::backward(const StepContext& step, const TensorView& d_out) const {
  if (!trains_any_) return;
  gather_rows(step.device, {.positions = positions(step), .x = d_out, .out = rows(step, d_rows_)});
  const StepContext of_tower = tower_step(step);
  projector_.backward(projector_step(step), tower_.features(of_tower), rows(step, d_rows_),
                      trains_tower_ ? tower_.d_features(of_tower) : TensorView());
  if (trains_tower_) tower_.backward(of_tower);
}

}  // namespace parka
