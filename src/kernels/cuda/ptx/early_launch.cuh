#pragma once
#include "kernels/device/cuda/check.h"
#include "kernels/device/cuda/cuda_device.h"

// Kernels that are on their way when the one before them in the stream ends, so that short ones lose less time at
// their start (programmatic dependent launch, compute capability 9.0 and later; elsewhere they are launched as any
// other).
namespace parka::cuda {

// The first thing that all threads of a kernel do, if it is launched by launch_early(): waits for the kernel
// before, and lets the blocks of the next one start where there is room. All blocks have to wait: if none did, this
// kernel could end before the one before, and an op after both begin too early.
__device__ inline void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
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
  config.numAttrs = device.properties().major >= 9 ? 1 : 0;
  static_cast<void>(cudaLaunchKernelEx(&config, kernel, arguments...));  // also left for cudaGetLastError()
}

}  // namespace parka::cuda
