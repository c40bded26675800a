#pragma once
#include <cuda_runtime_api.h>

#include "core/tensor.h"

namespace parka::cuda {

// What one rank has of a sum over ranks.
struct Addends {
  const void* own;     // [n]: this rank's, the one of place `place`
  const void* others;  // [count - 1, n]: those of the others, in the order of their places
  int place, count;
};

// out [n] = the sum of the addends, fp32 or bf16 as `out` is; with `adds` what `out` held comes first. Added in
// fp32 in the order of places and rounded once. Throws Error(kInternal).
void queue_sum(const Addends& addends, const TensorView& out, bool adds, cudaStream_t stream);

}  // namespace parka::cuda
