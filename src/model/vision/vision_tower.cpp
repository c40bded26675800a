#include "model/vision/vision_tower.h"

#include <vector>

#include "kernels/ops/elementwise/embedding.h"
#include "kernels/ops/elementwise/pointwise.h"
#include "kernels/ops/norm/norm.h"
#include "kernels/ops/quantize/quantize.h"
#include "model/precision_recipe.h"

namespace parka {
namespace {

// A frozen tower saves nothing, but the layers that read its features go backward.
TensorId declare_features(const TowerConfig& config, BufferScope& scope) {
  const std::vector<int64_t> shape = {scope.shape().num_sequences * config.num_features(), config.width};
  if (scope.has_backward()) return scope.kept("vision.features", scope.compute(), shape);
  return scope.workspace("vision.features", scope.compute(), shape, kStep);
}

}  // namespace

ModelConfig tower_stack(const TowerConfig& config) {
  ModelConfig model;
  model.d_model = config.width;
  model.num_layers = config.num_blocks();
  model.num_heads = config.num_heads;
  model.d_ffn = config.d_ffn;
  model.norm = NormKind::kAffineLayerNorm;
  model.norm_eps = config.norm_eps;
  model.block_kind = BlockKind::kEncoder;
  model.mlp_activation = config.activation;
  return model;
}

PrecisionConfig tower_precision(const PrecisionConfig& precision) {
  if (precision.tower == Storage::kCompute) return without_fp8(precision);
  PrecisionConfig of_tower = precision;
  of_tower.offload_blocks = 0;  // which are the decoder's
  return of_tower;
}

int64_t tower_padding(const TowerConfig& config, const PrecisionConfig& tower_precision, int64_t num_images) {
  constexpr int64_t kUnit = 16, kGroup = 128;  // of FP8 tensor cores, and of fp8_block's scales
  if (tower_precision.gemm == GemmPrecision::kCompute) return 0;
  const int64_t unit = tower_precision.gemm == GemmPrecision::kFp8Block ? kGroup : kUnit;
  const int64_t rows = num_images * config.num_tokens();
  return ceil_div(rows, unit) * unit - rows;
}

void VisionTower::add_parameters(ParameterList& list, const TowerConfig& config) {
  PatchEmbedding::add_parameters(list, config);
  Stack::add_parameters(list, tower_stack(config), kVision, /*has_units=*/false);
}

VisionTower::VisionTower(const TowerConfig& config, const ParameterTable& table, BufferScope& scope)
    : config_(config),
      embedding_(config, table, scope),
      features_(declare_features(config, scope)),
      patch_rows_(config.drops_class_token() ? scope.batch("vision.patch_rows", DType::kI32,
                                                           {scope.shape().num_sequences * config.num_features()})
                                             : TensorId{}),
      stack_(tower_stack(config), table, kVision, /*first_unit=*/0, scope) {
  if (config.drops_class_token() && scope.has_backward()) {
    d_features_ = scope.workspace("vision.d_features", scope.compute(),
                                  {scope.shape().num_sequences * config.num_features(), config.width}, kStep);
  }
}

void VisionTower::load(const StepContext& step) const {
  if (!patch_rows_.valid()) return;
  std::vector<int32_t> rows;
  for (int64_t t = 0; t < step.shape.num_sequence_tokens(); ++t) {
    if (t % config_.num_tokens() != 0) rows.push_back(static_cast<int32_t>(t));
  }
  const TensorView on_device = patch_rows(step);
  step.device.copy_to_device(on_device.data, rows.data(), on_device.bytes());
}

void VisionTower::forward(const StepContext& step, const TensorView& pixels) const {
  embedding_.forward(step, pixels, embedded(step));
  stack_.forward(step);
  select(step);
}

// Adds up the two terms of the stack's result.
void VisionTower::select(const StepContext& step) const {
  const TensorView residual = stack_.residual(step), branch = stack_.branch(step), out = features(step);
  if (config_.drops_class_token()) {
    add(step.device, {.x = residual.reshaped({residual.numel()}), .total = branch.reshaped({branch.numel()})});
    gather_rows(step.device, {.positions = patch_rows(step), .x = branch, .out = out});
    return;
  }
  norm_forward(step.device, {.kind = NormKind::kNone,
                             .eps = 0,
                             .residual = step.rows_of_sequences(residual),
                             .branch = step.rows_of_sequences(branch),
                             .residual_out = out,
                             .y = out});
}

// From the gradient of the features to that of what the stack has left, in FP8 as well where its GEMMs are.
void VisionTower::spread_gradient(const StepContext& step) const {
  const TensorView d_residual = stack_.stream().d_residual(step);
  if (d_features_.valid()) {
    step.device.fill_zero(d_residual.data, d_residual.bytes());  // class tokens get no gradient
    scatter_rows(step.device, {.positions = patch_rows(step), .x = d_features(step), .out = d_residual});
  } else {
    step.clear_padding(d_residual);
  }
  const GemmInput codes = stack_.stream().d_residual_codes(step);
  if (stack_.reads_fp8_gradient() && !codes.row.empty()) {
    quantize(step.device, {.x = d_residual, .out = codes.row, .out_t = codes.transposed});
  }
}

void VisionTower::backward(const StepContext& step) const {
  spread_gradient(step);
  stack_.backward(step);
  embedding_.backward(step, stack_.stream().d_residual(step));
}

}  // namespace parka
