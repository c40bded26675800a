#include "kernels/ops/norm/norm.h"

#include "kernels/op/define.h"
#include "kernels/op/workspace.h"

namespace parka {
namespace {

constexpr DType kF32 = DType::kF32, kBF16 = DType::kBF16;

// A tensor that one kind of norm has and the other has not.
void check_kind(std::string_view op, std::string_view name, const TensorView& t, bool wanted, int64_t extent,
                std::initializer_list<DType> dtypes) {
  if (wanted) {
    check_tensor(op, name, t, {extent}, dtypes);
  } else if (!t.empty()) {
    throw_internal("{}: {} is {}, but this kind of norm has none", op, name, describe(t));
  }
}

void check_bias(std::string_view op, std::string_view name, NormKind kind, const TensorView& t, int64_t extent,
                std::initializer_list<DType> dtypes) {
  if (!t.empty()) check_kind(op, name, t, kind == NormKind::kAffineLayerNorm, extent, dtypes);
}

void check_statistics(std::string_view op, NormKind kind, const TensorView& mean, const TensorView& rstd,
                      int64_t rows) {
  check_kind(op, "mean", mean, has_mean(kind), rows, {kF32});
  check_kind(op, "rstd", rstd, kind != NormKind::kNone, rows, {kF32});
}

void check_float8(std::string_view op, std::string_view name, const ScaledView& t, int64_t rows, int64_t cols) {
  if (t.empty()) return;
  check_matrix(op, name, t, rows, cols);
  if (t.scaling == Scaling::kNone) throw_internal("{}: {} is {}, wanted fp8", op, name, describe(t));
}

}  // namespace

void norm_forward(Device& device, const NormForward& a) {
  constexpr std::string_view kOp = "norm_forward";
  const int64_t rows = a.residual.dim[0], cols = a.residual.dim[1];
  const DType dtype = a.residual.dtype;
  check_tensor(kOp, "residual", a.residual, {rows, cols}, {kF32, kBF16});
  if (!a.branch.empty()) check_tensor(kOp, "branch", a.branch, {rows, cols}, {dtype});
  check_kind(kOp, "weight", a.weight, has_weight(a.kind), cols, {dtype});
  check_bias(kOp, "bias", a.kind, a.bias, cols, {dtype});
  check_tensor(kOp, "residual_out", a.residual_out, {rows, cols}, {dtype});
  if (a.kind == NormKind::kNone && !a.x.empty()) {
    throw_internal("{}: x is {}, but this kind of norm reads the sum", kOp, describe(a.x));
  }
  check_float8(kOp, "x", a.x, rows, cols);
  if (!a.x.empty() && a.x.scaling != Scaling::kGroup) {
    throw_internal("{}: x is {}, wanted one scale per group of a row", kOp, describe(a.x));
  }
  check_matrix(kOp, "y", a.y, rows, cols);
  check_float8(kOp, "y_t", a.y_t, cols, rows);
  check_shared_scale(kOp, a.y, a.y_t);
  check_statistics(kOp, a.kind, a.mean, a.rstd, rows);
  if (rows == 0 || cols == 0) return;
  PARKA_DISPATCH(norm_forward, device, a);
}

void norm_recompute(Device& device, const NormRecompute& a) {
  constexpr std::string_view kOp = "norm_recompute";
  const int64_t rows = a.x.num_rows(), cols = a.x.num_cols();
  check_matrix(kOp, "x", a.x, rows, cols);
  check_kind(kOp, "weight", a.weight, has_weight(a.kind), cols, {kF32, kBF16});
  check_bias(kOp, "bias", a.kind, a.bias, cols, {a.weight.dtype});
  check_statistics(kOp, a.kind, a.mean, a.rstd, rows);
  if (!a.y.empty()) check_matrix(kOp, "y", a.y, rows, cols);
  if (!a.y_t.empty()) check_matrix(kOp, "y_t", a.y_t, cols, rows);
  check_shared_scale(kOp, a.y, a.y_t);
  if (rows == 0 || cols == 0 || (a.y.empty() && a.y_t.empty())) return;
  PARKA_DISPATCH(norm_recompute, device, a);
}

void norm_backward(Device& device, const NormBackward& a) {
  constexpr std::string_view kOp = "norm_backward";
  const TensorView& shape = a.kind == NormKind::kNone ? a.d_y : a.x.data;
  const int64_t rows = shape.dim[0], cols = shape.dim[1];
  if (a.kind != NormKind::kNone) {
    check_matrix(kOp, "x", a.x, rows, cols);
  } else if (!a.x.empty()) {
    throw_internal("{}: x is {}, but this kind of norm has no use for it", kOp, describe(a.x));
  }
  check_kind(kOp, "weight", a.weight, has_weight(a.kind), cols, {kF32, kBF16});
  check_statistics(kOp, a.kind, a.mean, a.rstd, rows);
  check_tensor(kOp, "d_y", a.d_y, {rows, cols}, {kF32, kBF16});
  if (!a.d_residual.empty()) check_tensor(kOp, "d_residual", a.d_residual, {rows, cols}, {a.d_y.dtype});
  check_tensor(kOp, "d_residual_out", a.d_residual_out, {rows, cols}, {a.d_y.dtype});
  check_float8(kOp, "d_quantized", a.d_quantized, rows, cols);
  check_float8(kOp, "d_quantized_t", a.d_quantized_t, cols, rows);
  check_shared_scale(kOp, a.d_quantized, a.d_quantized_t);
  check_kind(kOp, "d_weight", a.d_weight, has_weight(a.kind) && !a.d_weight.empty(), cols, {kF32, kBF16});
  check_bias(kOp, "d_bias", a.kind, a.d_bias, cols, {kF32, kBF16});
  if (rows == 0 || cols == 0) return;
  PARKA_DISPATCH(norm_backward, device, a);
}

OpCost cost_of(const NormForward& a) {
  const bool adds = !a.branch.empty() || a.residual_out.data != a.residual.data;
  const bool is_sum = a.y.data.data == a.residual_out.data;  // kNone
  const double again = a.x.empty() ? bytes_of(a.residual_out) : bytes_of(a.x);
  return moved(all_bytes(a.residual, a.branch, a.weight, a.bias, a.x, a.y_t, a.mean, a.rstd) +
                   (is_sum ? 0.0 : bytes_of(a.y)) + (adds ? bytes_of(a.residual_out) : 0.0) +
                   (read_twice(a.y) ? again : 0.0),
               a.residual);
}
int64_t workspace_of(const NormForward& a) {
  return has_tensor_scale(a.y) || has_tensor_scale(a.y_t) ? cuda::kAmaxWorkspaceBytes : 0;
}

OpCost cost_of(const NormRecompute& a) {
  return moved(all_bytes(a.x, a.weight, a.bias, a.mean, a.rstd, a.y, a.y_t), a.x.data);
}

OpCost cost_of(const NormBackward& a) {
  return moved(all_bytes(a.x, a.weight, a.mean, a.rstd, a.d_y, a.d_residual, a.d_residual_out, a.d_quantized,
                         a.d_quantized_t) +
                   2 * all_bytes(a.d_weight, a.d_bias) +
                   (read_twice(a.d_quantized, a.d_quantized_t) ? bytes_of(a.d_residual_out) : 0.0),
               a.d_y);
}
int64_t workspace_of(const NormBackward& a) {
  const bool finds_amax = has_tensor_scale(a.d_quantized) || has_tensor_scale(a.d_quantized_t);
  if (!has_weight(a.kind) && !finds_amax) return 0;
  const int64_t sums = a.kind == NormKind::kAffineLayerNorm ? 2 : 1;
  return sums * cuda::norm_backward_workspace_bytes(a.d_y.dim[1]);
}

}  // namespace parka
