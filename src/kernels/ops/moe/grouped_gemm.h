#pragma once
#include "core/tensor.h"
#include "kernels/op/op.h"

namespace parka {

// Products of rows that are sorted by expert (SortByExpert) with the matrices of E experts, stored one below the
// other. Where rows of an expert begin is read on the device: nothing waits for the host, and the work depends on
// the number of rows in use. FP8 operands are E4M3 or E5M2 codes, K-major, with one scale for all rows and one
// scale for each expert's matrix. R is a multiple of kExpertRows (routing.h).

struct GroupedShape {
  int64_t rows, cols, depth, experts;  // R, N, K, E
};

// For each row r of expert e:  out[r, n] = scales * sum over k of a[r, k] * b_e[n, k], summed in fp32 and rounded
// once. Rows of no expert, behind offsets[E] and of padding, are zeros.
struct GroupedGemm {
  ScaledView a;  // [R, K] fp32, bf16, or fp8 kTensor, in
  ScaledView b;  // [E * N, K] as a, in; fp8: kTensor with fp32 scale [E], of each expert's matrix
  bool b_transposed =
      false;           // b is [E * K, N]; only for fp32 and bf16. FP8 has transposed copies, [E * N, K] again
  TensorView offsets;  // [E + 1] int32, in; multiples of kExpertRows
  TensorView counts;   // [E] int32, in
  TensorView out;      // [R, N] fp32 or bf16, out
  bool fast_accumulation = false;  // as Gemm's
};
PARKA_OP(grouped_gemm, GroupedGemm);
GroupedShape shape_of(const GroupedGemm& a);

// For each expert e:  out_e[n, k] = (accumulate ? out_e[n, k] : 0) + scales * sum over its rows r of
// d_y[r, n] * x[r, k]. An expert without rows gets zeros, or is left as it is where this accumulates. Padding rows
// are zeros and add nothing.
struct GroupedWeightGradient {
  ScaledView d_y;      // [R, N] fp32 or bf16; or fp8 kTensor transposed, [N, R], in
  ScaledView x;        // [R, K]; or fp8 [K, R], in
  TensorView offsets;  // [E + 1] int32, in
  TensorView counts;   // [E] int32, in
  TensorView out;      // [E * N, K] fp32 or bf16, in and out
  bool accumulate = false;
};
PARKA_OP(grouped_weight_gradient, GroupedWeightGradient);
GroupedShape shape_of(const GroupedWeightGradient& a);

}  // namespace parka
