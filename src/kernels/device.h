#pragma once
#include <cstdint>
#include <memory>
#include <string>

namespace parka {

enum class DeviceKind { kCpu, kCuda };

// Where tensors live and ops run. Work is queued in order; on the CPU it is done when the call returns.
// A Device is used from one thread.
class Device {
 public:
  virtual ~Device() = default;
  virtual DeviceKind kind() const = 0;
  virtual std::string description() const = 0;  // "CPU, 2 threads"

  // Memory aligned to 256 bytes, contents undefined. Throws Error(kBadInput) naming the size when there is
  // not enough. `release(nullptr)` does nothing.
  virtual void* allocate(int64_t bytes) = 0;
  virtual void release(void* memory) = 0;

  virtual void copy_to_device(void* target, const void* host, int64_t bytes) = 0;
  virtual void copy_to_host(void* host, const void* source, int64_t bytes) = 0;
  virtual void copy(void* target, const void* source, int64_t bytes) = 0;
  virtual void fill_zero(void* target, int64_t bytes) = 0;
  virtual void synchronize() = 0;  // returns when all queued work is done
};

std::unique_ptr<Device> make_cpu_device();

}  // namespace parka
