#pragma once
#include <cstdint>

#include <cuda_runtime_api.h>

namespace parka::cuda {

// Queues an increment of *counter, host memory that the GPU can access. One stream increments a counter.
void queue_count(uint64_t* counter, cudaStream_t stream);

}  // namespace parka::cuda
