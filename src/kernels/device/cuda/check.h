#pragma once
#include <string_view>

#include <cublasLt.h>
#include <cuda_runtime_api.h>

namespace parka::cuda {

// Throws Error(kInternal) that names `what` (an op, or what was tried) and CUDA's reason, unless status is success.
// A failure of work that was queued earlier is found by whichever call comes next: the message says so.
void check(cudaError_t status, std::string_view what);
void check(cublasStatus_t status, std::string_view what);

// To be called after every kernel launch: throws when the launch was refused.
inline void check_launch(std::string_view op) { check(cudaGetLastError(), op); }

}  // namespace parka::cuda
