#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "bench/activation_error.h"
#include "core/number_formats.h"

// The rounding rules of COAT that differ from Parka's (docs/results/paper.md, "Where coat is not COAT"), beside
// Parka's: both in plain loops, to compare their errors. Used by the program of the same name and by its test.
namespace parka::bench {

enum class ScaleRule : uint8_t {
  kParka,  // amax / max; of a group rounded up to bf16 before it is divided by, of a tensor in fp32
  kCoat,   // (amax + 1e-10) / max is divided by, and what it is rounded to in bf16, to nearest, is stored
};

inline float as_bf16(float x) { return decode_bf16(encode_bf16(x)); }

inline std::vector<float> as_bf16(std::vector<float> values) {
  for (float& x : values) x = as_bf16(x);
  return values;
}

template <const Float8Traits& kFormat>
float nearest_code(float x) {
  if constexpr (&kFormat == &kE4M3Traits) return decode_e4m3(encode_e4m3(x));
  return decode_e5m2(encode_e5m2(x));
}

// x as it is read back after FP8 with one scale for each `group` consecutive numbers; 0: one for all. COAT divides
// a tensor by the bf16 scale that is stored, and a group by the fp32 one.
template <const Float8Traits& kFormat>
std::vector<float> stored_by(ScaleRule rule, const std::vector<float>& x, int64_t group) {
  const auto count = static_cast<int64_t>(x.size()), size = group == 0 ? count : group;
  std::vector<float> stored(x.size());
  for (int64_t begin = 0; begin < count; begin += size) {
    const int64_t end = std::min(begin + size, count);
    float amax = 0;
    for (int64_t i = begin; i < end; ++i) amax = std::max(amax, std::abs(x[i]));
    float divisor = amax / kFormat.max, scale = divisor;
    if (rule == ScaleRule::kCoat) {
      divisor = (amax + 1e-10f) / kFormat.max;
      scale = as_bf16(divisor);
      if (group == 0) divisor = scale;
    } else if (group != 0) {
      divisor = scale = decode_bf16(encode_bf16_round_up(scale));
    }
    if (rule == ScaleRule::kParka && amax < 0x1p-100f) continue;  // zeros
    for (int64_t i = begin; i < end; ++i) stored[i] = nearest_code<kFormat>(x[i] * (1 / divisor)) * scale;
  }
  return stored;
}

// Adds what becomes of `values`.
inline void add_stored(const std::vector<float>& values, const std::vector<float>& stored, CodeErrors& errors) {
  for (size_t i = 0; i < values.size(); ++i) errors.add(values[i], stored[i]);
}

}  // namespace parka::bench
