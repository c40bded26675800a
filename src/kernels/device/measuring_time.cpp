#include "kernels/device/measuring_time.h"

#include <cmath>
#include <cstddef>

namespace parka {

std::vector<double> divide_measuring(const std::vector<Measured>& all, double seconds) {
  std::vector<double> given(all.size()), weights(all.size());
  std::vector<bool> is_full(all.size());
  for (size_t i = 0; i < all.size(); ++i) weights[i] = std::pow(all[i].step_seconds, 2.0 / 3);
  // Time that some do not want is divided among the others, of which some may be full then.
  for (bool changed = true; changed;) {
    changed = false;
    double left = seconds, weight = 0;
    for (size_t i = 0; i < all.size(); ++i) {
      left -= is_full[i] ? all[i].wanted_seconds : 0;
      weight += is_full[i] ? 0 : weights[i];
    }
    for (size_t i = 0; i < all.size(); ++i) {
      if (is_full[i]) continue;
      given[i] = left * weights[i] / weight;
      if (given[i] < all[i].wanted_seconds) continue;
      given[i] = all[i].wanted_seconds;
      is_full[i] = changed = true;
    }
  }
  return given;
}

}  // namespace parka
