#pragma once
#include "model/buffer_scope.h"
#include "model/layers/linear.h"
#include "model/step_context.h"

namespace parka {

// What the branches of a stack hand on to one another, forward and backward. One set of buffers for all of them.
class ResidualStream {
 public:
  // Phases in which branches read d_branch, in rows and transposed, and in which their last op writes
  // d_norm_output.
  struct BackwardPhases {
    PhaseMask rows, transposed, d_norm_output;
  };
  void declare(BufferScope& scope, int64_t width, const BackwardPhases& phases);

  TensorView branch(const StepContext& step) const;      // [T, d] output of a branch, until the next norm adds it
  TensorView d_residual(const StepContext& step) const;  // [T, d] gradient of the residual stream
  TensorView d_norm_output(const StepContext& step) const;  // [T, d] gradient of a norm's output
  // The gradient that flows into a branch: d_residual, in FP8 where GEMMs are.
  GemmInput d_branch(const StepContext& step) const;
  // Where whoever writes d_residual writes that, too: empty where it is d_residual itself.
  GemmInput d_branch_codes(const StepContext& step) const;

 private:
  TensorView view(const StepContext& step, TensorId id) const { return step.tensor(id, step.num_tokens(), width_); }

  int64_t width_ = 0;
  TensorId branch_, d_residual_, d_norm_output_;
  GemmInputIds d_branch_;  // invalid without FP8 GEMMs
};

}  // namespace parka
