#pragma once
#include <bit>
#include <cmath>
#include <cstdint>

// Software forms of the number formats of the GPU, bit-identical to CUDA's conversions
// (cuda_bf16.h, cuda_fp8.h with __NV_SATFINITE): round to nearest even, FP8 saturates at its largest
// finite value, every NaN becomes one canonical NaN. All functions are branch-light so that compilers
// vectorise loops over them.
namespace parka {

struct BFloat16 {
  uint16_t bits;
};

// 1 sign, 4 exponent, 3 mantissa bits, bias 7; no infinity; 0x7f and 0xff are NaN.
struct Float8E4M3 {
  uint8_t bits;
};

// 1 sign, 5 exponent, 2 mantissa bits, bias 15; IEEE-like infinities and NaNs.
struct Float8E5M2 {
  uint8_t bits;
};

// Constants of an FP8 format, for code that is generic over the two.
struct Float8Traits {
  int mantissa_bits;
  int exponent_bias;
  float max;             // largest finite value
  float min_normal;
  float min_subnormal;
  uint8_t max_code;
};
inline constexpr Float8Traits kE4M3Traits{3, 7, 448.0f, 0x1p-6f, 0x1p-9f, 0x7e};
inline constexpr Float8Traits kE5M2Traits{2, 15, 57344.0f, 0x1p-14f, 0x1p-16f, 0x7b};

inline float decode_bf16(BFloat16 x) { return std::bit_cast<float>(uint32_t{x.bits} << 16); }

inline BFloat16 encode_bf16(float x) {
  const uint32_t u = std::bit_cast<uint32_t>(x);
  const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  const bool is_nan = (u & 0x7fffffffu) > 0x7f800000u;
  return {static_cast<uint16_t>(is_nan ? 0x7fffu : rounded)};
}

// Rounds a non-negative finite x up to the next bfloat16, so that a scale derived from a maximum never
// lets that maximum exceed the format's range by more than one float32 rounding. May return +inf.
inline BFloat16 encode_bf16_round_up(float x) {
  const uint32_t u = std::bit_cast<uint32_t>(x);
  const bool is_nan = (u & 0x7fffffffu) > 0x7f800000u;
  return {static_cast<uint16_t>(is_nan ? 0x7fffu : (u + 0xffffu) >> 16)};
}

// Stochastic rounding: rounds away from zero with probability equal to the discarded fraction, decided by
// the low 16 bits of `random`. Infinities stay; a finite x may round to infinity only past bf16's maximum.
inline BFloat16 encode_bf16_stochastic(float x, uint32_t random) {
  const uint32_t u = std::bit_cast<uint32_t>(x);
  const uint32_t magnitude = u & 0x7fffffffu;
  const uint32_t rounded = (u + (random & 0xffffu)) >> 16;
  const uint32_t result = magnitude > 0x7f800000u ? 0x7fffu : magnitude == 0x7f800000u ? u >> 16 : rounded;
  return {static_cast<uint16_t>(result)};
}

namespace detail {

// One code path for both FP8 formats. Subnormals are rounded by adding a power of two whose unit in the
// last place is the format's smallest subnormal: the float32 adder then does the rounding.
template <int kMantissaBits, int kBias>
inline uint8_t encode_float8(float x, float max) {
  constexpr int kShift = 23 - kMantissaBits;
  constexpr uint32_t kMinNormalBits = static_cast<uint32_t>(128 - kBias) << 23;
  constexpr uint32_t kMagicBits = static_cast<uint32_t>(128 - kBias - kMantissaBits + 23) << 23;
  const uint32_t u = std::bit_cast<uint32_t>(x);
  const uint32_t sign = (u >> 24) & 0x80u;
  const uint32_t magnitude = u & 0x7fffffffu;
  const uint32_t max_bits = std::bit_cast<uint32_t>(max);
  const uint32_t clamped = magnitude > max_bits ? max_bits : magnitude;
  const uint32_t normal = ((clamped + ((1u << (kShift - 1)) - 1u) + ((clamped >> kShift) & 1u)) >> kShift) -
                          (static_cast<uint32_t>(127 - kBias) << kMantissaBits);
  const float shifted = std::bit_cast<float>(clamped) + std::bit_cast<float>(kMagicBits);
  const uint32_t subnormal = std::bit_cast<uint32_t>(shifted) - kMagicBits;
  const uint32_t code = clamped < kMinNormalBits ? subnormal : normal;
  return static_cast<uint8_t>(magnitude > 0x7f800000u ? 0x7fu : (sign | code));
}

// As encode_float8, but rounds up in magnitude with probability equal to the discarded fraction.
// Uses the low bits of `random` that the shift discards (20 for E4M3, 21 for E5M2), more for subnormals.
template <int kMantissaBits, int kBias>
inline uint8_t encode_float8_stochastic(float x, float max, uint32_t random) {
  constexpr int kShift = 23 - kMantissaBits;
  constexpr uint32_t kMinNormalBits = static_cast<uint32_t>(128 - kBias) << 23;
  const uint32_t u = std::bit_cast<uint32_t>(x);
  const uint32_t sign = (u >> 24) & 0x80u;
  const uint32_t magnitude = u & 0x7fffffffu;
  const uint32_t max_bits = std::bit_cast<uint32_t>(max);
  const uint32_t clamped = magnitude > max_bits ? max_bits : magnitude;
  const uint32_t mask = (1u << kShift) - 1u;
  uint32_t code;
  if (clamped < kMinNormalBits) {
    // In units of the smallest subnormal, with 23 fractional bits to compare against.
    const float units = std::bit_cast<float>(clamped) * std::ldexp(1.0f, kBias - 1 + kMantissaBits);
    const float whole = std::floor(units);
    const float threshold = static_cast<float>(random & 0x7fffffu) * 0x1p-23f;
    code = static_cast<uint32_t>(whole) + (units - whole > threshold ? 1u : 0u);
  } else {
    code = ((clamped + (random & mask)) >> kShift) - (static_cast<uint32_t>(127 - kBias) << kMantissaBits);
    const uint32_t max_code = (max_bits >> kShift) - (static_cast<uint32_t>(127 - kBias) << kMantissaBits);
    code = code > max_code ? max_code : code;
  }
  return static_cast<uint8_t>(magnitude > 0x7f800000u ? 0x7fu : (sign | code));
}

template <int kMantissaBits, int kBias>
inline float decode_float8(uint8_t bits) {
  const uint32_t sign = uint32_t{bits & 0x80u} << 24;
  // Place exponent and mantissa in a float32 with the same bias, then rescale: exact for subnormals too.
  const uint32_t payload = uint32_t{bits & 0x7fu} << (23 - kMantissaBits);
  constexpr uint32_t kRescaleBits = static_cast<uint32_t>(127 + 127 - kBias) << 23;
  const float magnitude = std::bit_cast<float>(payload) * std::bit_cast<float>(kRescaleBits);
  return std::bit_cast<float>(std::bit_cast<uint32_t>(magnitude) | sign);
}

}  // namespace detail

inline Float8E4M3 encode_e4m3(float x) { return {detail::encode_float8<3, 7>(x, kE4M3Traits.max)}; }
inline Float8E5M2 encode_e5m2(float x) { return {detail::encode_float8<2, 15>(x, kE5M2Traits.max)}; }

inline Float8E4M3 encode_e4m3_stochastic(float x, uint32_t random) {
  return {detail::encode_float8_stochastic<3, 7>(x, kE4M3Traits.max, random)};
}
inline Float8E5M2 encode_e5m2_stochastic(float x, uint32_t random) {
  return {detail::encode_float8_stochastic<2, 15>(x, kE5M2Traits.max, random)};
}

inline float decode_e4m3(Float8E4M3 x) {
  const float value = detail::decode_float8<3, 7>(x.bits);
  return (x.bits & 0x7fu) == 0x7fu ? std::bit_cast<float>(0x7fc00000u) : value;
}

inline float decode_e5m2(Float8E5M2 x) {
  const uint32_t magnitude = x.bits & 0x7fu;
  const uint32_t sign = uint32_t{x.bits & 0x80u} << 24;
  const float value = detail::decode_float8<2, 15>(x.bits);
  const float infinity = std::bit_cast<float>(0x7f800000u | sign);
  return magnitude > 0x7cu ? std::bit_cast<float>(0x7fc00000u) : magnitude == 0x7cu ? infinity : value;
}

}  // namespace parka
