#pragma once
#include <algorithm>
#include <string>
#include <vector>

#include "core/split_float.h"
#include "optim/optimizer.h"

namespace parka {

inline void queue_group(Optimizer& optimizer, Device& device, const Update& update, const UpdateGroup& group) {
  if (!group.owned.empty()) {
    optimizer.queue_directions(device, update, group);
    optimizer.orthogonalize(device, group);
  }
  optimizer.queue_update(device, update, group);
}

// The parts of an update of one rank, which sums over none.
inline PendingStep queue_step(Optimizer& optimizer, Device& device, const Update& update) {
  optimizer.begin_update(device);
  optimizer.queue_squares(device);
  optimizer.queue_coefficient(device, update.step, {});
  for (const UpdateGroup& group : optimizer.groups()) queue_group(optimizer, device, update, group);
  return optimizer.end_step(device);
}

// The same of one unit, where gradients are released, between begin_update() and end_step().
inline void queue_unit(Optimizer& optimizer, Device& device, const Update& update, int unit) {
  optimizer.queue_squares(device, unit);
  optimizer.queue_coefficient(device, update.step, {}, unit);
  for (const UpdateGroup& group : optimizer.groups()) {
    if (group.unit == unit) queue_group(optimizer, device, update, group);
  }
}

// The exact masters of what a rank has of parameter `i`, whose weights these are, as fp32. Its weights where there
// are none.
inline std::vector<float> master_weight(Device& device, const Optimizer& optimizer, size_t i,
                                        const TensorView& weight) {
  device.synchronize();
  std::vector<float> values(static_cast<size_t>(weight.numel()));
  if (weight.dtype == DType::kF32) {
    device.copy_to_host(values.data(), weight.data, weight.bytes());
    return values;
  }
  std::vector<BFloat16> high(values.size());
  device.copy_to_host(high.data(), weight.data, weight.bytes());
  std::transform(high.begin(), high.end(), values.begin(), decode_bf16);
  const auto join = [&](auto low, const TensorView& master, const auto& join_element) {
    std::vector<decltype(low)> remainders(values.size());
    device.copy_to_host(remainders.data(), master.data, master.bytes());
    std::transform(high.begin(), high.end(), remainders.begin(), values.begin(), join_element);
  };
  for (const NamedTensor& tensor : optimizer.state()) {
    if (tensor.name != optimizer.parameters()[i].name + ".master") continue;
    if (tensor.view.dtype == DType::kU8) {
      join(uint8_t{}, tensor.view, join_float24);
    } else {
      join(uint16_t{}, tensor.view, join_float);
    }
  }
  return values;
}

}  // namespace parka
