#pragma once
#include <vector>

#include <cuda_runtime_api.h>

#include "kernels/device/device.h"

namespace parka::cuda {

// A stream for copies in each direction, and events between them and the device's own stream.
class CudaHostStream final : public HostStream {
 public:
  // `stream` is the device's own.
  CudaHostStream(cudaStream_t stream, size_t num_slots);
  ~CudaHostStream() override;
  CudaHostStream(const CudaHostStream&) = delete;
  CudaHostStream& operator=(const CudaHostStream&) = delete;

  void follow_device() override;
  void load(size_t slot, const std::vector<Copy>& copies) override;
  void wait_loaded(size_t slot) override;
  void save(const std::vector<Copy>& copies) override;
  void wait_saved() override;

 private:
  cudaStream_t stream_, in_ = nullptr, out_ = nullptr;
  cudaEvent_t ready_ = nullptr;  // the device's work that copies follow
  cudaEvent_t saved_ = nullptr;
  std::vector<cudaEvent_t> loaded_;  // by slot
};

}  // namespace parka::cuda
