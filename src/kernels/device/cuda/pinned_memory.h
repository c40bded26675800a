#pragma once
#include <atomic>
#include <cstdint>
#include <vector>

#include <cuda_runtime_api.h>

#include "kernels/device/device.h"

namespace parka::cuda {

// Waits until the host has so many bytes to spare, and a reserve for everything else on it: a virtual machine's
// memory may grow as it is used. false: it has not after some seconds, or `given_up` has become true.
bool wait_for_host_room(int64_t bytes, const std::atomic<bool>& given_up);

// Memory of the host that a GPU can access under the host's own addresses: zeros, whose pages all threads make
// together, and one registration, so that a copy may span any part of it.
class PinnedMemory {
 public:
  // Throws Error(kBadInput) naming the size when the host has too little, or does not pin it.
  explicit PinnedMemory(int64_t bytes);
  ~PinnedMemory();
  PinnedMemory& operator=(PinnedMemory&&) = delete;

  void* data() const { return data_; }

 private:
  void make_pages();

  void* data_ = nullptr;
  int64_t bytes_;
};

// A stream for copies in each direction, and events between them and the device's own stream.
class CudaHostStream final : public HostStream {
 public:
  // `stream` is the device's own.
  CudaHostStream(cudaStream_t stream, size_t num_slots);
  ~CudaHostStream() override;
  CudaHostStream& operator=(CudaHostStream&&) = delete;

  void follow_device() override;
  void load(size_t slot, const std::vector<Copy>& copies) override;
  void wait_loaded(size_t slot) override;
  void save(const std::vector<Copy>& copies, size_t slot) override;
  void wait_saved(size_t slot) override;

 private:
  cudaStream_t stream_, in_ = nullptr, out_ = nullptr;
  cudaEvent_t ready_ = nullptr;              // the device's work that copies follow
  std::vector<cudaEvent_t> loaded_, saved_;  // by slot
  size_t last_saved_ = 0;                    // the slot
};

}  // namespace parka::cuda
