#pragma once
#include <cstdint>

#include "core/tensor.h"

namespace parka {
class Device;

// Exchanges tensors between the ranks that share each sequence (context parallelism). Each of C ranks works on a
// slice of sequence_length consecutive tokens. Attention alone needs the others: before it the ranks exchange
// slices with all heads for whole sequences with a C-th of the heads, and after it the other way, as
// DeepSpeed-Ulysses does (Jacobs et al. 2023, arXiv 2309.14509).
class ContextExchange {
 public:
  virtual ~ContextExchange() = default;
  // Which slice of the sequences this rank has, 0 to BatchShape::context_size - 1.
  virtual int64_t place() const = 0;
  // out [B, C, n]: block p of each row is what the rank with slice p has as block place() of that row of its `in`,
  // of the same shape and format. Queued after the device's work by then, and the device's later work waits for
  // it. All C ranks make the same calls in the same order.
  virtual void all_to_all(Device& device, const TensorView& in, const TensorView& out) = 0;
};

}  // namespace parka
