#pragma once

namespace parka {
class Device;

// Called around the units of a model (ParameterInfo::unit) as forward and backward reach them: divided weights and
// gradients are gathered and reduced here. The calls come in a fixed order, and queue work on the device.
class UnitHooks {
 public:
  virtual ~UnitHooks() = default;
  // The unit's weights are about to be read.
  virtual void before_forward(Device& device, int unit) = 0;
  // The same, and its gradients are about to be written or added to.
  virtual void before_backward(Device& device, int unit) = 0;
  // This micro-batch has added all that it adds to the unit's gradients.
  virtual void after_backward(Device& device, int unit) = 0;
};

}  // namespace parka
