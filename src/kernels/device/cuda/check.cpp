#include "kernels/device/cuda/check.h"

#include "core/error.h"
#include "kernels/device/cuda/cublaslt.h"

namespace parka::cuda {

void check(cudaError_t status, std::string_view what) {
  if (status == cudaSuccess) return;
  throw_internal("{}: CUDA: {} ({}); the cause may be work queued before it", what, cudaGetErrorString(status),
                 cudaGetErrorName(status));
}

void check(cublasStatus_t status, std::string_view what) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  throw_internal("{}: cuBLASLt: {}", what, PARKA_CUBLASLT(cublasLtGetStatusName)(status));
}

}  // namespace parka::cuda
