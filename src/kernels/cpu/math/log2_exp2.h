#pragma once
#include <algorithm>
#include <bit>
#include <cstdint>

// log2 and exp2 for range expansion (ops/optimizer/adamw.h), as plain fp32 series: the standard library's are
// slower in a loop and differ between machines, these vectorise and give the same bits everywhere.
namespace parka::cpu {

// log2(x) for x in [2^-126, 1]. Exactly 0 at 1; relative error below 2^-21. At x = 0 it is -127.
inline float log2_of_fraction(float x) {
  constexpr uint32_t kSqrtHalfBits = 0x3f3504f3u;
  constexpr float kTwoOverLn2 = 2.885390081777927f;
  // x = 2^exponent * f with f in [sqrt(1/2), sqrt(2)), so that the sum below never cancels.
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const int32_t exponent = static_cast<int32_t>(bits - kSqrtHalfBits) >> 23;
  const float f = std::bit_cast<float>(bits - (static_cast<uint32_t>(exponent) << 23));
  // ln(f) = 2 artanh(s), s = (f - 1) / (f + 1); |s| < 0.172 makes the next term of the series 2e-9 of the first.
  const float s = (f - 1.0f) / (f + 1.0f), z = s * s;
  const float series = 1.0f + z * (1.0f / 3 + z * (1.0f / 5 + z * (1.0f / 7 + z * (1.0f / 9))));
  return static_cast<float>(exponent) + kTwoOverLn2 * s * series;
}

// 2^y for y <= 0, but at least 2^-126. Exactly 1 at 0; relative error below 2^-22.
inline float exp2_of_negative(float y) {
  constexpr float kLn2 = 0.6931471805599453f;
  y = std::max(y, -126.0f);
  const int32_t whole = static_cast<int32_t>(y - 0.5f);  // nearest integer: the cast cuts towards zero
  // Taylor series of e^t; |t| < 0.347 makes the next term 5e-9.
  const float t = (y - static_cast<float>(whole)) * kLn2;
  const float high = 1.0f / 24 + t * (1.0f / 120 + t * (1.0f / 720 + t * (1.0f / 5040)));
  const float series = 1.0f + t * (1.0f + t * (1.0f / 2 + t * (1.0f / 6 + t * high)));
  return series * std::bit_cast<float>(static_cast<uint32_t>(whole + 127) << 23);
}

}  // namespace parka::cpu
