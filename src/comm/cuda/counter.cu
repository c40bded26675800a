#include "comm/cuda/counter.h"
#include "kernels/device/cuda/check.h"

namespace parka::cuda {
namespace {

// Volatile: the host reads it while the GPU works.
__global__ void count(volatile uint64_t* counter) { *counter = *counter + 1; }

}  // namespace

void queue_count(uint64_t* counter, cudaStream_t stream) {
  count<<<1, 1, 0, stream>>>(counter);
  check_launch("counting collectives");
}

}  // namespace parka::cuda
