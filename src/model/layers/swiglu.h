#pragma once
#include <string>

#include "model/buffer_scope.h"
#include "model/layers/linear.h"
#include "model/step_context.h"

namespace parka {

// out = W_down (up * act(gate)), with [up, gate] = W_up_gate x and act of model.activation. Inner layer.
class Swiglu {
 public:
  static constexpr const char *kNormName = "ffn_norm", *kPostNormName = "ffn_post_norm";
  static constexpr PhaseMask kForwardPhase = kForwardFfn;
  static constexpr PhaseMask kRowsPhases = kBackwardDown, kTransposedPhases = kBackwardDown | kBackwardSwiglu;
  static constexpr PhaseMask kLastBackwardPhase = kBackwardUpGate;
  static constexpr auto kNormInput = QuantizedTensor::kFfnNormInput;
  static constexpr auto kNormOutput = QuantizedTensor::kFfnNormOutput;
  static constexpr auto kPostNormInput = QuantizedTensor::kFfnPostNormInput;
  static constexpr auto kOutputGradient = QuantizedTensor::kDownGradient;

  static void add_parameters(ParameterList& list, const ModelConfig& model, const std::string& prefix,
                             double depth);

  // Names of buffers begin with `buffers`.
  Swiglu(const ModelConfig& model, const PrecisionConfig& precision, const ParameterTable& table, int64_t block,
         const std::string& prefix, std::string buffers = {});

  void declare(BufferScope& scope);
  bool reads_input_again() const { return up_gate_layer_.reads_input_again(); }
  bool reads_fp8() const { return up_gate_layer_.is_fp8(); }
  bool reads_fp8_forward() const { return up_gate_layer_.is_fp8_forward(); }
  bool reads_fp8_gradient() const { return down_layer_.is_fp8(); }
  void forward(const StepContext& step, const ScaledView& x, const TensorView& out) const;
  void backward(const StepContext& step, const GemmInput& d_out, const InputAgain& x, const TensorView& d_x) const;

 private:
  bool is_beside_experts() const { return !buffers_.empty(); }

  int64_t block_;
  std::string buffers_;
  int64_t d_ffn_;
  GateActivation activation_;
  Linear up_gate_layer_, down_layer_;
  bool saves_product_;         // false: backward makes it again
  bool samples_amax_ = false;  // of d_up_gate, see SwigluBackward

  TensorId up_gate_plain_;  // [T, 2f] as the GEMM leaves it; invalid when up_gate_ is that
  MatrixId up_gate_;        // [T, 2f] rows: up, gate
  MatrixId silu_;           // [T, f] with precision.save_silu
  GemmInputIds product_;    // [T, f] input of the down projection
  TensorId d_product_;      // [T, f]
  GemmInputIds d_up_gate_;  // [T, 2f]
};

}  // namespace parka
