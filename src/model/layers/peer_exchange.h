#pragma once
#include <cstdint>

#include "core/accumulation.h"
#include "core/tensor.h"

namespace parka {
class Device;

// Exchanges tensors between ranks that share a part of the model's work. All of them make the same calls in the
// same order, with the same sizes.
//
// Context parallelism: each of C ranks works on a slice of sequence_length consecutive tokens. Attention alone
// needs the others: before it the ranks exchange slices with all heads for whole sequences with a C-th of the
// heads, and after it the other way, as DeepSpeed-Ulysses does (Jacobs et al. 2023, arXiv 2309.14509).
//
// Expert parallelism: each of P ranks has tokens of its own and E / P whole experts of each mixture. It gets the
// tokens of all, and returns to each rank the sums of what its experts make of them.
class PeerExchange {
 public:
  virtual ~PeerExchange() = default;
  // This rank's place among them: which slice of the sequences it has, or which experts.
  virtual int64_t place() const = 0;
  // out [B, C, n]: block p of each row is what the rank at place p has as block place() of that row of its `in`, of
  // the same shape and format. Queued after the device's work by then, and the device's later work waits for it.
  virtual void all_to_all(Device& device, const TensorView& in, const TensorView& out) = 0;
  // As Communicator's. The device's later work goes on beside them until it waits, for all by then.
  virtual void all_gather(Device& device, const TensorView& in, const TensorView& out) = 0;
  virtual void reduce_scatter(Device& device, const TensorView& in, const TensorView& out,
                              Accumulation accumulation) = 0;
  virtual void wait(Device& device) = 0;
};

}  // namespace parka
