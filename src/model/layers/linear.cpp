#include "model/layers/linear.h"

#include "kernels/ops/bias.h"
#include "kernels/ops/gemm.h"
#include "model/step_context.h"

namespace parka {

void Linear::add_parameter(ParameterList& list, const std::string& name, int64_t rows, int64_t cols, double std,
                           ParameterRole role) {
  list.add(name, rows, cols, role, /*decayed=*/true, std);
}

void Linear::add_bias(ParameterList& list, const std::string& name, int64_t rows) {
  list.add(name + "_bias", rows, 1, ParameterRole::kBias, /*decayed=*/false, 0.0);
}

Linear::Linear(const PrecisionConfig& precision, const ParameterTable& table, const std::string& name)
    : weight_(table.index_of(name)),
      bias_(table.index_of(name + "_bias")),
      trains_weight_(table.is_trainable(weight_)),
      trains_bias_(table.is_trainable(bias_)),
      is_fp8_(precision.gemm != GemmPrecision::kCompute && weight_ >= 0 &&
              table.all[static_cast<size_t>(weight_)].role == ParameterRole::kLinear),
      fast_forward_(precision.fast_forward),
      fast_input_gradient_(precision.fast_input_gradient),
      fast_weight_gradient_(precision.fast_weight_gradient) {
  PARKA_REQUIRE(weight_ >= 0);
}

void Linear::forward(const StepContext& step, const ScaledView& x, const TensorView& out) const {
  gemm(step.device,
       {.a = x,
        .b = is_fp8_ ? step.weights.quantized(step.device, weight_) : ScaledView(step.weights.plain(weight_)),
        .out = out,
        .fast_accumulation = fast_forward_});
  if (bias_ >= 0) bias_forward(step.device, {.bias = step.weights.plain(bias_), .x = out});
}

void Linear::input_gradient(const StepContext& step, const GemmInput& d_out, const TensorView& d_x) const {
  if (is_fp8_) {
    gemm(step.device, {.a = d_out.row,
                       .b = step.weights.transposed(step.device, weight_),
                       .out = d_x,
                       .fast_accumulation = fast_input_gradient_});
  } else {
    gemm(step.device, {.a = d_out.row, .b = step.weights.plain(weight_), .b_transposed = true, .out = d_x});
  }
}

void Linear::weight_gradient(const StepContext& step, const GemmInput& d_out, const GemmInput& x) const {
  if (is_fp8_) {
    gemm(step.device, {.a = d_out.transposed,
                       .b = x.transposed,
                       .out = step.gradient(weight_),
                       .accumulate = step.adds_to_gradients(),
                       .fast_accumulation = fast_weight_gradient_});
  } else {
    gemm(step.device, {.a = d_out.row,
                       .b = x.row,
                       .a_transposed = true,
                       .b_transposed = true,
                       .out = step.gradient(weight_),
                       .accumulate = step.adds_to_gradients()});
  }
}

void Linear::bias_gradient(const StepContext& step, const TensorView& d_out) const {
  if (!trains_bias_) return;
  bias_backward(step.device, {.d_y = d_out, .d_bias = step.gradient_to_add_to(bias_)});
}

void Linear::sample_weight(const StepContext& step, int64_t block, QuantizedTensor which) const {
  if (!step.samples.active() || !is_fp8_) return;
  step.samples.add_whole(step.device, block, which, step.weights.plain(weight_),
                         step.weights.quantized(step.device, weight_));
}

}  // namespace parka
