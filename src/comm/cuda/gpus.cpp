#include <array>

#include <cuda_runtime_api.h>

#include "comm/nccl_ranks.h"
#include "kernels/device/cuda/check.h"

namespace parka {

std::string gpu_pci_bus_id(int ordinal) {
  std::array<char, 32> id{};  // "00000000:19:00.0" is the longest form
  cuda::check(cudaDeviceGetPCIBusId(id.data(), static_cast<int>(id.size()), ordinal), "reading the GPU's bus id");
  return id.data();
}

}  // namespace parka
