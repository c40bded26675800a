#pragma once
#include <cstdint>

#include <cuda_runtime_api.h>

namespace parka::cuda {

// Queues an addition of one to *counter, host memory that the GPU can reach. One stream at a time may count on it.
void queue_count(uint64_t* counter, cudaStream_t stream);

}  // namespace parka::cuda
