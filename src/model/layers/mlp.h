#pragma once
#include <string>

#include "kernels/ops/elementwise/pointwise.h"
#include "model/layers/swiglu.h"

namespace parka {

// out = W_fc2 act(W_fc1 x + b_fc1) + b_fc2, with act of model.mlp_activation. With precision.up_gate = fp8 the
// activation reads, forward and backward, what FP8 has kept of its input. An inner layer of Branch, with the
// names and phases of Swiglu: a stack has one of the two in all blocks.
class Mlp {
 public:
  static constexpr const char *kNormName = Swiglu::kNormName, *kPostNormName = Swiglu::kPostNormName;
  static constexpr PhaseMask kForwardPhase = Swiglu::kForwardPhase;
  static constexpr PhaseMask kRowsPhases = Swiglu::kRowsPhases, kTransposedPhases = Swiglu::kTransposedPhases;
  static constexpr PhaseMask kLastBackwardPhase = Swiglu::kLastBackwardPhase;
  static constexpr auto kNormInput = Swiglu::kNormInput, kNormOutput = Swiglu::kNormOutput;
  static constexpr auto kPostNormInput = Swiglu::kPostNormInput, kOutputGradient = Swiglu::kOutputGradient;

  static void add_parameters(ParameterList& list, const ModelConfig& model, const std::string& prefix,
                             double depth);

  Mlp(const ModelConfig& model, const PrecisionConfig& precision, const ParameterTable& table, int64_t block,
      const std::string& prefix);

  void declare(BufferScope& scope);
  bool reads_input_again() const { return fc1_.reads_input_again(); }
  bool reads_fp8() const { return fc1_.is_fp8(); }
  bool reads_fp8_forward() const { return fc1_.is_fp8_forward(); }
  bool reads_fp8_gradient() const { return fc2_.is_fp8(); }
  void forward(const StepContext& step, const ScaledView& x, const TensorView& out) const;
  void backward(const StepContext& step, const GemmInput& d_out, const InputAgain& x, const TensorView& d_x) const;

 private:
  void save_hidden(const StepContext& step, const TensorView& hidden) const;
  TensorView activate(const StepContext& step, const TensorView& hidden) const;
  GemmInput product_again(const StepContext& step, const TensorView& hidden) const;

  int64_t d_ffn_;
  Activation activation_;
  Linear fc1_, fc2_;
  bool saves_product_;  // false: backward makes it again

  TensorId hidden_;            // [T, f] what the activation reads: decoded where it is kept in FP8
  MatrixId hidden_saved_;      // [T, f] the same in FP8; invalid: hidden_ itself is kept
  TensorId activated_;         // [T, f] what it makes, with FP8 GEMMs only; without, that is product_
  GemmInputIds product_;       // [T, f] input of fc2
  TensorId d_hidden_;          // [T, f] the gradient of the activation's output, then of its input
  GemmInputIds d_hidden_fp8_;  // of the latter; invalid without FP8 GEMMs
};

}  // namespace parka
