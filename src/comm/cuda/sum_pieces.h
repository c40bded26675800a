#pragma once
#include <cuda_runtime_api.h>

#include "core/tensor.h"

namespace parka::cuda {

// out [n] = the sum of `count` pieces [n] that follow one another from `pieces` on, fp32 or bf16 as `out` is; with
// `adds` what `out` held comes first. Added in fp32 in that order and rounded once. Throws Error(kInternal).
void queue_sum(const void* pieces, int count, const TensorView& out, bool adds, cudaStream_t stream);

}  // namespace parka::cuda
