#include "kernels/ops/swiglu/swiglu.h"

#include <algorithm>

#include "kernels/op/define.h"
#include "kernels/op/workspace.h"

namespace parka {
namespace {

void check_up_gate(std::string_view op, const ScaledView& t, int64_t rows, int64_t width) {
  check_matrix(op, "up_gate", t, rows, 2 * width);
  if (t.scaling == Scaling::kTensor || t.scaling == Scaling::kBlock) {
    throw_internal("{}: up_gate is {}, wanted plain numbers or one scale per group of a row", op, describe(t));
  }
  if (t.scaling == Scaling::kGroup && width % t.group != 0) {
    throw_internal("{}: up_gate has groups of {}, which span both halves of {} columns", op, t.group, width);
  }
}

void check_silu(std::string_view op, const ScaledView& t, int64_t rows, int64_t width) {
  if (t.empty()) return;
  check_matrix(op, "silu", t, rows, width);
  if (t.scaling != Scaling::kGroup) {
    throw_internal("{}: silu is {}, wanted fp8 with one scale per group of a row", op, describe(t));
  }
}

void check_samples_amax(std::string_view op, const SwigluBackward& a) {
  if (!a.samples_amax) return;
  for (const ScaledView* t : {&a.d_up_gate, &a.d_up_gate_t}) {
    if (t->empty() || (t->scaling == Scaling::kTensor && t->data.dtype == DType::kE5M2)) continue;
    throw_internal("{}: d_up_gate is {}, and only of e5m2 with one scale is the maximum sampled", op, describe(*t));
  }
}

void check_optional(std::string_view op, std::string_view name, const ScaledView& t, int64_t rows, int64_t cols) {
  if (!t.empty()) check_matrix(op, name, t, rows, cols);
}

void check_row_factor(std::string_view op, const TensorView& t, int64_t rows) {
  if (!t.empty()) check_tensor(op, "row_factor", t, {rows}, {DType::kF32});
}

}  // namespace

void check_swiglu_forward(const SwigluForward& a) {
  constexpr std::string_view kOp = "swiglu_forward";
  const int64_t rows = a.product.num_rows(), width = a.product.num_cols();
  check_matrix(kOp, "product", a.product, rows, width);
  check_optional(kOp, "product_t", a.product_t, width, rows);
  check_shared_scale(kOp, a.product, a.product_t);
  check_up_gate(kOp, a.up_gate, rows, width);
  if (!a.up_gate_plain.empty()) {
    check_tensor(kOp, "up_gate_plain", a.up_gate_plain, {rows, 2 * width}, {DType::kF32, DType::kBF16});
    if (a.up_gate.scaling != Scaling::kGroup) {
      throw_internal("{}: up_gate is {}, and only fp8 is made from up_gate_plain", kOp, describe(a.up_gate));
    }
  }
  check_silu(kOp, a.silu, rows, width);
  check_row_factor(kOp, a.row_factor, rows);
}

void swiglu_forward(Device& device, const SwigluForward& a) {
  check_swiglu_forward(a);
  if (a.product.num_rows() == 0 || a.product.num_cols() == 0) return;
  PARKA_DISPATCH(swiglu_forward, device, a);
}

void swiglu_backward(Device& device, const SwigluBackward& a) {
  constexpr std::string_view kOp = "swiglu_backward";
  const int64_t rows = a.up_gate.num_rows(), width = a.up_gate.num_cols() / 2;
  check_up_gate(kOp, a.up_gate, rows, width);
  check_silu(kOp, a.silu, rows, width);
  check_optional(kOp, "d_up_gate", a.d_up_gate, rows, 2 * width);
  check_optional(kOp, "d_up_gate_t", a.d_up_gate_t, 2 * width, rows);
  check_shared_scale(kOp, a.d_up_gate, a.d_up_gate_t);
  if (!a.d_product.empty()) {
    check_tensor(kOp, "d_product", a.d_product, {rows, width}, {DType::kF32, DType::kBF16});
  } else if (!a.d_up_gate.empty() || !a.d_up_gate_t.empty()) {
    throw_internal("{}: d_up_gate is given, but d_product is not given", kOp);
  }
  check_samples_amax(kOp, a);
  check_optional(kOp, "product", a.product, rows, width);
  check_optional(kOp, "product_t", a.product_t, width, rows);
  check_shared_scale(kOp, a.product, a.product_t);
  check_row_factor(kOp, a.row_factor, rows);
  if (rows == 0 || width == 0) return;
  PARKA_DISPATCH(swiglu_backward, device, a);
}

void swiglu_row_gradient(Device& device, const SwigluRowGradient& a) {
  constexpr std::string_view kOp = "swiglu_row_gradient";
  const int64_t rows = a.up_gate.num_rows(), width = a.up_gate.num_cols() / 2;
  check_up_gate(kOp, a.up_gate, rows, width);
  check_silu(kOp, a.silu, rows, width);
  check_tensor(kOp, "d_product", a.d_product, {rows, width}, {DType::kF32, DType::kBF16});
  check_tensor(kOp, "d_row_factor", a.d_row_factor, {rows}, {DType::kF32});
  if (rows == 0) return;
  PARKA_DISPATCH(swiglu_row_gradient, device, a);
}

OpCost cost_of(const SwigluForward& a) {
  return moved(all_bytes(a.up_gate_plain, a.up_gate, a.silu, a.product, a.product_t, a.row_factor) +
                   (read_twice(a.product, a.product_t) ? all_bytes(a.up_gate, a.silu) : 0.0),
               a.product.data);
}
int64_t workspace_of(const SwigluForward& a) {
  return has_tensor_scale(a.product) || has_tensor_scale(a.product_t) ? cuda::kAmaxWorkspaceBytes : 0;
}

OpCost cost_of(const SwigluBackward& a) {
  const double reads = all_bytes(a.up_gate, a.silu, a.d_product);
  const double for_amax = read_twice(a.d_up_gate, a.d_up_gate_t) ? reads : 0.0;
  return moved(reads + (a.samples_amax ? for_amax / kAmaxSampling : for_amax) +
                   all_bytes(a.d_up_gate, a.d_up_gate_t, a.product, a.product_t, a.row_factor),
               a.up_gate.data);
}
int64_t workspace_of(const SwigluBackward& a) {
  if (!has_tensor_scale(a.d_up_gate) && !has_tensor_scale(a.d_up_gate_t)) return 0;
  return (a.samples_amax ? 2 : 1) * cuda::kAmaxWorkspaceBytes;
}

OpCost cost_of(const SwigluRowGradient& a) {
  return moved(all_bytes(a.up_gate, a.silu, a.d_product, a.d_row_factor), a.d_product);
}

void swiglu_projection(Device& device, const SwigluProjection& a) {
  const TensorView &out = a.projection.out, &plain = a.swiglu.up_gate_plain;
  if (plain.empty() || out.data != plain.data || out.dtype != plain.dtype || a.projection.accumulate) {
    throw_internal("swiglu_projection: the projection is to leave its output, {}, for swiglu", describe(out));
  }
  if (!suits_one_kernel(a)) {
    run_as_two(device, a);
    return;
  }
  check_gemm(a.projection);
  check_swiglu_forward(a.swiglu);
  if (a.swiglu.product.num_rows() == 0 || a.swiglu.product.num_cols() == 0) return;
  record_product(device, a.projection);
  PARKA_DISPATCH(swiglu_projection, device, a);
}

OpCost cost_of(const SwigluProjection& a) {
  OpCost cost = cost_of(a.projection);
  // The projection is neither written nor read.
  cost.bytes += cost_of(a.swiglu).bytes - 2 * bytes_of(a.projection.out);
  return cost;
}
int64_t workspace_of(const SwigluProjection& a) {
  return std::max(workspace_of(a.projection), workspace_of(a.swiglu));
}

bool suits_one_kernel(const SwigluProjection& a) {
  const ScaledView& up_gate = a.swiglu.up_gate;
  return suits_float8_tiles(a.projection) && up_gate.data.dtype == DType::kE4M3 &&
         up_gate.scaling == Scaling::kGroup && a.swiglu.row_factor.empty();
}

bool runs_as_one(const Device& device, const SwigluProjection& a) {
  return suits_one_kernel(a) && device.fuses(SwigluProjection::kName, a.projection.out.numel());
}

void run_as_two(Device& device, const SwigluProjection& a) {
  gemm(device, a.projection);
  swiglu_forward(device, a.swiglu);
}

}  // namespace parka
