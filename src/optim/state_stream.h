#pragma once
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "core/tensor.h"
#include "kernels/device/arena.h"
#include "kernels/device/device.h"
#include "optim/rules/update_rule.h"

namespace parka {

// Carries what parameters have in host memory through buffers on the device, where they are updated, and back: part
// after part of a parameter, in a ring of buffers. While one part is updated, the next ones come in and the last
// one goes out, so that the link works in both directions.
class StateStream {
 public:
  static constexpr size_t kLeastSlots =
      3;  // buffers: for a part that comes in, one that is updated, one that goes out
  // Elements of a part: enough that a copy takes much longer than it takes to start.
  static constexpr int64_t kPartElements = int64_t{1} << 24;

  // The names of the device's waits for copies where ops are timed.
  static constexpr const char *kLoadWait = "states from the host", *kSaveWait = "states to the host";

  // Bytes that tensors of a part take of a buffer, given the bytes of each.
  static int64_t slot_bytes(const std::vector<int64_t>& tensors);

  // `states[i]` is what the update of parameter i takes, a tensor each on the device or in host memory of the
  // arena, and empty where nothing is updated. `slots` are at least kLeastSlots buffers, for parts of
  // `part_elements`, which is a multiple of kMomentGroup. All are filled ahead.
  StateStream(const Arena& arena, std::vector<TensorView> slots, std::vector<ParameterState> states,
              int64_t part_elements);

  // Before the updates of a step: parameters will be updated in this order, which may leave some out. Begins to
  // load them, after the work that the device has queued by now. From here to end() nobody else may write what is
  // in host memory.
  void begin(const std::vector<size_t>& order);
  // Calls `queue` for the parts of parameter i, one after another, to queue what updates elements `first` and
  // following of it: `part` is on the device. Queued work may also read what the update has written. Parameters
  // that come in another order than begin() was told are updated all the same, more slowly.
  using QueueUpdate = std::function<void(int64_t first, const ParameterState& part)>;
  void update(size_t i, const QueueUpdate& queue);
  // The device's later work finds the results in host memory.
  void end();

 private:
  struct Part {
    size_t parameter;
    int64_t first, count;
  };
  struct Loaded {
    size_t part, slot;
  };
  // A tensor of a part in host memory and its place in a buffer.
  struct Carried {
    TensorView host, on_device;
  };
  void load(size_t part);
  void load_ahead();
  Loaded take(size_t part);
  // The part with what is in host memory replaced by its places in buffer `slot`, which are listed.
  ParameterState place(const Part& part, size_t slot, std::vector<Carried>& carried) const;
  bool is_carried(size_t i) const { return first_part_[i] != first_part_[i + 1]; }

  const Arena& arena_;
  std::vector<TensorView> slots_;
  std::vector<ParameterState> states_;
  std::vector<Part> parts_;         // of parameters with something in host memory
  std::vector<size_t> first_part_;  // of each parameter, and the end
  std::unique_ptr<HostStream> copies_;
  std::vector<size_t> order_;  // of the step's parts
  size_t next_ = 0;            // of them: to be loaded
  std::deque<Loaded> loaded_;  // and not taken yet
  size_t num_loads_ = 0;
};

}  // namespace parka
