#pragma once
#include <cstdint>
#include <string>

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
// On a GPU, what cuBLASLt adds to bf16 may be rounded twice, to bf16 before it is added, and after: fp8 products,
// and products with a factor. FP8 tensor cores take only K-major operands, so FP8 operands must not be flagged
// transposed. Give transposed copies (w_t [K, N], d_y_t [N, T], x_t [K, T]) instead.
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
  // FP8 tensor cores sum products in an accumulator of about 14 bits. By default sums over 128 terms are added up
  // in fp32. With fast_accumulation they are not: sums over a long K lose more bits. For kTensor scales on a GPU.
  bool fast_accumulation = false;
};
// K == 0 yields zeros (or leaves `out` unchanged when accumulating).
PARKA_OP(gemm, Gemm);

struct GemmShape {
  int64_t rows, cols, depth;  // M, N, K
};
GemmShape gemm_shape(const Gemm& a);
int64_t workspace_of(const Gemm& a);

// For ops that a product is a part of: what gemm() checks, and its word to the device's ProductRecorder.
void check_gemm(const Gemm& a);
void record_product(Device& device, const Gemm& a);

// How a GPU does a product.

// True if a kernel of its own computes it (kernels/cuda/gemm/low_rank_update.cu): bf16 operands, accumulated in
// bf16, over up to kMostLowRankTerms terms, `a` in rows; rows are aligned to 16 bytes.
inline constexpr int64_t kMostLowRankTerms = 128;
bool suits_low_rank_update(const Gemm& a);
// True if cuBLASLt gets it, because it has no kernel of its own. FP8 GEMMs need operands that are 16-byte aligned,
// N and K that are multiples of 16, and
//   both operands scaled kTensor, or
//   both scaled in fp32 per 128, kGroup with kGroup or kBlock in either order; then M is a multiple of 16 too.
// The library itself refuses two e5m2 operands, and FP8 on GPUs without it.
bool suits_cublaslt(const Gemm& a);
// True if operands and output suit Parka's own FP8 GEMM (kernels/cuda/gemm/sm90_float8_tiles.cuh), whose kernels go
// on with its product: E4M3 scaled kTensor, K > 0, fast accumulation, to a bf16 output that is not added to.
bool suits_float8_tiles(const Gemm& a);
bool accumulates_fast(const Gemm& a);        // in the tensor cores' own accumulator
uint32_t alignment_of(const TensorView& t);  // the largest power of two up to 256 that divides the address
// The name of a choice of algorithm: "8192 x 4096 x 11008 e4m3 NN bf16 [e4m3 per 1x128, e4m3 per 128x128]", with
// the alignment of operands that are not 256-byte aligned.
std::string key_of(const Gemm& a);

}  // namespace parka
