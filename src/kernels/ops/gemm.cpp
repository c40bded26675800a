#include "kernels/ops/gemm.h"

#include <algorithm>

#include "kernels/op/check.h"
#include "kernels/op/cost.h"
#include "kernels/op/dispatch.h"
#include "kernels/op/workspace.h"

namespace parka {
namespace {

void check_operand(std::string_view name, const ScaledView& t, bool transposed, int64_t extent, int64_t depth,
                   int64_t padding) {
  check_matrix("gemm", name, t, transposed ? depth : extent, (transposed ? extent : depth) + padding);
  if (transposed && t.scaling != Scaling::kNone) {
    throw_internal("gemm: {} is {} and flagged transposed: give a transposed copy instead", name, describe(t));
  }
}

}  // namespace

void gemm(Device& device, const Gemm& a) {
  const auto [rows, cols, depth] = gemm_shape(a);
  check_tensor("gemm", "out", a.out, {rows, cols + a.out_padding}, {DType::kF32, DType::kBF16});
  check_operand("a", a.a, a.a_transposed, rows, depth, a.a_padding);
  check_operand("b", a.b, a.b_transposed, cols, depth, a.b_padding);
  const bool both_fp8 = a.a.scaling != Scaling::kNone && a.b.scaling != Scaling::kNone;
  if (!both_fp8 && a.a.data.dtype != a.b.data.dtype) {
    throw_internal("gemm: a is {} and b is {}: wanted two fp8 operands, or two of one dtype", describe(a.a),
                   describe(a.b));
  }
  if (a.a_padding != 0 || a.b_padding != 0 || a.out_padding != 0) {
    PARKA_REQUIRE(!both_fp8 && std::min({a.a_padding, a.b_padding, a.out_padding}) >= 0 && depth > 0);
  }
  PARKA_REQUIRE(!both_fp8 || a.factor == 1);
  if (rows == 0 || cols == 0) return;
  if (depth == 0) {
    if (!a.accumulate) device.fill_zero(a.out.data, a.out.bytes());
    return;
  }
  PARKA_DISPATCH(gemm, device, a);
}

GemmShape gemm_shape(const Gemm& a) {
  const int64_t depth = a.a_transposed ? a.a.data.dim[0] : a.a.data.dim[1] - a.a_padding;
  return {a.out.dim[0], a.out.dim[1] - a.out_padding, depth};
}

OpCost cost_of(const Gemm& a) {
  const auto [M, N, K] = gemm_shape(a);
  return {all_bytes(a.a, a.b) + (a.accumulate ? 2 : 1) * bytes_of(a.out),
          2.0 * static_cast<double>(M) * static_cast<double>(N) * static_cast<double>(K),
          fmt::format("{} x {} x {} {}{}{} {}{}", M, N, K, name_of(a.a.data.dtype), a.a_transposed ? " T" : " N",
                      a.b_transposed ? "T" : "N", name_of(a.out.dtype), a.accumulate ? kOntoOutput : ""),
          Products::kGemm};
}
TensorView output_of(const Gemm& a) { return a.out; }
int64_t workspace_of(const Gemm& a) {
  // Other products of scaled operands leave the scales where they are.
  if (a.a.scaling != Scaling::kGroup && a.a.scaling != Scaling::kBlock) return cuda::kGemmWorkspaceBytes;
  return cuda::kGemmWorkspaceBytes + cuda::gemm_scales_bytes(a.a.num_rows(), a.a.num_cols()) +
         cuda::gemm_scales_bytes(a.b.num_rows(), a.b.num_cols());
}

}  // namespace parka
