#pragma once
#include <atomic>
#include <cstdint>
#include <future>
#include <span>
#include <string>
#include <vector>

#include <cuda_runtime_api.h>

#include "kernels/device.h"

namespace parka::cuda {

// Pinned memory and a stream for copies out of a GPU. The memory is mapped at once and pinned by a thread, a chunk
// at a time, so that neither the start of a run nor its first steps wait for tens of gigabytes.
class CudaStaging final : public StagingBuffer {
 public:
  // `stream` is the device's own.
  CudaStaging(int ordinal, cudaStream_t stream, int64_t bytes);
  ~CudaStaging() override;
  CudaStaging(const CudaStaging&) = delete;
  CudaStaging& operator=(const CudaStaging&) = delete;

  const std::string& failure() override;
  void begin(const std::vector<TensorView>& tensors) override;
  void order_after(size_t index) override;
  std::span<const std::byte> wait(size_t index) override;

 private:
  struct Copied {
    std::span<const std::byte> bytes;
    size_t event;  // its number, after which they are there
  };
  void copy(const std::byte* source, int64_t at, int64_t count);
  cudaEvent_t event(size_t number);
  std::string prepare();
  std::string pin(int64_t begin, int64_t count);
  void release_memory();

  int ordinal_;
  cudaStream_t stream_, copies_ = nullptr;
  cudaEvent_t ready_ = nullptr;
  int64_t bytes_;
  std::byte* memory_ = nullptr;
  int64_t pinned_bytes_ = 0;
  std::vector<Copied> copied_;
  std::vector<cudaEvent_t> events_;  // used again
  std::atomic<bool> stopping_{false};
  std::future<std::string> preparing_;
  std::string failure_;
};

}  // namespace parka::cuda
