#pragma once
#include <algorithm>
#include <cstddef>
#include <vector>

namespace parka {

// For an even number of values, the larger one in the middle. There must be some.
inline double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace parka
