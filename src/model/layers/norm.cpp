#include "model/layers/norm.h"

#include "kernels/ops/quantize/quantize.h"

namespace parka {

void Norm::add_parameters(ParameterList& list, NormKind kind, int64_t width, const std::string& name) {
  if (!has_weight(kind)) return;
  list.add(name, 1, width, ParameterRole::kNorm, /*decayed=*/false, 0.0);
  if (kind == NormKind::kAffineLayerNorm) Linear::add_bias(list, name, width);
}

Norm::Norm(NormKind kind, const ModelConfig& model, const ParameterTable& table, const std::string& name)
    : Norm(kind, model.d_model, model.norm_eps, table, name) {
  weight_offset_ = model.norm_weight_offset();
}

Norm::Norm(NormKind kind, int64_t width, double eps, const ParameterTable& table, const std::string& name)
    : kind_(kind),
      eps_(static_cast<float>(eps)),
      width_(width),
      weight_(table.index_of(name)),
      bias_(table.index_of(name + "_bias")) {
  PARKA_REQUIRE((weight_ >= 0) == has_weight(kind_) && (bias_ >= 0) == (kind_ == NormKind::kAffineLayerNorm));
}

void Norm::declare_in_branch(BufferScope& scope, const std::string& name, bool is_first_of_block, PhaseMask forward,
                             PhaseMask backward, bool is_read_again, bool is_fp8, bool is_fp8_forward,
                             bool is_read_plain) {
  PARKA_REQUIRE(!is_read_plain || kind_ != NormKind::kNone);
  if (kind_ == NormKind::kNone) {
    // Backward reads nothing but the linear layer's input: the sum itself, or FP8 codes of it. Nothing smaller is
    // saved from which these could be recomputed.
    sum_ = scope.residual(name + ".input", width_, is_first_of_block, /*keep=*/!is_fp8_forward && is_read_again);
    output_ = is_fp8_forward ? scope.gemm_input(name + ".output", width_, /*save=*/true, forward, backward,
                                                is_read_again, /*is_fp8=*/true, /*is_fp8_forward=*/true)
                             : GemmInputIds{{sum_, {}, scope.formats().compute}, {}};
    if (is_fp8 && !is_fp8_forward && scope.has_backward() && is_read_again) {
      output_.transposed =
          scope.workspace(name + ".output_t", scope.formats().activation, width_, scope.tokens(), backward);
    }
    return;
  }
  sum_ = scope.residual(name + ".input", width_, is_first_of_block,
                        /*keep=*/scope.formats().norm_input.scaling == Scaling::kNone);
  declare_statistics(scope, name);
  saves_output_ = scope.precision().save_norm_output;
  output_ = scope.gemm_input(name + ".output", width_, saves_output_, forward, backward, is_read_again, is_fp8,
                             is_fp8_forward);
  if (is_read_plain && is_fp8_forward) {
    plain_ = scope.workspace(name + ".plain_output", scope.compute(), {scope.tokens(), width_},
                             forward | (scope.has_backward() ? backward : PhaseMask{0}));
  }
}

void Norm::declare_for_sum(BufferScope& scope, const std::string& name) {
  sum_ = scope.formats().norm_input.scaling == Scaling::kNone
             ? scope.kept(name + ".input", scope.compute(), {scope.tokens(), width_})
             : scope.workspace("branch_before_norm", scope.compute(), {scope.tokens(), width_},
                               scope.forward(kBlockForward));
  declare_statistics(scope, name);
}

// And the FP8 copy that they are of.
void Norm::declare_statistics(BufferScope& scope, const std::string& name) {
  const int64_t tokens = scope.tokens();
  if (scope.formats().norm_input.scaling != Scaling::kNone) {
    input_ = scope.kept(name + ".input_fp8", scope.formats().norm_input, tokens, width_);
  }
  if (has_mean(kind_)) mean_ = scope.kept(name + ".mean", DType::kF32, {tokens});
  rstd_ = scope.kept(name + ".rstd", DType::kF32, {tokens});
}

void Norm::declare_in_workspace(BufferScope& scope, const std::string& name, PhaseMask phase) {
  const int64_t tokens = scope.tokens();
  sum_ = scope.workspace(name + "_input", scope.compute(), {tokens, width_}, phase);
  if (has_mean(kind_)) mean_ = scope.workspace(name + "_mean", DType::kF32, {tokens}, phase);
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
  // Not kept: backward makes it again, or does not read it.
  const bool transposed = step.keep && saves_output_ && output_.row.format.scaling != Scaling::kNone;
  run(step, residual, branch, output(step),
      transposed ? step.matrix(output_.transposed, width_, step.num_tokens()) : ScaledView{});
}

void Norm::forward_of_sum(const StepContext& step, const TensorView& y) const { run(step, sum(step), {}, y, {}); }

void Norm::run(const StepContext& step, const TensorView& residual, const TensorView& branch, const ScaledView& y,
               const ScaledView& y_t) const {
  const int64_t T = step.num_tokens();
  norm_forward(step.device, {.kind = kind_,
                             .eps = eps_,
                             .residual = residual,
                             .branch = branch,
                             .weight = weight(step),
                             .bias = bias(step),
                             .residual_out = sum(step),
                             .x = step.matrix(input_, T, width_),
                             .y = y,
                             .y_t = y_t,
                             .mean = step.vector(mean_, T),
                             .rstd = step.vector(rstd_, T),
                             .weight_offset = weight_offset_});
}

GemmInput Norm::output_again(const StepContext& step) const {
  const int64_t T = step.num_tokens();
  const bool is_fp8 = output_.transposed.valid(), is_plain = output_.row.format.scaling == Scaling::kNone;
  const GemmInput y = {is_fp8 && !is_plain ? ScaledView{} : output(step),
                       step.matrix(output_.transposed, width_, T)};
  if (!saves_output_) make_again(step, y.row, is_plain ? ScaledView{} : y.transposed);
  if (is_fp8 && is_plain) quantize(step.device, {.x = y.row, .out = {}, .out_t = y.transposed});
  return y;
}

TensorView Norm::plain_output(const StepContext& step) const {
  if (!plain_.valid()) return output(step).data;
  const TensorView y = step.tensor(plain_, step.num_tokens(), width_);
  make_again(step, y, {});
  return y;
}

void Norm::make_again(const StepContext& step, const ScaledView& y, const ScaledView& y_t) const {
  const int64_t T = step.num_tokens();
  norm_recompute(step.device, {.kind = kind_,
                               .x = input(step),
                               .weight = weight(step),
                               .bias = bias(step),
                               .mean = step.vector(mean_, T),
                               .rstd = step.vector(rstd_, T),
                               .y = y,
                               .y_t = y_t,
                               .weight_offset = weight_offset_});
}

void Norm::backward(const StepContext& step, const TensorView& d_output, const TensorView& d_residual,
                    const TensorView& d_sum, const GemmInput& quantized) const {
  const int64_t T = step.num_tokens();
  norm_backward(step.device, {.kind = kind_,
                              .x = kind_ == NormKind::kNone ? ScaledView{} : input(step),
                              .weight = weight(step),
                              .mean = step.vector(mean_, T),
                              .rstd = step.vector(rstd_, T),
                              .d_y = d_output,
                              .d_residual = d_residual,
                              .d_residual_out = d_sum,
                              .d_quantized = quantized.row,
                              .d_quantized_t = quantized.transposed,
                              .d_weight = step.gradient_to_add_to(weight_),
                              .d_bias = step.gradient_to_add_to(bias_),
                              .weight_offset = weight_offset_});
}

void Norm::sample_input(const StepContext& step, int64_t block, QuantizedTensor which) const {
  step.samples.add(step.device, block, which, sum(step), step.matrix(input_, step.num_tokens(), width_));
}

void Norm::sample_output(const StepContext& step, int64_t block, QuantizedTensor which) const {
  const Samples& samples = step.samples;
  if (!samples.active() || output_.row.format.scaling == Scaling::kNone) return;
  const int64_t T = step.num_tokens();
  const TensorView y = samples.buffer(width_);
  norm_recompute(step.device, {.kind = kind_,
                               .x = samples.first_rows(input(step)),
                               .weight = weight(step),
                               .bias = bias(step),
                               .mean = samples.first_rows(step.vector(mean_, T)),
                               .rstd = samples.first_rows(step.vector(rstd_, T)),
                               .y = y,
                               .weight_offset = weight_offset_});
  samples.add(step.device, block, which, y, output(step));
}

}  // namespace parka
