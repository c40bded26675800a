#include "model/vision/patch_embedding.h"

#include <array>
#include <vector>

#include "kernels/ops/elementwise/vision.h"

namespace parka {
namespace {

constexpr const char *kPositions = "vision.positions", *kClassToken = "vision.class_token",
                     *kPreNorm = "vision.pre_norm";

std::array<float, 3> by_channel(const std::vector<double>& values) {
  PARKA_REQUIRE(values.size() == 3);
  return {static_cast<float>(values[0]), static_cast<float>(values[1]), static_cast<float>(values[2])};
}

}  // namespace

void PatchEmbedding::add_parameters(ParameterList& list, const TowerConfig& config) {
  const int64_t v = config.width, K = config.patch_columns();
  Linear::add_parameter(list, kPatchEmbedding, v, K, list.initial_std(K, 0), ParameterRole::kPlainLinear);
  if (config.has_patch_bias()) Linear::add_bias(list, kPatchEmbedding, v);
  const double std = list.initial_std(v, 0);
  if (config.has_class_token()) list.add(kClassToken, 1, v, ParameterRole::kNorm, /*decayed=*/false, std);
  list.add(kPositions, config.num_tokens(), v, ParameterRole::kEmbedding, /*decayed=*/false, std);
  if (config.has_pre_norm()) Norm::add_parameters(list, NormKind::kAffineLayerNorm, v, kPreNorm);
}

PatchEmbedding::PatchEmbedding(const TowerConfig& config, const ParameterTable& table, BufferScope& scope)
    : config_(config),
      patch_(scope.precision(), table, kPatchEmbedding),
      positions_(table.index_of(kPositions)),
      class_token_(table.index_of(kClassToken)) {
  const int64_t v = config.width, rows = scope.shape().num_sequences * config.num_patches();
  patches_ = scope.kept("vision.patches", scope.compute(), {rows, config.patch_columns()});
  if (config.has_pre_norm()) {
    norm_.emplace(NormKind::kAffineLayerNorm, v, config.norm_eps, table, kPreNorm);
    norm_->declare_for_sum(scope, kPreNorm);
  }
  if (!config.has_class_token()) return;
  embedded_ = scope.workspace("vision.embedded", scope.compute(), {rows, v}, kStep);
  if (scope.has_backward()) d_patches_ = scope.workspace("vision.d_patches", scope.compute(), {rows, v}, kStep);
}

void PatchEmbedding::forward(const StepContext& step, const TensorView& pixels, const TensorView& out) const {
  const TensorView rows = patches(step), padded = norm_ ? norm_->sum(step) : out;
  const TensorView sum = step.rows_of_sequences(padded);
  const TensorView x = embedded_.valid() ? step.tensor(embedded_, num_patches(step), config_.width) : sum;
  step.clear_padding(padded);
  gather_patches(step.device, {.pixels = pixels,
                               .patches = rows,
                               .patch_size = config_.patch_size,
                               .mean = by_channel(config_.pixel_mean),
                               .deviation = by_channel(config_.pixel_deviation)});
  patch_.forward(step, rows, x);
  positions_forward(step.device, {.x = x,
                                  .positions = step.weights.plain(positions_),
                                  .class_token = step.weights.plain(class_token_),
                                  .out = sum});
  if (norm_) norm_->forward_of_sum(step, out);
}

void PatchEmbedding::backward(const StepContext& step, const TensorView& d_out) const {
  if (norm_) norm_->backward(step, d_out, /*d_residual=*/{}, d_out, {});
  const TensorView d_patches = step.tensor(d_patches_, num_patches(step), config_.width);
  TensorView d_positions = step.gradient_to_add_to(positions_);
  if (!d_positions.empty()) d_positions = d_positions.reshaped({config_.num_tokens(), config_.width});
  const TensorView d_sum = step.rows_of_sequences(d_out);
  positions_backward(step.device, {.d_out = d_sum,
                                   .d_x = d_patches,
                                   .d_positions = d_positions,
                                   .d_class_token = step.gradient_to_add_to(class_token_),
                                   .num_images = step.shape.num_sequences});
  const TensorView d_x = d_patches.empty() ? d_sum : d_patches;
  patch_.bias_gradient(step, d_x);
  if (patch_.trains_weight()) patch_.weight_gradient(step, {d_x, {}}, {patches(step), {}});
}

}  // namespace parka
