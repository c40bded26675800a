#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "kernels/ops/optimizer/adamw.h"

// DE8, the 8-bit format of other optimizers that Parka's are compared with: dynamic quantization (Dettmers et al.,
// arXiv 2110.02861) with the table of values of bitsandbytes, here in groups of 128 like Parka's moments.
namespace parka::bench {

// The values that a code can have, as fractions of the largest magnitude in the group: 0, 1, and in each of the
// decades (10^-(n+1), 10^-n] for n = 6 to 0 the middles of equal intervals: one in the lowest decade and twice as
// many in every decade above; the same below zero if the format is signed, and without a sign two in the lowest
// decade. 256 values either way; a signed format has 1 but not -1.
class DynamicFloat8 {
 public:
  explicit DynamicFloat8(bool is_signed) {
    constexpr int kDecades = 7;
    values_.reserve(256);
    values_ = {0.0f, 1.0f};
    for (int decade = 0; decade < kDecades; ++decade) {
      const int count = (is_signed ? 1 : 2) << decade;
      const double top = std::pow(10.0, decade - kDecades + 1);
      for (int i = 0; i < count; ++i) {
        const double middle = top * (0.1 + 0.9 * (i + 0.5) / count);
        values_.push_back(static_cast<float>(middle));
        if (is_signed) values_.push_back(static_cast<float>(-middle));
      }
    }
    std::sort(values_.begin(), values_.end());
    smallest_ = *std::upper_bound(values_.begin(), values_.end(), 0.0f);
  }

  const std::vector<float>& values() const { return values_; }  // ascending
  float smallest() const { return smallest_; }                  // above 0

  float nearest(float x) const {
    const auto above = std::lower_bound(values_.begin(), values_.end(), x);
    if (above == values_.end()) return values_.back();
    if (above == values_.begin()) return *above;
    return x - *(above - 1) <= *above - x ? *(above - 1) : *above;
  }

 private:
  std::vector<float> values_;
  float smallest_;
};

// What storing `count` numbers, at most a group, in DE8 and reading them back makes of them. Range expansion is
// Parka's, over half of the format's range: sgn(x) * (|x| / amax)^k is what is rounded, with k = floor(16 log2(R) /
// log2(amax / amin)) / 16 within 1 to 255 / 16. As in Parka, and unlike bitsandbytes, a second moment that is not 0
// is never stored as 0.
inline void store_dynamic_float8(const float* x, int64_t count, bool is_second, bool expanded, float* stored) {
  static const DynamicFloat8 kSigned(true), kUnsigned(false);
  const DynamicFloat8& format = is_second ? kUnsigned : kSigned;
  float amax = 0, amin = 0;  // of the numbers that are not 0
  for (int64_t i = 0; i < count; ++i) {
    const float magnitude = std::abs(x[i]);
    amax = std::max(amax, magnitude);
    if (magnitude != 0 && (amin == 0 || magnitude < amin)) amin = magnitude;
  }
  double k = 1;
  if (expanded && amax > amin) {
    const double exponent = std::floor(16 * -std::log2(2.0 * format.smallest()) / std::log2(double{amax} / amin));
    k = std::clamp(exponent, 16.0, 255.0) / 16;
  }
  for (int64_t i = 0; i < count; ++i) {
    stored[i] = 0;
    if (x[i] == 0) continue;
    const double fraction = std::pow(std::abs(double{x[i]}) / amax, k);
    float code = format.nearest(static_cast<float>(std::copysign(fraction, x[i])));
    if (is_second) code = std::max(code, format.smallest());
    stored[i] = static_cast<float>(std::copysign(amax * std::pow(std::abs(double{code}), 1 / k), code));
  }
}

}  // namespace parka::bench
