#include "kernels/ops/quantize/quantize.h"

#include "kernels/op/define.h"
#include "kernels/op/workspace.h"

namespace parka {
namespace {

void check_output(std::string_view name, const Quantize& a, const ScaledView& t, int64_t rows, int64_t cols) {
  if (t.empty()) return;
  check_matrix("quantize", name, t, rows, cols);
  if (a.scale_given && t.scaling != Scaling::kTensor) {
    throw_internal("quantize: {} is {}: scale_given needs one scale for the whole tensor", name, describe(t));
  }
  // Writing the scale of x would change the meaning of the codes that x keeps.
  const bool overwrites_scale = a.x.scaling == Scaling::kTensor && t.scale.data == a.x.scale.data && !a.scale_given;
  if (overwrites_scale && (t.scaling != Scaling::kTensor || t.data.dtype != a.x.data.dtype)) {
    throw_internal("quantize: {} is {} and has the scale of x, which is {}", name, describe(t), describe(a.x));
  }
}

}  // namespace

void quantize(Device& device, const Quantize& a) {
  const int64_t rows = a.x.num_rows(), cols = a.x.num_cols();
  check_matrix("quantize", "x", a.x, rows, cols);
  check_output("out", a, a.out, rows, cols);
  check_output("out_t", a, a.out_t, cols, rows);
  check_shared_scale("quantize", a.out, a.out_t);
  if (!a.amax.empty()) {
    check_tensor("quantize", "amax", a.amax, {1}, {DType::kF32});
    const bool used = !a.scale_given && (a.out.empty() || a.out.scaling == Scaling::kTensor) &&
                      (a.out_t.empty() || a.out_t.scaling == Scaling::kTensor);
    if (!used) throw_internal("quantize: amax is given, and out or out_t has no tensor-wide scale to make from it");
  }
  if (rows == 0 || cols == 0 || (a.out.empty() && a.out_t.empty())) return;
  PARKA_DISPATCH(quantize, device, a);
}

OpCost cost_of(const Quantize& a) {
  const bool finds_scale = read_twice(a.out, a.out_t) && !a.scale_given && a.amax.empty();
  return moved(all_bytes(a.x, a.out, a.out_t) + (finds_scale ? bytes_of(a.x) : 0.0), a.x.data);
}
int64_t workspace_of(const Quantize& a) {
  const bool has_scale = has_tensor_scale(a.out) || has_tensor_scale(a.out_t);
  return has_scale && !a.scale_given && a.amax.empty() ? cuda::kAmaxWorkspaceBytes : 0;
}

Quantize matrix_of(const QuantizeMatrices& a, int64_t number) {
  const int64_t N = a.scales.numel();
  const auto part = [&](const TensorView& t) {
    return t.empty() ? t : t.rows(number * (t.dim[0] / N), t.dim[0] / N);
  };
  const auto codes = [&](const TensorView& t) {
    return t.empty() ? ScaledView{} : ScaledView(part(t), a.scales.rows(number, 1), Scaling::kTensor);
  };
  const bool moves_codes = a.amax.empty();
  return {.x = moves_codes ? codes(a.x) : part(a.x),
          .out = codes(a.out),
          .out_t = codes(a.out_t),
          .scale_given = moves_codes,
          .amax = part(a.amax)};
}

void quantize_matrices(Device& device, const QuantizeMatrices& a) {
  constexpr std::string_view kOp = "quantize_matrices";
  const int64_t N = a.scales.numel(), rows = a.x.dim[0], cols = a.x.dim[1];
  check_tensor(kOp, "scales", a.scales, {N}, {DType::kF32});
  if (N == 0 || rows % N != 0) throw_internal("{}: x has {} rows of {} matrices", kOp, rows, N);
  const DType format = a.out.empty() ? a.out_t.dtype : a.out.dtype;
  if (a.amax.empty()) {
    check_tensor(kOp, "x", a.x, {rows, cols}, {format});
  } else {
    check_tensor(kOp, "x", a.x, {rows, cols}, {DType::kF32, DType::kBF16});
    check_tensor(kOp, "amax", a.amax, {N}, {DType::kF32});
  }
  if (!a.out.empty()) check_tensor(kOp, "out", a.out, {rows, cols}, {DType::kE4M3, DType::kE5M2});
  if (!a.out_t.empty()) check_tensor(kOp, "out_t", a.out_t, {N * cols, rows / N}, {format});
  if (rows == 0 || cols == 0 || (a.out.empty() && a.out_t.empty())) return;
  PARKA_DISPATCH(quantize_matrices, device, a);
}

OpCost cost_of(const QuantizeMatrices& a) { return moved(all_bytes(a.x, a.out, a.out_t), a.x); }

void amax(Device& device, const Amax& a) {
  const TensorView flat = a.x.reshaped({a.x.numel()});
  const int64_t N = a.result.numel();
  check_tensor("amax", "x", flat, {flat.dim[0]}, {DType::kF32, DType::kBF16});
  check_tensor("amax", "result", a.result, {N}, {DType::kF32});
  if (N != 1 && (a.part <= 0 || a.first < 0 || a.first + flat.dim[0] > N * a.part)) {
    throw_internal("amax: {} elements from {} on of {} parts of {}", flat.dim[0], a.first, N, a.part);
  }
  if (flat.dim[0] == 0) return;
  PARKA_DISPATCH(amax, device, a);
}

OpCost cost_of(const Amax& a) { return moved(bytes_of(a.x), a.x); }

void tensor_scales(Device& device, const TensorScales& a) {
  const int64_t N = a.amax.numel();
  check_tensor("tensor_scales", "amax", a.amax, {N}, {DType::kF32});
  check_tensor("tensor_scales", "scales", a.scales, {N}, {DType::kF32});
  if (a.format != DType::kE4M3 && a.format != DType::kE5M2) {
    throw_internal("tensor_scales: format is {}, wanted e4m3 or e5m2", name_of(a.format));
  }
  if (N == 0) return;
  PARKA_DISPATCH(tensor_scales, device, a);
}

OpCost cost_of(const TensorScales& a) { return moved(all_bytes(a.amax, a.scales), a.amax); }

}  // namespace parka
