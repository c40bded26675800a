#pragma once
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <cuda_runtime_api.h>

#include "kernels/device/cuda/pinned_memory.h"
#include "kernels/device/device.h"

namespace parka::cuda {

// Pinned host memory for reuse: taking and freeing it each time would make the host wait for all queued work.
class PinnedPool {
 public:
  struct Memory {
    void* data;
    int64_t bytes;
  };
  PinnedPool() = default;
  ~PinnedPool();
  PinnedPool& operator=(PinnedPool&&) = delete;

  Memory take(int64_t bytes);  // at least as many
  void give_back(const Memory& memory) { free_.push_back(memory); }

 private:
  std::vector<Memory> free_;
};

// State that ops keep with a device from call to call. It ends before the device's stream does.
class KeptByOps {
 public:
  KeptByOps() = default;
  virtual ~KeptByOps() = default;
  KeptByOps& operator=(KeptByOps&&) = delete;
};

// One GPU: a stream in whose order all work runs, the workspace that ops share, and pinned memory through which
// copies pass, so that none of them makes the host wait for queued work.
class CudaDevice final : public Device {
 public:
  // `make_kept` makes what gemm() keeps, once the device is there. Throws Error(kBadInput) for a GPU without code.
  CudaDevice(int ordinal, const std::function<std::unique_ptr<KeptByOps>()>& make_kept);
  ~CudaDevice() override;

  DeviceKind kind() const override { return DeviceKind::kCuda; }
  std::string name() const override { return properties_.name; }
  std::string description() const override;
  std::vector<std::pair<std::string, std::string>> software() const override;
  // True if this build and this GPU have the kernels of gemm/sm90_float8_tiles.cuh.
  bool has_float8_tiles() const;
  bool has_int8_products() const override { return has_float8_tiles(); }
  bool fuses(std::string_view op, int64_t numbers) const override;

  void* allocate(int64_t bytes) override;
  void release(void* memory) override;
  void* allocate_host(int64_t bytes) override;
  void release_host(void* memory) override;
  void set_workspace(void* memory, int64_t bytes) override;

  void copy_to_device(void* target, const void* host, int64_t bytes) override;
  void copy_to_host(void* host, const void* source, int64_t bytes) override;
  std::unique_ptr<HostRead> copy_to_host_later(const void* source, int64_t bytes) override;
  void copy(void* target, const void* source, int64_t bytes) override;
  void fill_zero(void* target, int64_t bytes) override;
  std::unique_ptr<HostStream> make_host_stream(size_t num_slots) override;
  std::unique_ptr<StagingBuffer> make_staging_buffer(int64_t bytes) override;
  void replay(std::unique_ptr<Recording>& recording, const std::function<void()>& work) override;
  std::unique_ptr<Mark> mark() override;
  void synchronize() override;
  MemoryUse memory_use() const override;
  void start_op_timer() override;
  std::vector<OpTime> stop_op_timer() override;

  cudaStream_t stream() const { return stream_; }
  int num_multiprocessors() const { return properties_.multiProcessorCount; }
  const cudaDeviceProp& properties() const { return properties_; }
  // From this compute capability of the running code on, kernels wait for the one before: launch_early().
  static constexpr int kEarlyLaunchVersion = 90;
  bool launches_early() const { return launches_early_; }

  // The first `bytes` of the workspace, for the op at hand alone: the next op may overwrite them. Throws
  // Error(kInternal) naming the op when the workspace is smaller.
  void* workspace(std::string_view op, int64_t bytes) const;

  // kNumCounters zeros on the GPU, kCounterStride numbers apart: apart enough for the GPU to add to several at
  // once. Kernels that count with them leave zeros.
  static constexpr int kNumCounters = 32, kCounterStride = 64;
  unsigned* counters() const { return counters_; }

  KeptByOps& kept_by_gemm() { return *kept_by_gemm_; }

 private:
  // Pinned memory with the event after which it may be written again.
  struct Staging {
    std::byte* memory = nullptr;
    cudaEvent_t free = nullptr;
  };
  Staging& next_staging();

  int ordinal_;
  cudaDeviceProp properties_{};
  bool launches_early_ = false;
  cudaStream_t stream_ = nullptr;
  std::vector<Staging> staging_;
  size_t next_staging_ = 0;
  PinnedPool reads_;                                            // of copy_to_host_later
  std::map<void*, std::unique_ptr<PinnedMemory>> host_memory_;  // by its address
  void* workspace_ = nullptr;
  int64_t workspace_bytes_ = 0;
  unsigned* counters_ = nullptr;
  std::unique_ptr<KeptByOps> kept_by_gemm_;
  std::unique_ptr<OpTimer> timer_;
};

// The device as what it is. The caller is an implementation in kernels/cuda: dispatch has looked at kind().
inline CudaDevice& as_cuda(Device& device) { return static_cast<CudaDevice&>(device); }

}  // namespace parka::cuda
