#pragma once
#include <string_view>

#include "core/tensor.h"

namespace parka {
class Device;

// Damages what ops leave in memory, as a faulty GPU would, for drills of the checks that are to notice it
// (Device::set_op_fault).
class OpFault {
 public:
  virtual ~OpFault() = default;
  // An op of this name has been queued. `output` is what it writes (output_of, kernels/op/op.h), never without
  // elements.
  virtual void after(Device& device, std::string_view op, const TensorView& output) = 0;
};

}  // namespace parka
