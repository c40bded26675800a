#include "model/layers/linear.h"

#include <cstddef>
#include <optional>

#include "kernels/ops/elementwise/pointwise.h"
#include "kernels/ops/quantize/quantize.h"
#include "model/step_context.h"

namespace parka {
namespace {

// Matrices of as many columns as one, if they lie one after the other in memory.
std::optional<TensorView> in_one_piece(const std::vector<TensorView>& parts) {
  TensorView whole = parts[0];
  for (size_t i = 1; i < parts.size(); ++i) {
    if (parts[i].data != static_cast<std::byte*>(whole.data) + whole.bytes()) return std::nullopt;
    whole.dim[0] += parts[i].dim[0];
  }
  return whole;
}

}  // namespace

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
      lora_scale_(table.lora_scale),
      dropout_(table.lora_dropout),
      dropout_seed_(table.dropout_seed) {
  PARKA_REQUIRE(weight_ >= 0);
  rows_ = table.all[static_cast<size_t>(weight_)].rows;
  cols_ = table.all[static_cast<size_t>(weight_)].cols;
  for (const LoraAdapter& adapter : table.adapters) {
    if (adapter.layer != name) continue;
    rank_ = table.all[static_cast<size_t>(adapter.in)].rows;
    adapters_.push_back({adapter.in, adapter.out, adapter.first_row, adapter.rows, inner_width()});
  }
}

void Linear::declare(BufferScope& scope, const std::string& name, PhaseMask forward, PhaseMask backward) {
  if (adapters_.empty()) return;
  const int64_t T = scope.tokens();
  const PhaseMask phases = forward | (scope.has_backward() ? backward : PhaseMask{0});
  inner_ = scope.kept(name + ".lora_inner", scope.compute(), {T, inner_width()});
  if (scope.has_backward()) {
    d_inner_ = scope.workspace(name + ".d_lora_inner", scope.compute(), {T, inner_width()}, backward);
  }
  if (adapters_.size() > 1) {
    stacked_ = scope.workspace(name + ".lora_A", scope.compute(), {inner_width(), cols_}, phases);
    if (scope.has_backward()) {  // large enough for any format of gradients
      stacked_gradient_ = scope.workspace(name + ".d_lora_A", DType::kF32, {inner_width(), cols_}, backward);
    }
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
  if (!adapters_.empty()) inner_products(step, x);
  const bool adapters_first = adapters_fill_output();
  if (adapters_first) outer_products(step, out, /*accumulate=*/false);
  Gemm own = product(step, x, out);
  own.accumulate = adapters_first;
  gemm(step.device, own);
  if (bias_ >= 0) bias_forward(step.device, {.bias = step.weights.plain(bias_), .x = out});
  if (!adapters_first) outer_products(step, out, /*accumulate=*/true);
}

Gemm Linear::product(const StepContext& step, const ScaledView& x, const TensorView& out) const {
  return {.a = x,
          .b = is_fp8_ ? step.weights.quantized(step.device, weight_)
                       : ScaledView(step.weights.operand(step.device, weight_)),
          .out = out,
          .fast_accumulation = true};
}

void Linear::input_gradient(const StepContext& step, const GemmInput& d_out, const TensorView& d_x) const {
  if (!adapters_.empty()) inner_gradients(step, d_out.row);
  const bool adapters_first = !adapters_.empty() && step.dropout_position.empty();
  if (adapters_first) {
    gemm(step.device, {.a = inner(step, d_inner_),
                       .b = stacked_in(step),
                       .b_transposed = true,
                       .out = d_x,
                       .factor = lora_scale_});
  }
  if (is_fp8_) {
    gemm(step.device, {.a = d_out.row,
                       .b = step.weights.transposed(step.device, weight_),
                       .out = d_x,
                       .accumulate = adapters_first,
                       .fast_accumulation = true});
  } else {
    gemm(step.device, {.a = d_out.row,
                       .b = step.weights.operand(step.device, weight_),
                       .b_transposed = true,
                       .out = d_x,
                       .accumulate = adapters_first});
  }
  if (!adapters_first) add_dropped_gradients(step, d_x);
}

void Linear::weight_gradient(const StepContext& step, const GemmInput& d_out, const GemmInput& x) const {
  if (!adapters_.empty()) adapter_gradients(step, d_out.row, x);
  if (!trains_weight_) return;
  if (is_fp8_) {
    gemm(step.device, {.a = d_out.transposed,
                       .b = x.transposed,
                       .out = step.gradient(weight_),
                       .accumulate = step.adds_to_gradients()});
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
  return step.tensor(id, step.num_tokens(), inner_width());
}

TensorView Linear::inner(const StepContext& step, TensorId id, const Adapter& adapter) const {
  TensorView part = inner(step, id);
  part.data = static_cast<std::byte*>(part.data) + adapter.first_inner * size_of(part.dtype);
  return part;
}

TensorView Linear::decoded(const StepContext& step, const ScaledView& x, TensorId buffer) const {
  if (x.scaling == Scaling::kNone) return x.data;
  const TensorView out = step.tensor(buffer, x.num_rows(), x.num_cols());
  quantize(step.device, {.x = x, .out = out});
  return out;
}

TensorView Linear::stacked_in(const StepContext& step) const {
  std::vector<TensorView> parts;
  for (const Adapter& adapter : adapters_) parts.push_back(step.weights.plain(adapter.in));
  const std::optional<TensorView> stack = in_one_piece(parts);
  if (stack) return *stack;
  const TensorView copy = step.tensor(stacked_, inner_width(), cols_);
  for (size_t i = 0; i < parts.size(); ++i) {
    step.device.copy(copy.rows(adapters_[i].first_inner, rank_).data, parts[i].data, parts[i].bytes());
  }
  return copy;
}

void Linear::inner_products(const StepContext& step, const ScaledView& x) const {
  const TensorView input = decoded(step, x, decoded_input_);
  if (step.dropout_position.empty()) {
    gemm(step.device, {.a = input, .b = stacked_in(step), .out = inner(step, inner_)});
    return;
  }
  for (const Adapter& adapter : adapters_) {
    gemm(step.device, {.a = dropped(step, adapter, input, /*transposed=*/false),
                       .b = step.weights.plain(adapter.in),
                       .out = inner(step, inner_, adapter),
                       .out_padding = inner_padding()});
  }
}

bool Linear::adapters_fill_output() const {
  int64_t rows = 0;
  for (const Adapter& adapter : adapters_) rows += adapter.rows;
  return rows == rows_;
}

void Linear::outer_products(const StepContext& step, const TensorView& out, bool accumulate) const {
  for (const Adapter& adapter : adapters_) {
    gemm(step.device, {.a = inner(step, inner_, adapter),
                       .b = step.weights.plain(adapter.out),
                       .out = columns(out, adapter),
                       .accumulate = accumulate,
                       .factor = lora_scale_,
                       .a_padding = inner_padding(),
                       .out_padding = padding(adapter)});
  }
}

void Linear::inner_gradients(const StepContext& step, const ScaledView& d_out) const {
  const TensorView gradient = decoded(step, d_out, decoded_gradient_);
  for (const Adapter& adapter : adapters_) {
    gemm(step.device, {.a = columns(gradient, adapter),
                       .b = step.weights.plain(adapter.out),
                       .b_transposed = true,
                       .out = inner(step, d_inner_, adapter),
                       .a_padding = padding(adapter),
                       .out_padding = inner_padding()});
  }
}

void Linear::add_dropped_gradients(const StepContext& step, const TensorView& d_x) const {
  for (const Adapter& adapter : adapters_) {
    const TensorView d_input = step.tensor(dropped_, step.num_tokens(), cols_);
    gemm(step.device, {.a = inner(step, d_inner_, adapter),
                       .b = step.weights.plain(adapter.in),
                       .b_transposed = true,
                       .out = d_input,
                       .factor = lora_scale_,
                       .a_padding = inner_padding()});
    drop(step, adapter, d_input, d_x, /*accumulate=*/true, /*transposed=*/false);
  }
}

TensorView Linear::dropped(const StepContext& step, const Adapter& adapter, const TensorView& x,
                           bool transposed) const {
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
  const bool drops = !step.dropout_position.empty();
  for (const Adapter& adapter : adapters_) {
    gemm(step.device, {.a = columns(gradient, adapter),
                       .b = inner(step, inner_, adapter),
                       .a_transposed = true,
                       .b_transposed = true,
                       .out = step.gradient(adapter.out),
                       .accumulate = step.adds_to_gradients(),
                       .factor = lora_scale_,
                       .a_padding = padding(adapter),
                       .b_padding = inner_padding()});
    if (!drops) continue;
    gemm(step.device, {.a = inner(step, d_inner_, adapter),
                       .b = dropped(step, adapter, input, /*transposed=*/!is_row),
                       .a_transposed = true,
                       .b_transposed = is_row,
                       .out = step.gradient(adapter.in),
                       .accumulate = step.adds_to_gradients(),
                       .factor = lora_scale_,
                       .a_padding = inner_padding()});
  }
  if (!drops) in_gradients(step, input, is_row);
}

void Linear::in_gradients(const StepContext& step, const TensorView& input, bool is_row) const {
  std::vector<TensorView> parts;
  for (const Adapter& adapter : adapters_) parts.push_back(step.gradient(adapter.in));
  const std::optional<TensorView> stack = in_one_piece(parts);
  const TensorView out =
      stack ? *stack : TensorView(step.arena[stacked_gradient_].data, parts[0].dtype, {inner_width(), cols_});
  const auto of_adapter = [&](size_t i) { return out.rows(adapters_[i].first_inner, rank_); };
  if (!stack && step.adds_to_gradients()) {
    for (size_t i = 0; i < parts.size(); ++i) step.device.copy(of_adapter(i).data, parts[i].data, parts[i].bytes());
  }
  gemm(step.device, {.a = inner(step, d_inner_),
                     .b = input,
                     .a_transposed = true,
                     .b_transposed = is_row,
                     .out = out,
                     .accumulate = step.adds_to_gradients(),
                     .factor = lora_scale_});
  if (stack) return;
  for (size_t i = 0; i < parts.size(); ++i) step.device.copy(parts[i].data, of_adapter(i).data, parts[i].bytes());
}

}  // namespace parka
