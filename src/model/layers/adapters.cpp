#include "model/layers/adapters.h"

#include <algorithm>
#include <cstddef>

#include "kernels/ops/elementwise/pointwise.h"
#include "kernels/ops/gemm/gemm.h"
#include "kernels/ops/quantize/quantize.h"
#include "model/layers/linear.h"
#include "model/step_context.h"

namespace parka {

TensorView from_column(TensorView matrix, int64_t first) {
  matrix.data = static_cast<std::byte*>(matrix.data) + first * size_of(matrix.dtype);
  return matrix;
}

Adapters::Adapters(const ParameterTable& table, const std::string& layer, bool reads_fp8)
    : rules_(table.lora), reads_fp8_(reads_fp8) {
  const ParameterInfo& weight = table.all[static_cast<size_t>(table.index_of(layer))];
  rows_ = bare_rows_ = weight.rows;
  cols_ = weight.cols;
  for (const LoraAdapter& adapter : table.adapters) {
    if (adapter.layer != layer) continue;
    adapters_.push_back({adapter, inner_width()});
    bare_rows_ -= adapter.rows;
  }
}

void Adapters::declare(BufferScope& scope, const std::string& name, PhaseMask forward, PhaseMask backward) {
  if (empty()) return;
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
  if (rules_.dropout > 0 && scope.has_backward()) {
    dropped_ = scope.workspace(name + ".dropped", scope.compute(), {T, cols_}, phases);
  }
  if (!reads_fp8_) return;
  decoded_input_ = scope.workspace(name + ".decoded", scope.compute(), {T, cols_}, phases);
  if (!scope.has_backward()) return;
  decoded_gradient_ = scope.workspace(name + ".decoded_gradient", scope.compute(), {T, rows_}, backward);
}

void Adapters::forward_again(const StepContext& step, const ScaledView& x) const {
  if (empty()) return;
  const TensorView input = decoded(step, x, decoded_input_);
  if (step.dropout_position.empty()) {
    gemm(step.device, {.a = input, .b = stacked(step, /*gradients=*/false), .out = inner(step, inner_)});
  } else {
    for (const Adapter& adapter : adapters_) {
      gemm(step.device, {.a = dropped(step, adapter, input, /*transposed=*/false),
                         .b = step.weights.plain(adapter.in),
                         .out = inner(step, inner_, adapter.first_inner),
                         .out_padding = inner_padding()});
    }
  }
}

bool Adapters::before_product(const StepContext& step, const ScaledView& x, const TensorView& out) const {
  forward_again(step, x);
  if (empty() || bare_rows_ > 0) return false;
  outer_products(step, out, /*accumulate=*/false);
  return true;
}

void Adapters::after_product(const StepContext& step, const TensorView& out) const {
  if (bare_rows_ > 0) outer_products(step, out, /*accumulate=*/true);
}

void Adapters::outer_products(const StepContext& step, const TensorView& out, bool accumulate) const {
  for (const Adapter& adapter : adapters_) {
    gemm(step.device, {.a = inner(step, inner_, adapter.first_inner),
                       .b = step.weights.plain(adapter.out),
                       .out = from_column(out, adapter.first_row),
                       .accumulate = accumulate,
                       .factor = scale(),
                       .a_padding = inner_padding(),
                       .out_padding = padding(adapter)});
  }
}

bool Adapters::before_input_gradient(const StepContext& step, const ScaledView& d_out,
                                     const TensorView& d_x) const {
  if (empty()) return false;
  const TensorView gradient = decoded(step, d_out, decoded_gradient_);
  for (const Adapter& adapter : adapters_) {
    gemm(step.device, {.a = from_column(gradient, adapter.first_row),
                       .b = step.weights.plain(adapter.out),
                       .b_transposed = true,
                       .out = inner(step, d_inner_, adapter.first_inner),
                       .a_padding = padding(adapter),
                       .out_padding = inner_padding()});
  }
  if (!step.dropout_position.empty()) return false;
  gemm(step.device, {.a = inner(step, d_inner_),
                     .b = stacked(step, /*gradients=*/false),
                     .b_transposed = true,
                     .out = d_x,
                     .factor = scale()});
  return true;
}

void Adapters::after_input_gradient(const StepContext& step, const TensorView& d_x) const {
  if (step.dropout_position.empty()) return;
  for (const Adapter& adapter : adapters_) {
    const TensorView d_input = step.tensor(dropped_, step.num_tokens(), cols_);
    gemm(step.device, {.a = inner(step, d_inner_, adapter.first_inner),
                       .b = step.weights.plain(adapter.in),
                       .b_transposed = true,
                       .out = d_input,
                       .factor = scale(),
                       .a_padding = inner_padding()});
    dropped(step, adapter, d_input, /*transposed=*/false, d_x);
  }
}

void Adapters::weight_gradients(const StepContext& step, const ScaledView& d_out, const GemmInput& x) const {
  if (empty()) return;
  const bool is_row = !x.row.empty() && x.row.scaling == Scaling::kNone;
  const TensorView input = is_row ? x.row.data : decoded(step, x.transposed, decoded_input_);
  const TensorView gradient =
      d_out.scaling == Scaling::kNone ? d_out.data : step.tensor(decoded_gradient_, step.num_tokens(), rows_);
  const bool drops = !step.dropout_position.empty();
  for (const Adapter& adapter : adapters_) {
    gemm(step.device, {.a = from_column(gradient, adapter.first_row),
                       .b = inner(step, inner_, adapter.first_inner),
                       .a_transposed = true,
                       .b_transposed = true,
                       .out = step.gradient(adapter.out),
                       .accumulate = step.adds_to_gradients(),
                       .factor = scale(),
                       .a_padding = padding(adapter),
                       .b_padding = inner_padding()});
    if (!drops) continue;
    gemm(step.device, {.a = inner(step, d_inner_, adapter.first_inner),
                       .b = dropped(step, adapter, input, /*transposed=*/!is_row),
                       .a_transposed = true,
                       .b_transposed = is_row,
                       .out = step.gradient(adapter.in),
                       .accumulate = step.adds_to_gradients(),
                       .factor = scale(),
                       .a_padding = inner_padding()});
  }
  if (drops) return;
  const TensorView d_in = stacked(step, /*gradients=*/true);
  gemm(step.device, {.a = inner(step, d_inner_),
                     .b = input,
                     .a_transposed = true,
                     .b_transposed = is_row,
                     .out = d_in,
                     .accumulate = step.adds_to_gradients(),
                     .factor = scale()});
  for (const Adapter& adapter : adapters_) {
    const TensorView part = d_in.rows(adapter.first_inner, rules_.rank), &own = step.gradient(adapter.in);
    if (own.data != part.data) step.device.copy(own.data, part.data, own.bytes());
  }
}

TensorView Adapters::inner(const StepContext& step, TensorId id, int64_t first) const {
  return from_column(step.tensor(id, step.num_tokens(), inner_width()), first);
}

TensorView Adapters::stacked(const StepContext& step, bool gradients) const {
  const auto own = [&](const Adapter& a) { return gradients ? step.gradient(a.in) : step.weights.plain(a.in); };
  TensorView whole = own(adapters_[0]);
  whole.dim[0] = inner_width();
  const auto part = [&](const Adapter& a) { return whole.rows(a.first_inner, rules_.rank).data; };
  if (std::ranges::all_of(adapters_, [&](const Adapter& a) { return own(a).data == part(a); })) return whole;
  whole.data = step.arena[gradients ? stacked_gradient_ : stacked_].data;
  if (gradients && !step.adds_to_gradients()) return whole;
  for (const Adapter& a : adapters_) step.device.copy(part(a), own(a).data, own(a).bytes());
  return whole;
}

TensorView Adapters::decoded(const StepContext& step, const ScaledView& x, TensorId buffer) const {
  if (x.scaling == Scaling::kNone) return x.data;
  const TensorView out = step.tensor(buffer, x.num_rows(), x.num_cols());
  quantize(step.device, {.x = x, .out = out});
  return out;
}

TensorView Adapters::dropped(const StepContext& step, const Adapter& adapter, const TensorView& x, bool transposed,
                             const TensorView& sum) const {
  const TensorView out = sum.empty() ? step.tensor(dropped_, x.dim[0], x.dim[1]) : sum;
  dropout(step.device, {.x = x,
                        .y = out,
                        .position = step.dropout_position,
                        .sequence_length = step.shape.sequence_length,
                        .probability = rules_.dropout,
                        .seed = rules_.seed,
                        .stream = static_cast<uint32_t>(adapter.in),
                        .accumulate = !sum.empty(),
                        .transposed = transposed});
  return out;
}

}  // namespace parka
