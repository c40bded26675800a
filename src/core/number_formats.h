#pragma once
#include <bit>
#include <cstdint>

#include "core/host_device.h"

// Software forms of the number formats of the GPU, bit-identical to CUDA's conversions
// (cuda_bf16.h, cuda_fp8.h with __NV_SATFINITE): round to nearest even, FP8 saturates at its largest
// finite value (infinities too), every NaN becomes one canonical NaN. All functions are branch-free so that
// compilers vectorise loops over them.
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
  float max;  // largest finite value
  float min_normal;
  float min_subnormal;
  uint8_t max_code;  // the code of `max`
};
inline constexpr Float8Traits kE4M3Traits{3, 7, 448.0f, 0x1p-6f, 0x1p-9f, 0x7e};
inline constexpr Float8Traits kE5M2Traits{2, 15, 57344.0f, 0x1p-14f, 0x1p-16f, 0x7b};

namespace detail {

inline constexpr uint32_t kSignBit = 0x80000000u;
inline constexpr uint32_t kInfinityBits = 0x7f800000u;  // a larger magnitude is a NaN

PARKA_HOST_DEVICE inline uint32_t smaller(uint32_t a, uint32_t b) { return a < b ? a : b; }

}  // namespace detail

PARKA_HOST_DEVICE inline float decode_bf16(BFloat16 x) { return std::bit_cast<float>(uint32_t{x.bits} << 16); }

PARKA_HOST_DEVICE inline BFloat16 encode_bf16(float x) {
  const uint32_t u = std::bit_cast<uint32_t>(x);
  // Half of the last kept bit's weight, less one unless that bit is odd: a tie carries only to an even result.
  const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  const bool is_nan = (u & ~detail::kSignBit) > detail::kInfinityBits;
  return {static_cast<uint16_t>(is_nan ? 0x7fffu : rounded)};
}

// Rounds a non-negative x up to the next bfloat16, so that a scale derived from a maximum never lets that
// maximum exceed the format's range by more than one float32 rounding. +inf past bfloat16's largest value.
PARKA_HOST_DEVICE inline BFloat16 encode_bf16_round_up(float x) {
  const uint32_t u = std::bit_cast<uint32_t>(x);
  const bool is_nan = (u & ~detail::kSignBit) > detail::kInfinityBits;
  return {static_cast<uint16_t>(is_nan ? 0x7fffu : (u + 0xffffu) >> 16)};
}

// Stochastic rounding: rounds away from zero with probability equal to the discarded fraction, decided by the low
// 16 bits of `random`. Infinities stay; a finite x may become one only past bfloat16's largest value.
PARKA_HOST_DEVICE inline BFloat16 encode_bf16_stochastic(float x, uint32_t random) {
  const uint32_t u = std::bit_cast<uint32_t>(x);
  const bool is_nan = (u & ~detail::kSignBit) > detail::kInfinityBits;
  return {static_cast<uint16_t>(is_nan ? 0x7fffu : (u + (random & 0xffffu)) >> 16)};
}

namespace detail {

// One code path for both FP8 formats: float32 with its low mantissa bits cut off and another exponent bias.
template <const Float8Traits& kFormat>
struct Float8Layout {
  static constexpr int kShift = 23 - kFormat.mantissa_bits;  // float32 mantissa bits that the format lacks
  static constexpr uint32_t kBiasDifference = static_cast<uint32_t>(127 - kFormat.exponent_bias);
  static constexpr uint32_t kMaxBits = std::bit_cast<uint32_t>(kFormat.max);
  static constexpr float kMinNormal = kFormat.min_normal;
  static constexpr uint32_t kMinNormalBits = std::bit_cast<uint32_t>(kFormat.min_normal);
  // The power of two whose unit in the last place, in float32, is the format's smallest subnormal.
  static constexpr float kSubnormalMagic = kFormat.min_subnormal * 0x1p23f;
};

// The code of x, given the two candidates for its magnitude's code.
template <const Float8Traits& kFormat>
PARKA_HOST_DEVICE inline uint8_t float8_code(uint32_t u, uint32_t clamped, uint32_t normal, uint32_t subnormal) {
  const uint32_t code = clamped < Float8Layout<kFormat>::kMinNormalBits ? subnormal : normal;
  const bool is_nan = (u & ~kSignBit) > kInfinityBits;
  return static_cast<uint8_t>(is_nan ? 0x7fu : ((u & kSignBit) >> 24) | code);
}

template <const Float8Traits& kFormat>
PARKA_HOST_DEVICE inline uint8_t encode_float8(float x) {
  using Layout = Float8Layout<kFormat>;
  constexpr uint32_t kBelowHalf = (1u << (Layout::kShift - 1)) - 1u;
  const uint32_t u = std::bit_cast<uint32_t>(x);
  const uint32_t clamped = smaller(u & ~kSignBit, Layout::kMaxBits);
  // Rounds like encode_bf16; the exponent field then moves to the other bias.
  const uint32_t rounded = (clamped + kBelowHalf + ((clamped >> Layout::kShift) & 1u)) >> Layout::kShift;
  const uint32_t normal = rounded - (Layout::kBiasDifference << kFormat.mantissa_bits);
  // The float32 adder rounds a subnormal: the sum has no bits below its last place.
  const float sum = std::bit_cast<float>(clamped) + Layout::kSubnormalMagic;
  const uint32_t subnormal = std::bit_cast<uint32_t>(sum) - std::bit_cast<uint32_t>(Layout::kSubnormalMagic);
  return float8_code<kFormat>(u, clamped, normal, subnormal);
}

// The value of a code's low 7 bits as if the largest exponent were an ordinary one, with the code's sign.
template <const Float8Traits& kFormat>
PARKA_HOST_DEVICE inline float decode_float8(uint8_t bits) {
  using Layout = Float8Layout<kFormat>;
  const uint32_t sign = (bits & 0x80u) << 24;
  const uint32_t payload = (bits & 0x7fu) << Layout::kShift;  // exponent and mantissa, in float32's places
  const uint32_t normal = payload + (Layout::kBiasDifference << 23);
  // A subnormal has no implicit leading one: put one there, then subtract it. Exact, and without float32
  // subnormals, which are slow on CPUs and zero under the GPU's flush-to-zero.
  const float subnormal = std::bit_cast<float>(payload | Layout::kMinNormalBits) - Layout::kMinNormal;
  const uint32_t magnitude = payload < (1u << 23) ? std::bit_cast<uint32_t>(subnormal) : normal;
  return std::bit_cast<float>(sign | magnitude);
}

}  // namespace detail

PARKA_HOST_DEVICE inline Float8E4M3 encode_e4m3(float x) { return {detail::encode_float8<kE4M3Traits>(x)}; }
PARKA_HOST_DEVICE inline Float8E5M2 encode_e5m2(float x) { return {detail::encode_float8<kE5M2Traits>(x)}; }

PARKA_HOST_DEVICE inline float decode_e4m3(Float8E4M3 x) {
  const uint32_t value = std::bit_cast<uint32_t>(detail::decode_float8<kE4M3Traits>(x.bits));
  return std::bit_cast<float>((x.bits & 0x7fu) == 0x7fu ? 0x7fc00000u : value);
}

PARKA_HOST_DEVICE inline float decode_e5m2(Float8E5M2 x) {
  const uint32_t magnitude = x.bits & 0x7fu;
  const uint32_t value = std::bit_cast<uint32_t>(detail::decode_float8<kE5M2Traits>(x.bits));
  const uint32_t infinity = detail::kInfinityBits | ((x.bits & 0x80u) << 24);
  return std::bit_cast<float>(magnitude > 0x7cu ? 0x7fc00000u : magnitude == 0x7cu ? infinity : value);
}

}  // namespace parka
