#include "model/layers/linear.h"

#include "kernels/ops/bias.h"
#include "kernels/ops/dropout.h"
#include "kernels/ops/gemm.h"
#include "kernels/ops/quantize.h"
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
              table.all[static_cast<size_t>(weight_)].is_of_block()),
      fast_forward_(precision.fast_forward),
      fast_input_gradient_(precision.fast_input_gradient),
      fast_weight_gradient_(precision.fast_weight_gradient),
      lora_scale_(table.lora_scale),
      dropout_(table.lora_dropout),
      dropout_seed_(table.dropout_seed) {
  PARKA_REQUIRE(weight_ >= 0);
  rows_ = table.all[static_cast<size_t>(weight_)].rows;
  cols_ = table.all[static_cast<size_t>(weight_)].cols;
  for (const LoraAdapter& adapter : table.adapters) {
    if (adapter.layer != name) continue;
    adapters_.push_back({adapter.in, adapter.out, adapter.first_row, adapter.rows, adapter.target, {}, {}});
    rank_ = table.all[static_cast<size_t>(adapter.in)].rows;
  }
}

void Linear::declare(BufferScope& scope, const std::string& name, PhaseMask forward, PhaseMask backward) {
  if (adapters_.empty()) return;
  const int64_t T = scope.tokens();
  const PhaseMask phases = forward | (scope.has_backward() ? backward : PhaseMask{0});
  for (Adapter& adapter : adapters_) {
    adapter.inner = scope.kept(adapter.target + ".lora_inner", scope.compute(), {T, rank_});
    if (!scope.has_backward()) continue;
    adapter.d_inner = scope.workspace(adapter.target + ".d_lora_inner", scope.compute(), {T, rank_}, backward);
  }
  if (dropout_ > 0 && scope.has_backward()) {
    dropped_ = scope.workspace(name + ".dropped", scope.compute(), {T, cols_}, phases);
  }
  if (!is_fp8_) return;
  decoded_input_ = scope.workspace(name + ".decoded", scope.compute(), {T, cols_}, phases);
  if (!scope.has_backward()) return;
  decoded_gradient_ = scope.workspace(name + ".decoded_gradient", scope.compute(), {T, rows_}, backward);
}

void Linear::forward(const StepContext& step, const ScaledView& x, const TensorView& out) const {
  gemm(step.device, {.a = x,
                     .b = is_fp8_ ? step.weights.quantized(step.device, weight_)
                                  : ScaledView(step.weights.operand(step.device, weight_)),
                     .out = out,
                     .fast_accumulation = fast_forward_});
  if (bias_ >= 0) bias_forward(step.device, {.bias = step.weights.plain(bias_), .x = out});
  if (!adapters_.empty()) add_adapters(step, x, out);
}

void Linear::input_gradient(const StepContext& step, const GemmInput& d_out, const TensorView& d_x) const {
  if (is_fp8_) {
    gemm(step.device, {.a = d_out.row,
                       .b = step.weights.transposed(step.device, weight_),
                       .out = d_x,
                       .fast_accumulation = fast_input_gradient_});
  } else {
    gemm(step.device,
         {.a = d_out.row, .b = step.weights.operand(step.device, weight_), .b_transposed = true, .out = d_x});
  }
  if (!adapters_.empty()) adapters_input_gradient(step, d_out.row, d_x);
}

void Linear::weight_gradient(const StepContext& step, const GemmInput& d_out, const GemmInput& x) const {
  if (!adapters_.empty()) adapter_gradients(step, d_out.row, x);
  if (!trains_weight_) return;
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

TensorView Linear::columns(const TensorView& out, const Adapter& adapter) const {
  TensorView part = out;
  part.data = static_cast<std::byte*>(out.data) + adapter.first_row * size_of(out.dtype);
  return part;
}

TensorView Linear::inner(const StepContext& step, TensorId id) const {
  return step.tensor(id, step.num_tokens(), rank_);
}

TensorView Linear::decoded(const StepContext& step, const ScaledView& x, TensorId buffer) const {
  if (x.scaling == Scaling::kNone) return x.data;
  const TensorView out = step.tensor(buffer, x.num_rows(), x.num_cols());
  quantize(step.device, {.x = x, .out = out});
  return out;
}

void Linear::add_adapters(const StepContext& step, const ScaledView& x, const TensorView& out) const {
  const TensorView input = decoded(step, x, decoded_input_);
  for (const Adapter& adapter : adapters_) {
    const TensorView t = inner(step, adapter.inner);
    gemm(step.device,
         {.a = dropped(step, adapter, input, /*transposed=*/false), .b = step.weights.plain(adapter.in), .out = t});
    gemm(step.device, {.a = t,
                       .b = step.weights.plain(adapter.out),
                       .out = columns(out, adapter),
                       .accumulate = true,
                       .factor = lora_scale_,
                       .out_padding = padding(adapter)});
  }
}

void Linear::adapters_input_gradient(const StepContext& step, const ScaledView& d_out,
                                     const TensorView& d_x) const {
  const TensorView gradient = decoded(step, d_out, decoded_gradient_);
  for (const Adapter& adapter : adapters_) {
    const TensorView d_inner = inner(step, adapter.d_inner);
    gemm(step.device, {.a = columns(gradient, adapter),
                       .b = step.weights.plain(adapter.out),
                       .b_transposed = true,
                       .out = d_inner,
                       .a_padding = padding(adapter)});
    const bool drops = !step.dropout_position.empty();
    const TensorView d_input = drops ? step.tensor(dropped_, step.num_tokens(), cols_) : d_x;
    gemm(step.device, {.a = d_inner,
                       .b = step.weights.plain(adapter.in),
                       .b_transposed = true,
                       .out = d_input,
                       .accumulate = !drops,
                       .factor = lora_scale_});
    if (drops) drop(step, adapter, d_input, d_x, /*accumulate=*/true, /*transposed=*/false);
  }
}

TensorView Linear::dropped(const StepContext& step, const Adapter& adapter, const TensorView& x,
                           bool transposed) const {
  if (step.dropout_position.empty()) return x;
  const TensorView out = step.tensor(dropped_, x.dim[0], x.dim[1]);
  drop(step, adapter, x, out, /*accumulate=*/false, transposed);
  return out;
}

void Linear::drop(const StepContext& step, const Adapter& adapter, const TensorView& x, const TensorView& y,
                  bool accumulate, bool transposed) const {
  dropout(step.device, {.x = x,
                        .y = y,
                        .position = step.dropout_position,
                        .sequence_length = step.shape.sequence_length,
                        .probability = dropout_,
                        .seed = dropout_seed_,
                        .stream = static_cast<uint32_t>(adapter.in),
                        .accumulate = accumulate,
                        .transposed = transposed});
}

// input_gradient() has left the decoded gradient and d_inner.
void Linear::adapter_gradients(const StepContext& step, const ScaledView& d_out, const GemmInput& x) const {
  const bool is_row = !x.row.empty() && x.row.scaling == Scaling::kNone;
  const TensorView input = is_row ? x.row.data : decoded(step, x.transposed, decoded_input_);
  const TensorView gradient =
      d_out.scaling == Scaling::kNone ? d_out.data : step.tensor(decoded_gradient_, step.num_tokens(), rows_);
  for (const Adapter& adapter : adapters_) {
    gemm(step.device, {.a = columns(gradient, adapter),
                       .b = inner(step, adapter.inner),
                       .a_transposed = true,
                       .b_transposed = true,
                       .out = step.gradient(adapter.out),
                       .accumulate = step.adds_to_gradients(),
                       .factor = lora_scale_,
                       .a_padding = padding(adapter)});
    gemm(step.device, {.a = inner(step, adapter.d_inner),
                       .b = dropped(step, adapter, input, /*transposed=*/!is_row),
                       .a_transposed = true,
                       .b_transposed = is_row,
                       .out = step.gradient(adapter.in),
                       .accumulate = step.adds_to_gradients(),
                       .factor = lora_scale_});
  }
}

void Linear::sample_weight(const StepContext& step, int64_t block, QuantizedTensor which) const {
  if (!step.samples.active() || !is_fp8_) return;
  step.samples.add_whole(step.device, block, which, step.weights.operand(step.device, weight_),
                         step.weights.quantized(step.device, weight_));
}

}  // namespace parka
