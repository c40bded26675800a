#pragma once
#include <array>
#include <memory>
#include <vector>

#include "core/memory/memory_plan.h"
#include "kernels/device/arena.h"
#include "kernels/device/device.h"

namespace parka {

// Blocks that share two buffers in turn for the activations that they save. After a block's forward its activations
// go to host memory, unless the buffer stays as it is until its backward, and come back ahead of that.
class ActivationOffload {
 public:
  // `offload_blocks` of num_blocks blocks go to the host; they and two more share the buffers, evenly spread over
  // the model, so that copies have the time of the blocks between. 0: none, and nothing below does anything. Blocks
  // below `first_kept` keep nothing for backward; where they do, no more go than the others are beside two.
  ActivationOffload(int64_t num_blocks, int64_t offload_blocks, int64_t first_kept = 0);

  static constexpr int64_t kBuffers = 2;

  // The block whose buffer block l takes over; -1 if l has a place of its own, or is the first in a buffer.
  int64_t block_before(int64_t l) const;
  // Names tensors of block l's buffer that no block before it uses: where less of one is frozen, it keeps more.
  // Without effect for blocks outside of buffers.
  void add_to_buffer(int64_t l, const std::vector<TensorId>& tensors);

  bool moves_blocks() const { return num_moved_ > 0; }
  int64_t host_bytes(const MemoryPlan& plan) const;
  // Allocates the host's memory. `arena` holds the buffers.
  void bind(Device& device, const Arena& arena);

  // To be called around each block as a training micro-batch reaches it, in order.
  void before_forward(Device& device, int64_t l) const;
  void after_forward(int64_t l) const;
  void before_backward(Device& device, int64_t l) const;
  void after_backward(int64_t l) const;

 private:
  struct Buffer {
    std::vector<TensorId> ids;
    std::vector<TensorView> tensors;
  };
  int64_t place_of(int64_t l) const { return places_[static_cast<size_t>(l)]; }
  // The same for copies; -1 on a device that records, which is told of none.
  int64_t moved_place_of(int64_t l) const { return copies_ != nullptr ? place_of(l) : -1; }
  static size_t slot_of(int64_t place) { return static_cast<size_t>(place % kBuffers); }
  std::vector<HostStream::Copy> copies_of(int64_t place, bool to_host) const;
  const Buffer& buffer(int64_t place) const { return buffers_[slot_of(place)]; }

  int64_t num_moved_;
  std::vector<int64_t> blocks_;  // that share buffers, in the model's order; the last two are not moved
  std::vector<int64_t> places_;  // of every block in `blocks_`; -1: it is none of them
  std::array<Buffer, kBuffers> buffers_;
  std::vector<int64_t> offsets_;  // of moved blocks in `memory_`
  std::unique_ptr<HostMemory> memory_;
  std::unique_ptr<HostStream> copies_;
};

}  // namespace parka
