#include "core/formats_4bit.h"

#include <algorithm>
#include <cmath>

namespace parka {
namespace {

// Edge i of n equal divisions of [0.1, 1], as PyTorch's linspace computes it: from the nearer end.
float edge(int i, int n) {
  const float first = 0.1f, last = 1.0f, step = (last - first) / static_cast<float>(n);
  return i < (n + 1) / 2 ? std::fma(step, static_cast<float>(i), first)
                         : std::fma(-step, static_cast<float>(n - i), last);
}

// 0, 1, and the midpoints of 2^k divisions times 10^(k - 6), with both signs.
DynamicMap make_dynamic_map() {
  constexpr int kDecades = 7;
  DynamicMap map = {0.0f, 1.0f};
  size_t filled = 2;
  for (int k = 0; k < kDecades; ++k) {
    const auto scale = static_cast<float>(std::pow(10.0, k - (kDecades - 1)));
    const int n = 1 << k;
    for (int i = 0; i < n; ++i) {
      const float value = (edge(i, n) + edge(i + 1, n)) / 2 * scale;
      map[filled++] = value;
      map[filled++] = -value;
    }
  }
  std::ranges::sort(map);
  return map;
}

}  // namespace

const DynamicMap& dynamic_map() {
  static const DynamicMap map = make_dynamic_map();
  return map;
}

}  // namespace parka
