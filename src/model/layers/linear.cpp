#include "model/layers/linear.h"

#include "kernels/ops/gemm.h"
#include "model/step_context.h"

namespace parka {

void Linear::add_parameter(ParameterList& list, const std::string& name, int64_t rows, int64_t cols, double std) {
  list.add(name, rows, cols, ParameterRole::kLinear, /*decayed=*/true, std);
}

Linear::Linear(const PrecisionConfig& precision, const ParameterTable& table, const std::string& name)
    : weight_(table.index_of(name)),
      is_fp8_(precision.gemm != GemmPrecision::kCompute),
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

void Linear::sample_weight(const StepContext& step, int64_t block, QuantizedTensor which) const {
  if (!step.samples.active() || !is_fp8_) return;
  step.samples.add_whole(step.device, block, which, step.weights.plain(weight_),
                         step.weights.quantized(step.device, weight_));
}

}  // namespace parka
