#pragma once
#include <cstdint>

#include "core/tensor.h"
#include "kernels/op/op.h"

// Products of INT8 codes, for forward passes that E4M3's three bits of mantissa are too few for. A row has one
// scale, so that its largest numbers would cost all others their bits: its numbers are multiplied by Hadamard
// matrices first, which spread them (QuaRot, arXiv 2404.00456). Those of both operands cancel, because the matrix
// is orthogonal.
namespace parka {

// Columns that a Hadamard matrix of rows [R, K] mixes: the largest power of two up to 64 that divides K. Operands
// of a product have the same K, and so the same.
int64_t rotation_width(int64_t cols);

// Sums of as many products of two codes fit 32 bits.
inline constexpr int64_t kMostInt8Terms = int64_t{1} << 17;

// Each row is made in fp32, with W = rotation_width(K):
//   h = W numbers after the other, times the Hadamard matrix of Sylvester's form and 1 / sqrt(W) rounded to fp32.
//       Sums are made in steps of 1, 2, 4... columns: of a pair x and y at that distance x + y, and x - y
//   absmax = max |h|; scale = absmax / 127; code = h * (127 / absmax), rounded to nearest, ties to even
// Where 127 / absmax is not finite all codes are 0. A row with a NaN or an infinity has the scale NaN, so that all
// of its products are NaN.
struct QuantizeInt8 {
  TensorView x;    // [R, K] fp32 or bf16, in
  ScaledView out;  // [R, K] int8, a kGroup scale of fp32 for each row: group = K
};
PARKA_OP(quantize_int8, QuantizeInt8);

// out[m,n] = (accumulate ? out[m,n] : 0) + sum_k a[m,k] b[n,k] * scale_a[m] * scale_b[n]
// The sum is exact. It is rounded to fp32, multiplied by one scale and then the other, and rounded to the dtype of
// out, also before it is added. A GPU has compute capability 9.0 for it, N is a multiple of 8, K of 16, and out in
// bf16; addresses are aligned to 16 bytes.
struct GemmInt8 {
  ScaledView a;    // [M, K] int8, as QuantizeInt8 makes them; K up to kMostInt8Terms
  ScaledView b;    // [N, K]
  TensorView out;  // [M, N] fp32 or bf16
  bool accumulate = false;
};
PARKA_OP(gemm_int8, GemmInt8);

}  // namespace parka
