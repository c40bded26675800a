#pragma once
#include <algorithm>
#include <cstddef>
#include <numeric>
#include <utility>
#include <vector>

#include "core/parameter.h"

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

}  // namespace parka
