#pragma once
#include <cstdint>

#include "kernels/device/cuda/cuda_device.h"
#include "kernels/ops/moe/grouped_gemm.h"

namespace parka::cuda {

// Where the rows of experts are, as kernels get it.
struct Experts {
  const int *offsets, *counts;
  int count;

  Experts(const TensorView& offsets_, const TensorView& counts_)
      : offsets(offsets_.as<int32_t>()), counts(counts_.as<int32_t>()), count(static_cast<int>(counts_.numel())) {}
};

// sm90_grouped_gemm.cu: what tensor cores of compute capability 9.0 compute, in FP8 and bf16. fits: whether they
// have a kernel for these arguments, on this device.
bool fits_sm90(const CudaDevice& device, const GroupedGemm& a);
void run_sm90(CudaDevice& device, const GroupedGemm& a);
bool fits_sm90(const CudaDevice& device, const GroupedWeightGradient& a);
void run_sm90(CudaDevice& device, const GroupedWeightGradient& a);

}  // namespace parka::cuda
