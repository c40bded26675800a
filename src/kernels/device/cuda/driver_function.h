#pragma once
#include <cuda.h>
#include <cuda_runtime_api.h>

#include "core/error.h"
#include "kernels/device/cuda/check.h"

namespace parka::cuda {

// A function of the driver, of CUDA 12.0 or later, found at run time, if at all. Throws Error(kInternal).
template <typename Function>
Function driver_function(const char* name) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  check(cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &found), name);
  PARKA_REQUIRE(found == cudaDriverEntryPointSuccess);
  return reinterpret_cast<Function>(function);
}

}  // namespace parka::cuda
