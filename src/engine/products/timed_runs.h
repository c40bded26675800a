#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>

#include "kernels/device/device.h"

namespace parka {

// The device's seconds for each run(), of `count` in a row.
template <typename Run>
double seconds_of_each(Device& device, int64_t count, const Run& run) {
  const std::unique_ptr<Mark> begin = device.mark();
  for (int64_t i = 0; i < count; ++i) run();
  return device.mark()->seconds_since(*begin) / static_cast<double>(count);
}

// How many runs of `seconds_of_run` take at least `seconds`; one and more.
inline int64_t runs_in(double seconds, double seconds_of_run) {
  return std::max<int64_t>(1, std::llround(std::ceil(seconds / std::max(seconds_of_run, 1e-6))));
}

}  // namespace parka
