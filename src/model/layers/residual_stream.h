#pragma once
#include "model/buffer_scope.h"
#include "model/layers/linear.h"
#include "model/step_context.h"

namespace parka {

// The tensors that the branches of a stack hand on to one another, forward and backward, in one set of buffers.
class ResidualStream {
 public:
  // Phases in which inner layers read d_inner, in rows and transposed, and write d_norm_output last.
  struct BackwardPhases {
    PhaseMask rows, transposed, d_norm_output;
  };
  // `has_post_norms`: between an inner layer and the stream is a norm. The inner layers whose products read the
  // gradient in FP8, and those whose do not, if there are any.
  void declare(BufferScope& scope, int64_t width, const BackwardPhases& phases, bool has_post_norms, bool any_fp8,
               bool any_plain);

  TensorView branch(const StepContext& step) const;      // [T, d] output of a branch, until the next norm adds it
  TensorView d_residual(const StepContext& step) const;  // [T, d] gradient of the residual stream
  TensorView d_norm_output(const StepContext& step) const;  // [T, d] gradient of a norm's output
  // The gradient of an inner layer's output: d_residual itself, or what the post-norm makes of it.
  TensorView d_inner_plain(const StepContext& step) const;
  // The same as GEMMs read it: in FP8 where they are.
  GemmInput d_inner(const StepContext& step, bool is_fp8) const;
  // The FP8 codes of d_inner_plain, which its writer writes, too: empty if there are none. The writer of d_residual
  // does so unless the gradient goes through a post-norm first.
  GemmInput d_inner_codes(const StepContext& step) const;
  GemmInput d_residual_codes(const StepContext& step) const {
    return has_post_norms_ ? GemmInput{} : d_inner_codes(step);
  }

 private:
  TensorView view(const StepContext& step, TensorId id) const { return step.tensor(id, step.num_tokens(), width_); }

  int64_t width_ = 0;
  bool has_post_norms_ = false;
  TensorId branch_, d_residual_;
  TensorId d_norm_output_;  // and, at other times, what a post-norm makes of d_residual
  GemmInputIds d_inner_;    // invalid without FP8 GEMMs
};

}  // namespace parka
