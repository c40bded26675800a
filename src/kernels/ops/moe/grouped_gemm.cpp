#include "kernels/ops/moe/grouped_gemm.h"

#include "kernels/op/define.h"
#include "kernels/ops/moe/routing.h"

namespace parka {
namespace {

void check_experts(std::string_view op, const TensorView& offsets, const TensorView& counts, int64_t rows) {
  const int64_t experts = counts.dim[0];
  check_tensor(op, "counts", counts, {experts}, {DType::kI32});
  check_tensor(op, "offsets", offsets, {experts + 1}, {DType::kI32});
  if (experts < 1 || experts > kMostExperts) {
    throw_internal("{}: counts is {}, wanted one for each of 1 to {} experts", op, describe(counts), kMostExperts);
  }
  if (rows % kExpertRows != 0) {
    throw_internal("{}: {} rows of experts, wanted a multiple of {}", op, rows, kExpertRows);
  }
}

// Plain numbers, or codes with this number of scales.
void check_grouped_operand(std::string_view op, std::string_view name, const ScaledView& t, int64_t rows,
                           int64_t cols, int64_t scales) {
  if (t.scaling == Scaling::kNone) {
    check_tensor(op, name, t.data, {rows, cols}, {DType::kF32, DType::kBF16});
    return;
  }
  if (t.scaling != Scaling::kTensor) throw_internal("{}: {} is {}, wanted one scale", op, name, describe(t));
  check_tensor(op, name, t.data, {rows, cols}, {DType::kE4M3, DType::kE5M2});
  check_tensor(op, fmt::format("scale of {}", name), t.scale, {scales}, {DType::kF32});
}

void check_formats(std::string_view op, std::string_view a_name, const ScaledView& a, std::string_view b_name,
                   const ScaledView& b) {
  const bool both_fp8 = a.scaling != Scaling::kNone && b.scaling != Scaling::kNone;
  if (both_fp8 || a.data.dtype == b.data.dtype) return;
  throw_internal("{}: {} is {} and {} is {}: wanted two fp8 operands, or two of one dtype", op, a_name, describe(a),
                 b_name, describe(b));
}

std::string shape_of_product(int64_t rows, int64_t cols, int64_t depth, int64_t experts, DType in, DType out) {
  return fmt::format("{} x {} x {} {} {}, {} experts", rows, cols, depth, name_of(in), name_of(out), experts);
}

double flop_of(int64_t rows, int64_t cols, int64_t depth) {
  return 2.0 * static_cast<double>(rows) * static_cast<double>(cols) * static_cast<double>(depth);
}

}  // namespace

GroupedShape shape_of(const GroupedGemm& a) {
  return {a.out.dim[0], a.out.dim[1], a.a.num_cols(), a.counts.dim[0]};
}

GroupedShape shape_of(const GroupedWeightGradient& a) {
  const int64_t experts = a.counts.dim[0];
  const bool transposed = a.x.scaling != Scaling::kNone;
  return {a.x.data.dim[transposed ? 1 : 0], experts == 0 ? 0 : a.out.dim[0] / experts, a.out.dim[1], experts};
}

void grouped_gemm(Device& device, const GroupedGemm& a) {
  constexpr std::string_view kOp = "grouped_gemm";
  const auto [rows, cols, depth, experts] = shape_of(a);
  check_experts(kOp, a.offsets, a.counts, rows);
  check_tensor(kOp, "out", a.out, {rows, cols}, {DType::kF32, DType::kBF16});
  check_grouped_operand(kOp, "a", a.a, rows, depth, 1);
  if (a.b_transposed && a.b.scaling != Scaling::kNone) {
    throw_internal("{}: b is {} and flagged transposed: give a transposed copy instead", kOp, describe(a.b));
  }
  check_grouped_operand(kOp, "b", a.b, experts * (a.b_transposed ? depth : cols), a.b_transposed ? cols : depth,
                        experts);
  check_formats(kOp, "a", a.a, "b", a.b);
  if (rows == 0 || cols == 0) return;
  PARKA_DISPATCH(grouped_gemm, device, a);
}

void grouped_weight_gradient(Device& device, const GroupedWeightGradient& a) {
  constexpr std::string_view kOp = "grouped_weight_gradient";
  const auto [rows, cols, depth, experts] = shape_of(a);
  check_formats(kOp, "d_y", a.d_y, "x", a.x);
  check_experts(kOp, a.offsets, a.counts, rows);
  check_tensor(kOp, "out", a.out, {experts * cols, depth}, {DType::kF32, DType::kBF16});
  const bool coded = a.d_y.scaling != Scaling::kNone;
  check_grouped_operand(kOp, "d_y", a.d_y, coded ? cols : rows, coded ? rows : cols, 1);
  check_grouped_operand(kOp, "x", a.x, coded ? depth : rows, coded ? rows : depth, 1);
  if (cols == 0 || depth == 0) return;
  PARKA_DISPATCH(grouped_weight_gradient, device, a);
}

// The routing is not known here: all rows count.
OpCost cost_of(const GroupedGemm& a) {
  const auto [rows, cols, depth, experts] = shape_of(a);
  return {all_bytes(a.a, a.b, a.offsets, a.counts, a.out), flop_of(rows, cols, depth),
          shape_of_product(rows, cols, depth, experts, a.a.data.dtype, a.out.dtype), Products::kGemm};
}

OpCost cost_of(const GroupedWeightGradient& a) {
  const auto [rows, cols, depth, experts] = shape_of(a);
  std::string shape = shape_of_product(cols, depth, rows, experts, a.d_y.data.dtype, a.out.dtype);
  if (a.accumulate) shape += kOntoOutput;
  return {all_bytes(a.d_y, a.x, a.offsets, a.counts) + (a.accumulate ? 2 : 1) * bytes_of(a.out),
          flop_of(rows, cols, depth), shape, Products::kGemm};
}

}  // namespace parka
