#pragma once
#include <algorithm>
#include <initializer_list>
#include <string_view>

#include "kernels/cuda/vector.cuh"
#include "kernels/device/cuda/check.h"
#include "kernels/device/cuda/cuda_device.h"

// How ops launch kernels.
namespace parka::cuda {

// Null for a tensor that is not given.
template <typename T>
T* optional(const TensorView& t) {
  return t.empty() ? nullptr : t.as<T>();
}

// To 16 bytes, as null is.
inline bool are_aligned(std::initializer_list<const void*> tensors) {
  return std::all_of(tensors.begin(), tensors.end(), [](const void* p) { return is_aligned(p, 16); });
}

// Calls f with a constant for a bool, to instantiate a kernel for it.
template <typename F>
void with_constant(bool value, const F& f) {
  value ? f(std::true_type()) : f(std::false_type());
}

// Thread blocks, the threads of each, and its dynamic shared memory.
struct Grid {
  dim3 blocks, threads;
  int64_t shared_bytes;

  Grid(int64_t blocks_, dim3 threads_, int64_t shared_bytes_ = 0)
      : Grid(dim3(static_cast<unsigned>(blocks_)), threads_, shared_bytes_) {
    PARKA_REQUIRE(blocks_ <= INT32_MAX);
  }
  Grid(dim3 blocks_, dim3 threads_, int64_t shared_bytes_ = 0)
      : blocks(blocks_), threads(threads_), shared_bytes(shared_bytes_) {}
};

// Queues a kernel. Throws under the name of the op if it cannot be launched.
template <typename... Parameters, typename... Arguments>
void launch(const CudaDevice& device, std::string_view op, void (*kernel)(Parameters...), const Grid& grid,
            const Arguments&... arguments) {
  kernel<<<grid.blocks, grid.threads, static_cast<size_t>(grid.shared_bytes), device.stream()>>>(arguments...);
  check_launch(op);
}

// ---- Programmatic dependent launch ----
//
// A kernel is launched before the previous one in the stream ends, so that short kernels lose less time at their
// start: in code of compute capability 9.0 and later; in other code it is an ordinary launch.

// All threads of a kernel launched by launch_early() call this first. It waits for the previous kernel, and lets
// the blocks of the next one start as soon as resources are free. All blocks must wait: otherwise this kernel could
// end before the previous one, and an op after both could begin too early.
__device__ inline void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900  // CudaDevice::kEarlyLaunchVersion
  cudaTriggerProgrammaticLaunchCompletion();
  cudaGridDependencySynchronize();
#endif
}

template <typename... Parameters, typename... Arguments>
void launch_early(const CudaDevice& device, std::string_view op, void (*kernel)(Parameters...), const Grid& grid,
                  const Arguments&... arguments) {
  cudaLaunchAttribute early = {};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid.blocks;
  config.blockDim = grid.threads;
  config.dynamicSmemBytes = static_cast<size_t>(grid.shared_bytes);
  config.stream = device.stream();
  config.attrs = &early;
  config.numAttrs = device.launches_early() ? 1 : 0;
  check(cudaLaunchKernelEx(&config, kernel, arguments...), op);
}

}  // namespace parka::cuda
