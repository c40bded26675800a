#pragma once
#include <bit>
#include <cstdint>

namespace parka {

// IEEE 754 binary16. Parka only converts it, because some models of other programs are stored in it.
struct Float16 {
  uint16_t bits;
};

// Rounds to nearest, ties to even; 65520 and above become infinity.
inline Float16 encode_fp16(float x) {
  constexpr uint32_t kInfinity = 0x7f800000, kOverflow = 0x477ff000, kMinNormal = 0x38800000;
  const uint32_t u = std::bit_cast<uint32_t>(x), sign = (u >> 16) & 0x8000u, magnitude = u & 0x7fffffffu;
  uint32_t code;
  if (magnitude > kInfinity) {
    code = 0x7e00;
  } else if (magnitude >= kOverflow) {
    code = 0x7c00;
  } else if (magnitude >= kMinNormal) {
    const uint32_t rebiased = magnitude - ((127u - 15u) << 23);
    code = (rebiased + 0xfffu + ((rebiased >> 13) & 1u)) >> 13;
  } else {
    // The last place of 0.5f is the smallest binary16: the adder rounds.
    code = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - std::bit_cast<uint32_t>(0.5f);
  }
  return {static_cast<uint16_t>(sign | code)};
}

inline float decode_fp16(Float16 x) {
  const uint32_t sign = (x.bits & 0x8000u) << 16, exponent = (x.bits >> 10) & 0x1fu, mantissa = x.bits & 0x3ffu;
  if (exponent == 0) {
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(magnitude));
  }
  const uint32_t exponent32 = exponent == 0x1f ? 0xffu : exponent + (127u - 15u);
  return std::bit_cast<float>(sign | exponent32 << 23 | mantissa << 13);
}

}  // namespace parka
