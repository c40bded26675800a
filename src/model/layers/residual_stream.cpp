#include "model/layers/residual_stream.h"

namespace parka {

void ResidualStream::declare(BufferScope& scope, int64_t width, const BackwardPhases& phases) {
  width_ = width;
  const int64_t tokens = scope.tokens();
  const Format& gradient = scope.formats().gradient;
  branch_ = scope.workspace("branch", scope.compute(), {tokens, width}, scope.forward(kBlockForward) | kHead);
  if (!scope.has_backward()) return;
  d_residual_ = scope.workspace("d_residual", scope.compute(), {tokens, width}, kHead | kBackward);
  d_norm_output_ = scope.workspace("d_norm_output", scope.compute(), {tokens, width},
                                   kHead | phases.d_norm_output | kBackwardNorm);
  if (!scope.formats().fp8_gemm) return;
  // The backward of the head or of a norm makes it, the next linear layer reads it: in rows for its input gradient,
  // and transposed for its weight gradient.
  const PhaseMask rows = scope.forward(kHead | kBackwardNorm) | phases.rows;
  const PhaseMask transposed = rows | phases.transposed;
  TensorId scale;
  if (gradient.scaling == Scaling::kTensor) {
    scale = scope.workspace("d_branch.scale", DType::kF32, {1}, transposed);
  }
  d_branch_.row = scope.workspace("d_branch", gradient, tokens, width, rows, scale);
  d_branch_.transposed = scope.workspace("d_branch_t", gradient, width, tokens, transposed, scale);
}

TensorView ResidualStream::branch(const StepContext& step) const { return view(step, branch_); }

TensorView ResidualStream::d_residual(const StepContext& step) const { return view(step, d_residual_); }

TensorView ResidualStream::d_norm_output(const StepContext& step) const { return view(step, d_norm_output_); }

GemmInput ResidualStream::d_branch(const StepContext& step) const {
  if (!d_branch_.row.valid()) return {d_residual(step), {}};
  return d_branch_codes(step);
}

GemmInput ResidualStream::d_branch_codes(const StepContext& step) const {
  return {step.matrix(d_branch_.row, step.num_tokens(), width_),
          step.matrix(d_branch_.transposed, width_, step.num_tokens())};
}

}  // namespace parka
