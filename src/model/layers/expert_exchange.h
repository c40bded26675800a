#pragma once
#include "core/accumulation.h"
#include "core/tensor.h"

namespace parka {
class Device;

// Exchanges tensors between the ranks that divide the experts of mixtures (expert parallelism). Each of P ranks
// has tokens of its own and E / P whole experts: it gets the tokens of all, and returns to each rank the sums of
// what its experts make of them. All P ranks make the same calls in the same order, with the same sizes.
class ExpertExchange {
 public:
  virtual ~ExpertExchange() = default;
  // Queued after the device's work by then; its later work goes on beside them until it waits. See Communicator.
  virtual void all_gather(Device& device, const TensorView& in, const TensorView& out) = 0;
  virtual void reduce_scatter(Device& device, const TensorView& in, const TensorView& out,
                              Accumulation accumulation) = 0;
  // Makes the device's later work wait for all exchanges by then.
  virtual void wait(Device& device) = 0;
};

}  // namespace parka
