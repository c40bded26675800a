#pragma once
#include <optional>
#include <string>

#include "model/buffer_scope.h"
#include "model/layers/linear.h"
#include "model/step_context.h"

namespace parka {

// u = down(h): the s numbers that a side layer reads of the d that a frozen layer hands on. Gradients go to its
// weights and no further. All of it in the compute format, but for what is kept of h with SideRules::keeps_fp8.
class Downsample {
 public:
  // A width d becomes s; names of parameters and buffers begin with `prefix`. Pooling has no parameters.
  static void add_parameters(ParameterList& list, const SideRules& rules, int64_t d, int64_t s,
                             const std::string& prefix);
  // `kept_fp8` is the format of what is kept of h with keeps_fp8.
  Downsample(const SideRules& rules, int64_t d, int64_t s, const ParameterTable& table, const std::string& prefix,
             const Format& kept_fp8, BufferScope& scope);

  // [T, d] where h is to be: saved if backward reads it in the compute format, else in memory of all downsamples.
  TensorView input(const StepContext& step) const { return step.tensor(input_, step.num_tokens(), width_); }
  // From input() to out [T, s].
  void forward(const StepContext& step, const TensorView& out) const;
  bool has_parameters() const { return !is_pool(rules_.downsample); }
  // Gradients of the weights from d_out [T, s].
  void backward(const StepContext& step, const TensorView& d_out) const;

 private:
  TensorView inner(const StepContext& step, TensorId id) const {
    return step.tensor(id, step.num_tokens(), rules_.rank);
  }
  // The input of the second factor: the first one's output, or silu of that.
  TensorView activated(const StepContext& step) const;
  TensorView input_again(const StepContext& step) const;

  SideRules rules_;
  int64_t width_;                   // d
  std::optional<Linear> in_, out_;  // of kLinear the first alone
  TensorId input_;                  // [T, d]
  MatrixId codes_;                  // [T, d] FP8 of it; invalid: not made
  TensorId decoded_;                // [T, d]
  TensorId inner_, d_inner_;        // [T, rank] the first factor's output and its gradient
  TensorId activated_;              // [T, rank] of kAdapter: silu of it
};

}  // namespace parka
