#pragma once
#include "core/tensor.h"
#include "kernels/op/op.h"

namespace parka {

// out[m,n] = (accumulate ? out[m,n] : 0) + sum_k A[m,k] * B[n,k],   summed in fp32, rounded once to out's dtype.
// A is `a`, or its transpose when a_transposed; likewise B. So, with row-major activations x [T, K], weight
// w [N, K] and output gradient d_y [T, N]:
//   y   [T, N] : a = x,                   b = w
//   d_x [T, K] : a = d_y,                 b = w, b_transposed
//   d_w [N, K] : a = d_y, a_transposed,   b = x, b_transposed
// On a GPU, fp8 products that accumulate to bf16 may be rounded to bf16 before they are added, so twice.
// FP8 tensor cores take both operands K-major only, so FP8 operands must not be flagged transposed: give
// transposed copies (w_t [K, N], d_y_t [N, T], x_t [K, T]) instead.
struct Gemm {
  ScaledView a;  // [M, K] (or [K, M] when a_transposed): fp32, bf16; or fp8 with kTensor, kGroup or kBlock scaling
  ScaledView b;  // [N, K] (or [K, N] when b_transposed): as a; fp32/bf16 with its like, fp8 with fp8
  bool a_transposed = false;
  bool b_transposed = false;
  TensorView out;  // [M, N] fp32 or bf16
  bool accumulate = false;
  // FP8 tensor cores add products in an accumulator of about 14 bits. Unless this is set, its sums over 128 terms
  // are added up in fp32; with it, sums over long K lose more, for speed. Only kTensor-scaled products on a GPU
  // look at it.
  bool fast_accumulation = false;
};
// K == 0 yields zeros (or leaves out as it is when accumulating).
PARKA_OP(gemm, Gemm);
int64_t workspace_of(const Gemm& a);

}  // namespace parka
