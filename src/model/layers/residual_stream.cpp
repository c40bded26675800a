#include "model/layers/residual_stream.h"

namespace parka {

void ResidualStream::declare(BufferScope& scope, int64_t width, const BackwardPhases& phases, bool has_post_norms,
                             bool any_fp8, bool any_plain) {
  width_ = width;
  has_post_norms_ = has_post_norms;
  const int64_t tokens = scope.tokens();
  const Format& gradient = scope.formats().gradient;
  branch_ = scope.workspace("branch", scope.compute(), {tokens, width}, scope.forward(kBlockForward) | kHeadNorm);
  if (!scope.has_backward()) return;
  d_residual_ = scope.workspace("d_residual", scope.compute(), {tokens, width}, kBackwardHeadNorm | kBackward);
  // GEMMs that are not FP8 read there what a post-norm has written.
  const PhaseMask of_inner = has_post_norms && any_plain ? phases.rows | phases.transposed : PhaseMask{0};
  d_norm_output_ = scope.workspace("d_norm_output", scope.compute(), {tokens, width},
                                   kHead | kBackwardHeadNorm | phases.d_norm_output | kBackwardNorm | of_inner);
  if (!any_fp8) return;
  // The backward of the head or of a norm makes it, the next linear layer reads it: in rows for its input gradient,
  // and transposed for its weight gradient. A post-norm makes it after a block's forward has run again.
  const PhaseMask made =
      has_post_norms ? PhaseMask{kBackwardNorm} : scope.forward(kBackwardHeadNorm | kBackwardNorm);
  const PhaseMask rows = made | phases.rows;
  const PhaseMask transposed = rows | phases.transposed;
  TensorId scale;
  if (gradient.scaling == Scaling::kTensor) {
    scale = scope.workspace("d_branch.scale", DType::kF32, {1}, transposed);
  }
  d_inner_.row = scope.workspace("d_branch", gradient, tokens, width, rows, scale);
  d_inner_.transposed = scope.workspace("d_branch_t", gradient, width, tokens, transposed, scale);
}

TensorView ResidualStream::branch(const StepContext& step) const { return view(step, branch_); }

TensorView ResidualStream::d_residual(const StepContext& step) const { return view(step, d_residual_); }

TensorView ResidualStream::d_norm_output(const StepContext& step) const { return view(step, d_norm_output_); }

TensorView ResidualStream::d_inner_plain(const StepContext& step) const {
  return has_post_norms_ ? d_norm_output(step) : d_residual(step);
}

GemmInput ResidualStream::d_inner(const StepContext& step, bool is_fp8) const {
  GemmInput d_inner = is_fp8 ? d_inner_codes(step) : GemmInput{d_inner_plain(step), {}};
  d_inner.plain = d_inner_plain(step);
  return d_inner;
}

GemmInput ResidualStream::d_inner_codes(const StepContext& step) const {
  return {step.matrix(d_inner_.row, step.num_tokens(), width_),
          step.matrix(d_inner_.transposed, width_, step.num_tokens())};
}

}  // namespace parka
