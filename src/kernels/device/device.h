#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/tensor.h"
#include "kernels/device/op_timer.h"

namespace parka {

enum class DeviceKind { kCpu, kCuda };

// Bytes on their way from the device to the host.
class HostRead {
 public:
  virtual ~HostRead() = default;
  virtual bool ready() const = 0;
  // The bytes, valid as long as this object; waits for the work queued before the read and for nothing after it.
  virtual const void* wait() = 0;
};

// A moment in the order of queued work, with the device's own time of it.
class Mark {
 public:
  virtual ~Mark() = default;
  // From `earlier`, a mark of the same device, to this one. Waits until both are reached.
  virtual double seconds_since(const Mark& earlier) const = 0;
};

// The record of Device::replay(). It must not outlive its device.
class Recording {
 public:
  virtual ~Recording() = default;
};

// Copies between tensors in host memory (Device::allocate_host) and buffers on the device, through which they pass
// in turn: in both directions at once, and beside the device's ops. It must not outlive its device.
class HostStream {
 public:
  struct Copy {
    void* target;
    const void* source;
    int64_t bytes;
  };
  virtual ~HostStream() = default;  // waits for the copies
  // Later loads wait for the work that the device has queued by now.
  virtual void follow_device() = 0;
  // Queues copies into buffer `slot`: after all copies out of buffers that are queued by then.
  virtual void load(size_t slot, const std::vector<Copy>& copies) = 0;
  // The device's later work waits for the last load of the buffer.
  virtual void wait_loaded(size_t slot) = 0;
  // Queues copies out of buffer `slot`: after the work that the device has queued by then. Who waits for all copies
  // out of buffers at once gives none.
  virtual void save(const std::vector<Copy>& copies, size_t slot = 0) = 0;
  // The device's later work waits for the last save of the buffer, and all before it.
  virtual void wait_saved(size_t slot = 0) = 0;
};

// Host memory in which a device leaves copies of tensors, after the work queued by then and beside what is queued
// later, for other threads to read. It must not outlive its device. All but wait() is for the device's own thread.
class StagingBuffer {
 public:
  virtual ~StagingBuffer() = default;  // waits for the copies
  // Why the host cannot give the memory; empty: it can. Waits until that is known.
  virtual const std::string& failure() = 0;
  // Queues copies of the tensors, of at most the buffer's bytes. Nobody may still read what begin() left before.
  virtual void begin(const std::vector<TensorView>& tensors) = 0;
  // The device's later work waits until tensor `index` of begin() is copied.
  virtual void order_after(size_t index) = 0;
  // Returns when it is copied: its bytes, valid until the next begin(). For any thread.
  virtual std::span<const std::byte> wait(size_t index) = 0;

  // Bytes of a buffer that tensors of so many bytes take, each by itself.
  static constexpr int64_t kAlignment = 256;
  static int64_t place_of(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }
};

// Holds tensors and runs ops, from one thread. Work is queued in order; on the CPU it is done on return.
class Device {
 public:
  virtual ~Device() = default;
  virtual DeviceKind kind() const = 0;
  virtual std::string name() const = 0;         // of the product: "NVIDIA H200", "CPU"
  virtual std::string description() const = 0;  // "CPU, 2 threads"
  // The software that runs it, by name: {"driver", "580.159.04"}, {"cuda", "13.0"}; nothing for the CPU.
  virtual std::vector<std::pair<std::string, std::string>> software() const { return {}; }

  // Memory aligned to 256 bytes, contents undefined. Throws Error(kBadInput) naming the size when there is
  // not enough. `release(nullptr)` does nothing.
  virtual void* allocate(int64_t bytes) = 0;
  virtual void release(void* memory) = 0;

  // Memory of the host that ops and copies of this device take like the device's own, but at the speed of the link
  // between them; aligned to 256 bytes, zeros. Throws Error(kBadInput) naming the size when the host has too
  // little. Release waits for queued work that uses it; of nullptr it does nothing.
  virtual void* allocate_host(int64_t bytes) = 0;
  virtual void release_host(void* memory) = 0;

  // Scratch memory for ops, which use it in turn: what they keep in it is of no use to the next op. It must hold
  // what the largest op needs (workspace_of()), stay allocated, and be set before the first op. The CPU needs none.
  virtual void set_workspace(void* memory, int64_t bytes) = 0;

  // `host` may be changed as soon as the call returns, though the copy itself is queued.
  virtual void copy_to_device(void* target, const void* host, int64_t bytes) = 0;
  // Waits for the bytes.
  virtual void copy_to_host(void* host, const void* source, int64_t bytes) = 0;
  // Queues the copy and does not wait.
  virtual std::unique_ptr<HostRead> copy_to_host_later(const void* source, int64_t bytes) = 0;
  virtual void copy(void* target, const void* source, int64_t bytes) = 0;
  virtual void fill_zero(void* target, int64_t bytes) = 0;

  // For `num_slots` buffers. replay() cannot record its copies.
  virtual std::unique_ptr<HostStream> make_host_stream(size_t num_slots) = 0;

  // Returns at once: memory that takes long to get is made ready in a thread.
  virtual std::unique_ptr<StagingBuffer> make_staging_buffer(int64_t bytes) = 0;

  // Queues `work`, which must queue the same ops and copies within the device whenever it is called with the same
  // `recording` (empty at first). A device may record that, and queue the recording the next time.
  virtual void replay(std::unique_ptr<Recording>& recording, const std::function<void()>& work) = 0;

  virtual std::unique_ptr<Mark> mark() = 0;
  virtual void synchronize() = 0;  // returns when all queued work is done

  struct MemoryUse {
    int64_t total_bytes = 0;  // of the device; 0 where that is not known
    int64_t free_bytes = 0;
  };
  virtual MemoryUse memory_use() const = 0;

  // From start to stop every op is timed, and nothing is replayed. Stopping waits for the device.
  virtual void start_op_timer() = 0;
  virtual std::vector<OpTime> stop_op_timer() = 0;
  // Ops report to it; nullptr: to nobody.
  OpTimer* op_timer() const { return op_timer_; }
  // Says which part of a step the following ops belong to.
  void section(StepSection section) {
    section_ = section;
    if (op_timer_ != nullptr) op_timer_->section = section;
  }
  StepSection section() const { return section_; }
  // Calls `wait`, which makes the device's later work wait for `what`, and has it timed.
  template <typename Wait>
  void time_wait(const char* what, const Wait& wait) {
    if (op_timer_ != nullptr) op_timer_->begin(kWaitOp, {.shape = what});
    wait();
    if (op_timer_ != nullptr) op_timer_->end();
  }

  // Ops are told to it instead of being run; nullptr: they are run.
  OpRecorder* op_recorder() const { return op_recorder_; }

  // True if the op of this name, a GEMM of so many numbers and what reads it, is better one kernel here.
  virtual bool fuses(std::string_view /*op*/, int64_t /*numbers*/) const { return false; }
  // True if it runs gemm_int8().
  virtual bool has_int8_products() const { return true; }

 protected:
  OpTimer* op_timer_ = nullptr;
  OpRecorder* op_recorder_ = nullptr;
  StepSection section_ = StepSection::kNone;
};

std::unique_ptr<Device> make_cpu_device();

// GPUs that this program can use: 0 without a driver, and where it was built without CUDA.
int num_cuda_devices();
// One line for each of these: "NVIDIA H200, compute capability 9.0, 141 GB, driver 580.159.04".
std::vector<std::string> describe_cuda_devices();
// The version of CUDA that this program was built with, "13.0", and the architectures that it has code for,
// "80,89,90a,90-virtual"; empty without CUDA.
std::string cuda_version();
std::string cuda_architectures();
// Throws Error(kBadInput) when there is no such GPU, or none that this build has code for.
std::unique_ptr<Device> make_cuda_device(int ordinal = 0);

}  // namespace parka
