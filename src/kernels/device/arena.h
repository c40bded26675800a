#pragma once
#include <functional>
#include <utility>

#include "core/memory_plan.h"
#include "kernels/device/device.h"

namespace parka {

// The category of a memory plan with the workspace of ops, Device::set_workspace().
inline constexpr const char* kWorkspaceCategory = "workspace of GPU kernels";

// The one allocation of a run: all tensors of a finished MemoryPlan.
class Arena {
 public:
  // Where the memory comes from; `release` waits for queued work that uses it.
  struct Source {
    std::function<void*(int64_t bytes)> allocate;
    std::function<void(void* memory)> release;
  };

  // Allocates plan.total_bytes() and zeroes it. All arguments must outlive the arena.
  Arena(Device& device, const MemoryPlan& plan)
      : Arena(device, plan,
              {[&device](int64_t bytes) { return device.allocate(bytes); },
               [&device](void* memory) { device.release(memory); }}) {}
  Arena(Device& device, const MemoryPlan& plan, Source source) : plan_(plan), source_(std::move(source)) {
    memory_ = static_cast<std::byte*>(source_.allocate(plan.total_bytes()));
    device.fill_zero(memory_, plan.total_bytes());
  }
  ~Arena() { source_.release(memory_); }
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // The tensor's view; an empty view for an id that is not valid().
  TensorView operator[](TensorId id) const {
    if (!id.valid()) return {};
    const MemoryPlan::Entry& entry = plan_[id];
    TensorView view;
    view.data = memory_ + entry.offset;
    view.dtype = entry.dtype;
    view.rank = static_cast<int>(entry.shape.size());
    for (int i = 0; i < view.rank; ++i) view.dim[i] = entry.shape[i];
    return view;
  }

 private:
  const MemoryPlan& plan_;
  Source source_;
  std::byte* memory_;
};

}  // namespace parka
