#pragma once
#include "kernels/device/cuda/check.h"
#include "kernels/device/cuda/cuda_device.h"

// Programmatic dependent launch: a kernel is launched before the previous one in the stream ends, so that short
// kernels lose less time at their start. In code of compute capability 9.0 and later; in other code, which a later
// GPU may run too, it is an ordinary launch.
namespace parka::cuda {

// All threads of a kernel launched by launch_early() call this first. It waits for the previous kernel, and lets
// the blocks of the next one start as soon as resources are free. All blocks must wait: otherwise this kernel could
// end before the previous one, and an op after both could begin too early.
__device__ inline void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900  // CudaDevice::kEarlyLaunchVersion
  cudaTriggerProgrammaticLaunchCompletion();
  cudaGridDependencySynchronize();
#endif
}

struct EarlyLaunch {
  dim3 blocks;
  int threads;
  int64_t shared_bytes = 0;
};

// To be followed by check_launch(), as every launch.
template <typename... Parameters, typename... Arguments>
void launch_early(const CudaDevice& device, void (*kernel)(Parameters...), const EarlyLaunch& launch,
                  const Arguments&... arguments) {
  cudaLaunchAttribute early = {};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = launch.blocks;
  config.blockDim = static_cast<unsigned>(launch.threads);
  config.dynamicSmemBytes = static_cast<size_t>(launch.shared_bytes);
  config.stream = device.stream();
  config.attrs = &early;
  config.numAttrs = device.launches_early() ? 1 : 0;
  static_cast<void>(cudaLaunchKernelEx(&config, kernel, arguments...));  // also left for cudaGetLastError()
}

}  // namespace parka::cuda
