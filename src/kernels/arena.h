#pragma once
#include "core/memory_plan.h"
#include "kernels/device.h"

namespace parka {

// The one allocation of a run: all tensors of a finished MemoryPlan.
class Arena {
 public:
  // Allocates plan.total_bytes() and zeroes it. Both arguments must outlive the arena.
  Arena(Device& device, const MemoryPlan& plan) : device_(device), plan_(plan) {
    memory_ = static_cast<std::byte*>(device.allocate(plan.total_bytes()));
    device.fill_zero(memory_, plan.total_bytes());
  }
  ~Arena() { device_.release(memory_); }
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
  Device& device_;
  const MemoryPlan& plan_;
  std::byte* memory_;
};

}  // namespace parka
