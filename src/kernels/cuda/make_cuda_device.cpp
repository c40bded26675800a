// The only file that knows both the GPU device and its ops.
#include "core/error.h"
#include "kernels/cuda/gemm/gemm_cache.h"
#include "kernels/device/device.h"

namespace parka {

std::unique_ptr<Device> make_cuda_device(int ordinal) {
  const int count = num_cuda_devices();
  if (count == 0)
    throw_bad_input("no usable GPU was found (does nvidia-smi list one?); device.kind=cpu needs none");
  if (ordinal >= count) throw_bad_input("GPU {} was requested, but there are {}", ordinal, count);
  return std::make_unique<cuda::CudaDevice>(ordinal, [] { return std::make_unique<cuda::GemmCache>(); });
}

}  // namespace parka
