#pragma once
#include <functional>
#include <utility>

#include "core/memory/memory_plan.h"
#include "kernels/device/device.h"

namespace parka {

// The category of a memory plan with the workspace of ops, Device::set_workspace().
inline constexpr const char* kWorkspaceCategory = "workspace of GPU kernels";

// Memory of the host that a device takes like its own (Device::allocate_host()); none for 0 bytes.
struct HostMemory {
  HostMemory(Device& device_, int64_t bytes)
      : device(device_), memory(bytes > 0 ? static_cast<std::byte*>(device.allocate_host(bytes)) : nullptr) {}
  ~HostMemory() { device.release_host(memory); }
  HostMemory& operator=(HostMemory&&) = delete;

  Device& device;
  std::byte* memory;
};

// The memory of a run, one allocation on the device and one beside it: all tensors of a finished MemoryPlan.
class Arena {
 public:
  // The source of the device's memory; `release` waits for queued work that uses it.
  struct Source {
    std::function<void*(int64_t bytes)> allocate;
    std::function<void(void* memory)> release;
  };

  // Allocates plan.total_bytes() and plan.total_host_bytes(), and zeroes both. All arguments must outlive it.
  Arena(Device& device, const MemoryPlan& plan)
      : Arena(device, plan,
              {[&device](int64_t bytes) { return device.allocate(bytes); },
               [&device](void* memory) { device.release(memory); }}) {}
  Arena(Device& device, const MemoryPlan& plan, Source source)
      : plan_(plan), source_(std::move(source)), host_(device, plan.total_host_bytes()) {
    memory_ = static_cast<std::byte*>(source_.allocate(plan.total_bytes()));
    device.fill_zero(memory_, plan.total_bytes());
  }
  ~Arena() { source_.release(memory_); }
  Arena& operator=(Arena&&) = delete;

  // The tensor's view; an empty view for an id that is not valid().
  TensorView operator[](TensorId id) const {
    if (!id.valid()) return {};
    const MemoryPlan::Entry& entry = plan_[id];
    TensorView view;
    view.data = (entry.place == MemoryPlace::kHost ? host_.memory : memory_) + entry.offset;
    view.dtype = entry.dtype;
    view.rank = static_cast<int>(entry.shape.size());
    for (int i = 0; i < view.rank; ++i) view.dim[i] = entry.shape[i];
    return view;
  }

  Device& device() const { return host_.device; }
  // For a tensor of this arena, or a part of one.
  bool is_in_host_memory(const TensorView& tensor) const {
    const auto* const at = static_cast<const std::byte*>(tensor.data);
    return host_.memory != nullptr && at >= host_.memory && at < host_.memory + plan_.total_host_bytes();
  }

 private:
  const MemoryPlan& plan_;
  Source source_;
  HostMemory host_;
  std::byte* memory_;
};

}  // namespace parka
