#pragma once
#include <string>

#include "kernels/ops/norm/norm.h"
#include "model/buffer_scope.h"
#include "model/layers/linear.h"
#include "model/step_context.h"

namespace parka {

// Adds a branch to the residual stream and normalises the sum: LayerNorm without parameters or with weight and
// bias, or RMSNorm with a weight (model.norm), or 1 + that (model.norm_unit_offset); or kNone, which passes it on.
class Norm {
 public:
  // The weight and, of kAffineLayerNorm, the bias <name>_bias. Nothing where the norm has no weight.
  static void add_parameters(ParameterList& list, NormKind kind, int64_t width, const std::string& name);

  Norm(NormKind kind, const ModelConfig& model, const ParameterTable& table, const std::string& name);
  // A norm of another width and epsilon than the model's.
  Norm(NormKind kind, int64_t width, double eps, const ParameterTable& table, const std::string& name);

  // Before a layer whose first op is a linear layer: it keeps the sum, in FP8 with precision.norm_input, and
  // that linear layer's input. `forward` and `backward` are the phases in which that is written and read.
  // `is_read_again`: the linear layer has a weight gradient. `is_fp8`: it reads codes, and
  // `is_fp8_forward` whether in forward, too. `is_read_plain`: plain_output() is wanted, too.
  void declare_in_branch(BufferScope& scope, const std::string& name, bool is_first_of_block, PhaseMask forward,
                         PhaseMask backward, bool is_read_again, bool is_fp8, bool is_fp8_forward,
                         bool is_read_plain = false);
  // After such a layer, which writes into sum(). It keeps that, in FP8 with precision.norm_input.
  void declare_for_sum(BufferScope& scope, const std::string& name);
  // For layers whose forward and backward are one phase: nothing is saved, and all is in the compute format.
  void declare_in_workspace(BufferScope& scope, const std::string& name, PhaseMask phase);

  // sum = residual + branch; an empty branch adds nothing.
  void forward(const StepContext& step, const TensorView& residual, const TensorView& branch) const;
  // Normalises sum(), after declare_for_sum(); y [T, d] in the compute format.
  void forward_of_sum(const StepContext& step, const TensorView& y) const;
  TensorView sum(const StepContext& step) const;     // [T, d]
  ScaledView output(const StepContext& step) const;  // [T, d]
  // The output for a weight gradient: what forward kept, or made again.
  GemmInput output_again(const StepContext& step) const;
  // [T, d] the output in the compute format: made again from the norm's input where GEMMs read it in FP8.
  TensorView plain_output(const StepContext& step) const;
  // d_sum = d_residual, if any, + the gradient through the norm. `quantized` is d_sum in FP8, where wanted.
  void backward(const StepContext& step, const TensorView& d_output, const TensorView& d_residual,
                const TensorView& d_sum, const GemmInput& quantized) const;

  // Sample the errors of the FP8 copy that the norm reads, and of its output. After forward.
  void sample_input(const StepContext& step, int64_t block, QuantizedTensor which) const;
  void sample_output(const StepContext& step, int64_t block, QuantizedTensor which) const;

 private:
  void declare_statistics(BufferScope& scope, const std::string& name);
  void run(const StepContext& step, const TensorView& residual, const TensorView& branch, const ScaledView& y,
           const ScaledView& y_t) const;
  // Makes the output again, in rows and transposed, in the formats of y and y_t.
  void make_again(const StepContext& step, const ScaledView& y, const ScaledView& y_t) const;
  // The norm's input: the sum, or its FP8 copy.
  ScaledView input(const StepContext& step) const;
  TensorView weight(const StepContext& step) const { return step.weights.plain(weight_); }
  TensorView bias(const StepContext& step) const { return step.weights.plain(bias_); }

  NormKind kind_;
  float eps_;
  int64_t width_;
  int weight_, bias_;  // -1: none
  float weight_offset_ = 0;
  bool saves_output_ = true;  // false: backward makes it again

  // [T, d] the residual stream after the add. A block's first one is all that recompute = block keeps.
  TensorId sum_;
  MatrixId input_;        // [T, d] FP8 copy of it that the norm reads; invalid: it reads the sum
  TensorId mean_, rstd_;  // [T]; LayerNorms have a mean, kNone neither
  GemmInputIds output_;   // [T, d] the norm's output
  TensorId plain_;        // the same in the compute format; invalid where that is its format, or nobody wants it
};

}  // namespace parka
