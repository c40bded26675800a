#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include <cuda_runtime_api.h>

#include "kernels/device/device.h"

namespace parka::cuda {

// Pinned memory, a stream for copies out of a GPU, and a thread that pins the memory, a chunk at a time, and then
// queues the copies, a few at a time: with a full queue the driver would keep the ops' thread waiting.
class CudaStaging final : public StagingBuffer {
 public:
  // `stream` is the device's own.
  CudaStaging(int ordinal, cudaStream_t stream, int64_t bytes);
  ~CudaStaging() override;
  CudaStaging& operator=(CudaStaging&&) = delete;

  const std::string& failure() override;
  void begin(const std::vector<TensorView>& tensors) override;
  void order_after(size_t index) override;
  std::span<const std::byte> wait(size_t index) override;

 private:
  struct Copy {
    const std::byte* source;
    int64_t at, count;
  };
  // Copies that share an event.
  struct Group {
    std::vector<Copy> copies;
    int64_t bytes = 0;
  };
  struct Staged {
    std::span<const std::byte> bytes;
    size_t group;
  };

  void work();
  std::string prepare();
  std::string pin(int64_t begin, int64_t count);
  void release_memory();
  void queue(const Copy& copy);
  void queue_groups(std::unique_lock<std::mutex>& lock);
  // Waits until the event of a group is recorded; what the thread has met with is thrown here.
  cudaEvent_t recorded(size_t group);

  int ordinal_;
  cudaStream_t stream_, copies_ = nullptr;
  cudaEvent_t ready_ = nullptr;
  int64_t bytes_;
  std::byte* memory_ = nullptr;
  int64_t pinned_bytes_ = 0;
  std::string failure_;
  std::vector<Staged> staged_;
  std::vector<cudaEvent_t> events_;  // of the groups; used again

  std::mutex mutex_;  // of what follows
  std::condition_variable changed_;
  std::atomic<bool> stopping_{false};
  bool prepared_ = false;
  std::vector<Group> groups_;
  size_t num_recorded_ = 0;  // groups whose events are
  std::exception_ptr error_;
  std::thread thread_;  // last: it uses everything above
};

}  // namespace parka::cuda
