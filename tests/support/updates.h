#pragma once
#include "optim/optimizer.h"

namespace parka {

// The parts of an update of one rank, which sums over none.
inline PendingStep queue_step(Optimizer& optimizer, Device& device, const Optimizer::Update& update) {
  optimizer.begin_update(device);
  optimizer.queue_squares(device);
  optimizer.queue_coefficient(device, update.step, {});
  for (const size_t i : optimizer.update_order()) optimizer.queue_update(device, update, i);
  return optimizer.end_step(device);
}

// The same of one unit, where gradients are released, between begin_update() and end_step().
inline void queue_unit(Optimizer& optimizer, Device& device, const Optimizer::Update& update, int unit) {
  optimizer.queue_squares(device, unit);
  optimizer.queue_coefficient(device, update.step, {}, unit);
  for (size_t i = 0; i < optimizer.parameters().size(); ++i) {
    if (optimizer.parameters()[i].trainable && optimizer.parameters()[i].unit == unit) {
      optimizer.queue_update(device, update, i);
    }
  }
}

}  // namespace parka
