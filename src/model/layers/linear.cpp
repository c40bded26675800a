#include "model/layers/linear.h"

#include <fmt/format.h>

#include "kernels/ops/elementwise/pointwise.h"
#include "kernels/ops/gemm/int8.h"
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
      trains_bias_(table.is_trainable(bias_)) {
  PARKA_REQUIRE(weight_ >= 0);
  const ParameterInfo& weight = table.all[static_cast<size_t>(weight_)];
  is_fp8_ = precision.gemm != GemmPrecision::kCompute && weight.is_of_block() && weight.quantized;
  is_fp8_forward_ = is_fp8_ && weight.quantized_forward;
  is_int8_forward_ = is_fp8_ && weight.int8_forward;
  cols_ = weight.cols;
  adapters_ = Adapters(table, name, is_fp8_);
}

void Linear::declare(BufferScope& scope, const std::string& name, PhaseMask forward, PhaseMask backward) {
  adapters_.declare(scope, name, forward, backward);
  if (!is_int8_forward_) return;
  // Layers of one width take turns.
  codes_ = scope.workspace(fmt::format("int8_input_{}", cols_), int8_rows(cols_), scope.tokens(), cols_, forward);
}

void Linear::forward(const StepContext& step, const ScaledView& x, const TensorView& out) const {
  if (out.empty()) return adapters_.forward_again(step, x);
  const bool accumulate = adapters_.before_product(step, x, out);
  if (is_int8_forward_) {
    const ScaledView codes = step.matrix(codes_, x.num_rows(), cols_);
    quantize_int8(step.device, {.x = x.data, .out = codes});
    gemm_int8(
        step.device,
        {.a = codes, .b = step.weights.int8_rows(step.device, weight_), .out = out, .accumulate = accumulate});
  } else {
    Gemm own = product(step, x, out);
    own.accumulate = accumulate;
    gemm(step.device, own);
  }
  if (bias_ >= 0) bias_forward(step.device, {.bias = step.weights.plain(bias_), .x = out});
  adapters_.after_product(step, out);
}

Gemm Linear::product(const StepContext& step, const ScaledView& x, const TensorView& out) const {
  return {.a = x,
          .b = is_fp8_forward_ ? step.weights.quantized(step.device, weight_)
                               : ScaledView(step.weights.operand(step.device, weight_)),
          .out = out,
          .fast_accumulation = true};
}

void Linear::input_gradient(const StepContext& step, const GemmInput& d_out, const TensorView& d_x) const {
  const bool accumulate = adapters_.before_input_gradient(step, d_out.row, d_x);
  gemm(step.device, {.a = d_out.row,
                     .b = is_fp8_ ? step.weights.transposed(step.device, weight_)
                                  : ScaledView(step.weights.operand(step.device, weight_)),
                     .b_transposed = !is_fp8_,
                     .out = d_x,
                     .accumulate = accumulate,
                     .fast_accumulation = is_fp8_});
  adapters_.after_input_gradient(step, d_x);
}

void Linear::weight_gradient(const StepContext& step, const GemmInput& d_out, const GemmInput& x) const {
  adapters_.weight_gradients(step, d_out.row, x);
  if (!trains_weight_) return;
  gemm(step.device, {.a = is_fp8_ ? d_out.transposed : d_out.row,
                     .b = is_fp8_ ? x.transposed : x.row,
                     .a_transposed = !is_fp8_,
                     .b_transposed = !is_fp8_,
                     .out = step.gradient(weight_),
                     .accumulate = step.adds_to_gradients()});
}

void Linear::bias_gradient(const StepContext& step, const TensorView& d_out) const {
  if (!trains_bias_) return;
  bias_backward(step.device, {.d_y = d_out, .d_bias = step.gradient_to_add_to(bias_)});
}

}  // namespace parka
