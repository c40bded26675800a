#include "engine/step/released_updates.h"

namespace parka {

void ReleasedUpdates::before_forward(Device& device, int unit) {
  if (exchange_ != nullptr) exchange_->before_forward(device, unit);
}

void ReleasedUpdates::before_backward(Device& device, int unit) {
  if (exchange_ != nullptr) exchange_->before_backward(device, unit);
}

void ReleasedUpdates::after_backward(Device& device, int unit) {
  for (int parameter : table_.trained(unit)) {
    if (gradient_complete_) gradient_complete_(parameter);
  }
  if (!are_several_) {
    update(device, unit);
    if (exchange_ != nullptr) exchange_->after_backward(device, unit);
  } else {
    // Ahead of this unit's reduction, which the sums of numbers over ranks would have to wait for.
    if (unit != table_.head_unit()) update(device, unit + 1);
    exchange_->after_backward(device, unit);
    if (unit == table_.first_trained_unit) update(device, unit);
  }
  if (unit != table_.first_trained_unit) return;
  if (!is_held_) arguments_.reset();
  is_held_ = false;
}

void ReleasedUpdates::update(Device& device, int unit) {
  if (!arguments_ || is_held_) return;
  const StepSection backward = device.section();
  device.section(StepSection::kOptimizer);
  if (are_several_) exchange_->wait_for_gradients(device, unit);
  if (unit == table_.head_unit()) optimizer_.begin_update(device, arguments_->sums);
  optimizer_.step_unit(device, arguments_->update, unit, arguments_->sums, arguments_->before_update);
  device.section(backward);
}

}  // namespace parka
