#include "model/layers/norm.h"

namespace parka {

void Norm::add_parameter(ParameterList& list, const ModelConfig& model, const std::string& name) {
  if (model.norm != NormKind::kRmsNorm) return;
  list.add(name, 1, model.d_model, ParameterRole::kNorm, /*decayed=*/false, 0.0);
}

Norm::Norm(const ModelConfig& model, const ParameterTable& table, const std::string& name)
    : kind_(model.norm),
      eps_(static_cast<float>(model.norm_eps)),
      width_(model.d_model),
      weight_(table.index_of(name)) {
  PARKA_REQUIRE((weight_ >= 0) == (kind_ == NormKind::kRmsNorm));
}

void Norm::declare_in_branch(BufferScope& scope, const std::string& name, bool is_first_of_block, PhaseMask forward,
                             PhaseMask backward) {
  const int64_t tokens = scope.tokens();
  sum_ = scope.residual(name + ".input", width_, is_first_of_block);
  if (scope.formats().norm_input.scaling != Scaling::kNone) {
    input_ = scope.kept(name + ".input_fp8", scope.formats().norm_input, tokens, width_);
  }
  if (kind_ == NormKind::kLayerNorm) mean_ = scope.kept(name + ".mean", DType::kF32, {tokens});
  rstd_ = scope.kept(name + ".rstd", DType::kF32, {tokens});
  saves_output_ = scope.precision().save_norm_output;
  output_ = scope.gemm_input(name + ".output", width_, saves_output_, forward, backward);
}

void Norm::declare_in_workspace(BufferScope& scope, const std::string& name, PhaseMask phase) {
  const int64_t tokens = scope.tokens();
  sum_ = scope.workspace(name + "_input", scope.compute(), {tokens, width_}, phase);
  if (kind_ == NormKind::kLayerNorm) mean_ = scope.workspace(name + "_mean", DType::kF32, {tokens}, phase);
  rstd_ = scope.workspace(name + "_rstd", DType::kF32, {tokens}, phase);
  output_.row = scope.workspace(name + "_output", scope.formats().compute, tokens, width_, phase);
}

TensorView Norm::sum(const StepContext& step) const { return step.tensor(sum_, step.num_tokens(), width_); }

ScaledView Norm::input(const StepContext& step) const {
  return input_.valid() ? step.matrix(input_, step.num_tokens(), width_) : ScaledView(sum(step));
}

ScaledView Norm::output(const StepContext& step) const {
  return step.matrix(output_.row, step.num_tokens(), width_);
}

void Norm::forward(const StepContext& step, const TensorView& residual, const TensorView& branch) const {
  const int64_t T = step.num_tokens();
  norm_forward(step.device,
               {.kind = kind_,
                .eps = eps_,
                .residual = residual,
                .branch = branch,
                .weight = weight(step),
                .residual_out = sum(step),
                .x = step.matrix(input_, T, width_),
                .y = output(step),
                // Not kept: backward makes it again.
                .y_t = step.keep && saves_output_ ? step.matrix(output_.transposed, width_, T) : ScaledView{},
                .mean = step.vector(mean_, T),
                .rstd = step.vector(rstd_, T)});
}

GemmInput Norm::output_again(const StepContext& step) const {
  const int64_t T = step.num_tokens();
  const bool is_fp8 = output_.transposed.valid();
  const GemmInput y = {is_fp8 ? ScaledView{} : output(step), step.matrix(output_.transposed, width_, T)};
  if (saves_output_) return y;
  norm_recompute(step.device, {.kind = kind_,
                               .x = input(step),
                               .weight = weight(step),
                               .mean = step.vector(mean_, T),
                               .rstd = step.vector(rstd_, T),
                               .y = y.row,
                               .y_t = y.transposed});
  return y;
}

void Norm::backward(const StepContext& step, const TensorView& d_output, const TensorView& d_residual,
                    const TensorView& d_sum, const GemmInput& quantized) const {
  const int64_t T = step.num_tokens();
  norm_backward(step.device, {.kind = kind_,
                              .x = input(step),
                              .weight = weight(step),
                              .mean = step.vector(mean_, T),
                              .rstd = step.vector(rstd_, T),
                              .d_y = d_output,
                              .d_residual = d_residual,
                              .d_residual_out = d_sum,
                              .d_quantized = quantized.row,
                              .d_quantized_t = quantized.transposed,
                              .d_weight = step.gradient_to_add_to(weight_)});
}

void Norm::sample(const StepContext& step, int64_t block, QuantizedTensor input, QuantizedTensor output) const {
  const Samples& samples = step.samples;
  if (!samples.active()) return;
  const int64_t T = step.num_tokens();
  samples.add(step.device, block, input, sum(step), step.matrix(input_, T, width_));
  if (output_.row.format.scaling == Scaling::kNone) return;
  const TensorView y = samples.buffer(width_);
  norm_recompute(step.device, {.kind = kind_,
                               .x = samples.first_rows(this->input(step)),
                               .weight = weight(step),
                               .mean = samples.first_rows(step.vector(mean_, T)),
                               .rstd = samples.first_rows(step.vector(rstd_, T)),
                               .y = y});
  samples.add(step.device, block, output, y, this->output(step));
}

SampleNeeds Norm::sample_needs() const {
  return {.buffer_cols = output_.row.format.scaling == Scaling::kNone ? 0 : width_};
}

}  // namespace parka
