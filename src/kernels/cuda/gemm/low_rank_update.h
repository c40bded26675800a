#pragma once
#include "kernels/ops/gemm/gemm.h"

namespace parka::cuda {

class CudaDevice;

// Products of few terms that are added to a large bf16 matrix, as those of adapters are: out += factor * a b.
// Reading and writing `out` is what they take, and cuBLASLt reaches half of the memory's bandwidth with them.

// `a` is one that suits_low_rank_update() takes. Equal calls give equal bits, and so do calls of other numbers of
// rows or columns. Sums are rounded once.
void low_rank_update(CudaDevice& device, const Gemm& a);

}  // namespace parka::cuda
