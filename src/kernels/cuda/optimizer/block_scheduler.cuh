#pragma once
#include "kernels/cuda/vector.cuh"
#include "kernels/device/cuda/cuda_device.h"

namespace parka::cuda {

// Dynamic scheduling of the warps of a grid, which do not wait for each other. A warp takes its share, by its place
// in the thread block, of one block of elements after another, of `count`. The first two are given. Each next one
// comes from a counter shared by the warps with that place in all thread blocks, so that faster warps take more.
// (One counter for each place, because additions to one number take 2.3 ns each.)
class BlockScheduler {
 public:
  // `counters` is CudaDevice's. Every thread of the grid makes BlockScheduler.
  __device__ BlockScheduler(unsigned* counters, int count)
      : counter_(counters + threadIdx.x / kWarpSize * CudaDevice::kCounterStride),
        count_(count),
        block_(static_cast<int>(blockIdx.x)),
        next_(block_ + static_cast<int>(gridDim.x)) {}

  __device__ bool has_block() const { return block_ < count_; }
  __device__ bool has_next() const { return next_ < count_; }
  __device__ int block() const { return block_; }
  __device__ int next() const { return next_; }
  // Asks for the block after the next, for advance(), which comes some time later.
  __device__ void ask() {
    const bool asks = threadIdx.x % kWarpSize == 0 && has_next();
    after_next_ = asks ? 2 * static_cast<int>(gridDim.x) + static_cast<int>(atomicAdd(counter_, 1u)) : count_;
  }
  __device__ void advance() {
    block_ = next_;
    next_ = __shfl_sync(kFullWarp, after_next_, 0);
  }

  // To be called when no thread of the block has work left: the last block to call it zeroes the counters.
  template <int kThreads>
  static __device__ void end(unsigned* counters) {
    constexpr int kPlaces = kThreads / kWarpSize;
    static_assert(kPlaces < CudaDevice::kNumCounters);
    unsigned* const num_ended = counters + kPlaces * CudaDevice::kCounterStride;
    __syncthreads();
    if (threadIdx.x != 0 || atomicAdd(num_ended, 1u) != gridDim.x - 1) return;
    for (int place = 0; place <= kPlaces; ++place) counters[place * CudaDevice::kCounterStride] = 0;
  }

 private:
  unsigned* counter_;
  int count_, block_, next_, after_next_ = 0;
};

}  // namespace parka::cuda
