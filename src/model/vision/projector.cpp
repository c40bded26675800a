#include "model/vision/projector.h"

#include <string>

#include "kernels/ops/elementwise/pointwise.h"

namespace parka {
namespace {

constexpr int64_t kFactor = 2;  // tokens side by side in each direction
constexpr double kDownsampledNormEps = 1e-5;
constexpr const char *kDownsampledNorm = "projector.norm", *kFc2 = "projector.fc2";

TokenMerge merge_of(const ProjectorConfig& config, const TowerConfig& tower) {
  return {.rows = tower.grid(), .columns = tower.grid(), .factor = kFactor, .column_major = config.column_major};
}

int64_t input_width(const ProjectorConfig& config, const TowerConfig& tower) {
  return config.downsamples() ? kFactor * kFactor * tower.width : tower.width;
}

void add_layer(ParameterList& list, const std::string& name, int64_t rows, int64_t cols) {
  Linear::add_parameter(list, name, rows, cols, list.initial_std(cols, 0), ParameterRole::kPlainLinear);
  Linear::add_bias(list, name, rows);
}

}  // namespace

int64_t Projector::num_tokens(const ProjectorConfig& config, const TowerConfig& tower) {
  return config.downsamples() ? merge_of(config, tower).merged() : tower.num_features();
}

void Projector::add_parameters(ParameterList& list, const ProjectorConfig& config, const TowerConfig& tower) {
  if (config.downsamples() && tower.num_features() != tower.num_patches()) {
    throw_bad_input(
        "projector mlp_downsample takes a square grid of patches, and no class token beside it; "
        "leave that out of the tower's features");
  }
  const int64_t d = config.d_model, width = input_width(config, tower);
  if (config.downsamples()) Norm::add_parameters(list, NormKind::kAffineLayerNorm, width, kDownsampledNorm);
  add_layer(list, kProjectorInput, d, width);
  if (config.has_two_layers()) add_layer(list, kFc2, d, d);
}

Projector::Projector(const ProjectorConfig& config, const TowerConfig& tower, const ParameterTable& table,
                     BufferScope& scope)
    : config_(config),
      merge_(merge_of(config, tower)),
      input_width_(input_width(config, tower)),
      fc1_(scope.precision(), table, kProjectorInput) {
  PARKA_REQUIRE(!scope.precision().has_fp8());
  const int64_t T = scope.tokens(), d = config.d_model;
  const DType compute = scope.compute();
  if (config.downsamples()) {
    norm_.emplace(NormKind::kAffineLayerNorm, input_width_, kDownsampledNormEps, table, kDownsampledNorm);
    norm_->declare_for_sum(scope, kDownsampledNorm);
    normalized_ = scope.kept("projector.normalized", compute, {T, input_width_});
    if (scope.has_backward()) {
      d_normalized_ = scope.workspace("projector.d_normalized", compute, {T, input_width_}, kStep);
    }
  }
  if (!config.has_two_layers()) return;
  fc2_.emplace(scope.precision(), table, kFc2);
  hidden_ = scope.kept("projector.hidden", compute, {T, d});
  activated_ = scope.kept("projector.activated", compute, {T, d});
  if (scope.has_backward()) d_hidden_ = scope.workspace("projector.d_hidden", compute, {T, d}, kStep);
}

TensorView Projector::input(const StepContext& step, const TensorView& x) const {
  return norm_ ? view(step, normalized_, input_width_) : x;
}

void Projector::forward(const StepContext& step, const TensorView& x, const TensorView& out) const {
  if (norm_) {
    space_to_channel_forward(step.device, {.x = x, .out = norm_->sum(step), .merge = merge_});
    norm_->forward_of_sum(step, view(step, normalized_, input_width_));
  }
  if (!fc2_) {
    fc1_.forward(step, input(step, x), out);
    return;
  }
  const TensorView hidden = view(step, hidden_, config_.d_model),
                   activated = view(step, activated_, config_.d_model);
  fc1_.forward(step, input(step, x), hidden);
  activation_forward(step.device, {.kind = Activation::kGelu, .x = hidden, .y = activated});
  fc2_->forward(step, activated, out);
}

// Through the second layer and GELU, where they are: the gradient of what the first layer makes.
TensorView Projector::down_one_layer(const StepContext& step, const TensorView& d_out) const {
  if (!fc2_) return d_out;
  const int64_t d = config_.d_model;
  const TensorView d_hidden = view(step, d_hidden_, d);
  fc2_->bias_gradient(step, d_out);
  if (fc2_->trains_weight()) fc2_->weight_gradient(step, {d_out, {}}, {view(step, activated_, d), {}});
  fc2_->input_gradient(step, {d_out, {}}, d_hidden);
  activation_backward(step.device,
                      {.kind = Activation::kGelu, .x = view(step, hidden_, d), .d_y = d_hidden, .d_x = d_hidden});
  return d_hidden;
}

void Projector::backward(const StepContext& step, const TensorView& x, const TensorView& d_out,
                         const TensorView& d_x) const {
  const TensorView d_fc1 = down_one_layer(step, d_out);
  fc1_.bias_gradient(step, d_fc1);
  if (fc1_.trains_weight()) fc1_.weight_gradient(step, {d_fc1, {}}, {input(step, x), {}});
  const TensorView d_input = norm_ ? view(step, d_normalized_, input_width_) : d_x;
  if (d_input.empty()) return;
  fc1_.input_gradient(step, {d_fc1, {}}, d_input);
  if (!norm_) return;
  norm_->backward(step, d_input, /*d_residual=*/{}, d_input, {});
  if (d_x.empty()) return;
  space_to_channel_backward(step.device, {.d_out = d_input, .d_x = d_x, .merge = merge_});
}

}  // namespace parka
