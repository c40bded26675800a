#pragma once
#include <cuda_runtime_api.h>

#include "core/tensor.h"

namespace parka::cuda {

// The terms of a sum over ranks, all in this rank's memory.
struct Addends {
  const void* own;     // [n]: this rank's term, at position `place`
  const void* others;  // [count - 1, n]: the terms of the others, in the order of their places
  int place, count;
};

// out [n] = the sum of the addends, in the format of `out` (fp32 or bf16). With `adds` the old value of `out` comes
// first. Terms are added in fp32, in the order of places, and rounded once. Throws Error(kInternal).
void queue_sum(const Addends& addends, const TensorView& out, bool adds, cudaStream_t stream);

}  // namespace parka::cuda
