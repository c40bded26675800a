#pragma once
#include "kernels/ops/gemm/gemm.h"

namespace parka::cuda {

class CudaDevice;

// The kernels that gemm() needs besides cuBLASLt.

// A product of fp8 operands in any shape, alignment and scaling, in plain fp32 arithmetic without tensor cores. It
// is for products that cuBLASLt does not support; no training step should contain one. Codes with kGroup or kBlock
// scales are decoded first, as on the CPU; kTensor scales multiply the sum.
void multiply_float8(CudaDevice& device, const Gemm& a);

// Copies scales to cuBLASLt's layout, with R rows of the operand and L = ceil(K / 128):
//   kGroup, fp32 [R, L]:              laid out as [L, R]
//   kBlock, fp32 [ceil(R / 128), L]:  rows padded to a multiple of 4 scales, by zeros
struct ScaleLayout {
  const float* from = nullptr;  // row-major [rows, cols]
  float* to = nullptr;
  int rows = 0, cols = 0;
  int to_stride = 0;  // from one row of `to` to the next
  bool transposed = false;
};
// Does nothing for a layout without `from`.
void lay_out_scales(CudaDevice& device, const ScaleLayout& a, const ScaleLayout& b);

// Products of few terms that are added to a large bf16 matrix, as those of adapters: out += factor * a b, for what
// suits_low_rank_update(). They take as long as reading and writing `out`; cuBLASLt reaches half of that bandwidth.
// Equal calls give equal bits, and so do calls of other numbers of rows or columns. Sums are rounded once.
void low_rank_update(CudaDevice& device, const Gemm& a);

// Fills fp32, bf16 or fp8 elements with normally distributed numbers: operands to time a product on. Zeros or a
// constant would draw less power, and the card would clock higher than it does in training.
void fill_random(CudaDevice& device, const TensorView& x, uint32_t seed);

}  // namespace parka::cuda
