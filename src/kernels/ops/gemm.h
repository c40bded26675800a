#pragma once
#include "core/tensor.h"
#include "kernels/op/op.h"

namespace parka {

// out[m,n] = (accumulate ? out[m,n] : 0) + factor * sum_k A[m,k] * B[n,k],   summed in fp32, rounded once to out's
// dtype.
// A is `a`, or its transpose when a_transposed; likewise B. For row-major activations x [T, K], a weight w [N, K]
// and an output gradient d_y [T, N]:
//   y   [T, N] : a = x,                   b = w
//   d_x [T, K] : a = d_y,                 b = w, b_transposed
//   d_w [N, K] : a = d_y, a_transposed,   b = x, b_transposed
// On a GPU, fp8 products that accumulate into bf16 may be rounded twice: to bf16 before they are added, and after.
// FP8 tensor cores take only K-major operands, so FP8 operands must not be flagged transposed. Give transposed
// copies (w_t [K, N], d_y_t [N, T], x_t [K, T]) instead.
struct Gemm {
  ScaledView a;  // [M, K] (or [K, M] when a_transposed): fp32, bf16; or fp8 with kTensor, kGroup or kBlock scaling
  ScaledView b;  // [N, K] (or [K, N] when b_transposed): as a; fp32 or bf16 with the same, fp8 with fp8
  bool a_transposed = false;
  bool b_transposed = false;
  TensorView out;  // [M, N] fp32 or bf16
  bool accumulate = false;
  float factor = 1;  // other than 1: only for fp32 and bf16 operands
  // Columns at the end of each row of a, b and out that are no part of the product: they are not read, and left as
  // they are. They keep rows aligned where N or K is odd. Only for fp32 and bf16 operands.
  int64_t a_padding = 0, b_padding = 0, out_padding = 0;
  // FP8 tensor cores sum products in an accumulator of about 14 bits. By default their sums over 128 terms are
  // added up in fp32. With fast_accumulation they are not: faster, but sums over a long K lose more bits. It
  // affects only kTensor-scaled products on a GPU.
  bool fast_accumulation = false;
};
// K == 0 yields zeros (or leaves `out` unchanged when accumulating).
PARKA_OP(gemm, Gemm);

struct GemmShape {
  int64_t rows, cols, depth;  // M, N, K
};
GemmShape gemm_shape(const Gemm& a);
int64_t workspace_of(const Gemm& a);

}  // namespace parka
