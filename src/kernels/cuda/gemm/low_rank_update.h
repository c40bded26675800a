#pragma once
#include "kernels/ops/gemm.h"

namespace parka::cuda {

class CudaDevice;

// Products of few terms that are added to a large bf16 matrix, as those of adapters are: out += factor * a b.
// Reading and writing `out` is what they take, and cuBLASLt reaches half of the memory's bandwidth with them.

// Whether low_rank_update() computes this product: bf16 operands, accumulated in bf16, over up to 192 terms, with
// `a` in rows; rows that are multiples of 16 bytes, aligned to 16 bytes.
bool suits_low_rank_update(const Gemm& a);

// Equal calls give equal bits, and so do calls of other numbers of rows or columns. Sums are rounded once.
void low_rank_update(CudaDevice& device, const Gemm& a);

}  // namespace parka::cuda
