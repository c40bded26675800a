#pragma once
#include <algorithm>
#include <cstddef>
#include <numeric>
#include <utility>
#include <vector>

#include "core/parameter.h"

// The places of parameters and their gradients in memory: their order, and for each unit one of the gradient
// buffers. Gathering and reducing for one unit runs while the next computes, so two buffers in turn are enough.
namespace parka {

// The order in which weights, and gradients, lie in memory: that of the table, but A of a unit's adapters first. So
// those of a layer, which are multiplied as one matrix, lie one after the other.
inline std::vector<size_t> memory_order(const std::vector<ParameterInfo>& parameters) {
  std::vector<size_t> order(parameters.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::ranges::stable_sort(order, {}, [&](size_t i) {
    return std::pair(parameters[i].unit, parameters[i].role != ParameterRole::kAdapterIn);
  });
  return order;
}

// Buffers of gathered weights: for the current block and for the next one.
inline constexpr int kGatherBuffers = 2;
inline size_t gather_buffer_of(int unit) { return static_cast<size_t>(unit % kGatherBuffers); }

// Whole gradients before they are reduced (stages 2 and 3), or weights are updated with them
// (optimizer.release_gradients). The gradient of a tied embedding is open from the head to the end of backward,
// beside those of all other units: it has the last buffer. The others take two in turn, or one where a rank without
// others releases them, as nothing goes on with a unit's then while the next computes.
inline constexpr size_t kGradientBuffers = 3;

}  // namespace parka
