#pragma once
#include <cstdint>
#include <limits>

#include "kernels/cuda/fp8.cuh"
#include "kernels/ops/adamw.h"

// The arithmetic of moments in FP8: bit for bit what kernels/cpu/adamw.cpp and kernels/cpu/log2_exp2.h define, in
// few instructions. A root (decoding) is looked up. A power (encoding) is taken with the GPU's approximate log2 and
// exp2, which settle nearly every code; where they leave two to choose from, the defined operations decide.
namespace parka::cuda {

// ---- Decoding ----

namespace detail {

constexpr double kLn2 = 0.6931471805599453;

constexpr double log2_of(double x) {
  int exponent = 0;
  for (; x < 1.0; x *= 2.0) --exponent;
  for (; x >= 2.0; x /= 2.0) ++exponent;
  // ln(x) = 2 artanh(s), s = (x - 1) / (x + 1) <= 1 / 3: after 20 terms the next is 1e-20 of the first.
  const double s = (x - 1.0) / (x + 1.0);
  double series = 0.0;
  for (int n = 39; n > 0; n -= 2) series = 1.0 / n + s * s * series;
  return exponent + 2.0 * s * series / kLn2;
}

// 2^y for y <= 0.
constexpr double exp2_of(double y) {
  const int whole = static_cast<int>(y - 0.5);
  const double t = (y - whole) * kLn2;  // |t| < 0.35: after 16 terms the next is 1e-22
  double series = 1.0;
  for (int n = 16; n > 0; --n) series = 1.0 + t * series / n;
  for (int i = 0; i > whole; --i) series *= 0.5;
  return series;
}

}  // namespace detail

constexpr int kExponents = 256;  // of a group, 16 k: all that a byte can hold
constexpr int kCodes = 256;

// sgn(q) * (|q| / max)^(1 / k), rounded once from double. The rows below 16 stay zero: those exponents are never
// written, but zeroed memory has exponent 0 and only zeros. Codes beyond max are NaN's.
struct RootTable {
  float root[kExponents][kCodes];

  constexpr explicit RootTable(const Float8Traits& traits) : root{} {
    const int mantissas = 1 << traits.mantissa_bits;
    for (int code = 1; code < kCodes / 2; ++code) {
      // In units of the smallest subnormal: a mantissa, and from the second exponent on its leading one.
      double units = code < mantissas ? code : mantissas + code % mantissas;
      for (int exponent = code / mantissas; exponent > 1; --exponent) units *= 2.0;
      const double log2_fraction = detail::log2_of(units * traits.min_subnormal / traits.max);
      const bool is_number = code <= traits.max_code;
      for (int exponent = 16; exponent < kExponents; ++exponent) {
        const float magnitude = is_number ? static_cast<float>(detail::exp2_of(log2_fraction * 16.0 / exponent))
                                          : std::numeric_limits<float>::quiet_NaN();
        root[exponent][code] = magnitude;
        root[exponent][code + kCodes / 2] = -magnitude;
      }
    }
  }
};

template <typename F8>
__device__ constexpr RootTable kRootTable(kFloat8Traits<F8>);

// The values of four codes of a group with this `amax`, whose exponent's row of the table is `root`.
__device__ inline void decode_moment(uint32_t codes, float amax, const float* root, float (&x)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = __fmul_rn(amax, __ldg(root + (codes >> 8 * i & 0xffu)));
}

// ---- The defined log2 and exp2: kernels/cpu/log2_exp2.h, nothing fused ----

__device__ inline float log2_of_fraction(float x) {
  constexpr uint32_t kSqrtHalfBits = 0x3f3504f3u;
  constexpr float kTwoOverLn2 = 2.885390081777927f;
  const uint32_t bits = __float_as_uint(x);
  const int32_t exponent = static_cast<int32_t>(bits - kSqrtHalfBits) >> 23;
  const float f = __uint_as_float(bits - (static_cast<uint32_t>(exponent) << 23));
  const float s = __fdiv_rn(__fsub_rn(f, 1.0f), __fadd_rn(f, 1.0f)), z = __fmul_rn(s, s);
  float series = 1.0f / 9;
  series = __fadd_rn(1.0f / 7, __fmul_rn(z, series));
  series = __fadd_rn(1.0f / 5, __fmul_rn(z, series));
  series = __fadd_rn(1.0f / 3, __fmul_rn(z, series));
  series = __fadd_rn(1.0f, __fmul_rn(z, series));
  return __fadd_rn(static_cast<float>(exponent), __fmul_rn(__fmul_rn(kTwoOverLn2, s), series));
}

__device__ inline float exp2_of_negative(float y) {
  constexpr float kLn2 = 0.6931471805599453f;
  y = fmaxf(y, -126.0f);
  const int32_t whole = static_cast<int32_t>(__fsub_rn(y, 0.5f));
  const float t = __fmul_rn(__fsub_rn(y, static_cast<float>(whole)), kLn2);
  float series = 1.0f / 5040;
  series = __fadd_rn(1.0f / 720, __fmul_rn(t, series));
  series = __fadd_rn(1.0f / 120, __fmul_rn(t, series));
  series = __fadd_rn(1.0f / 24, __fmul_rn(t, series));
  series = __fadd_rn(1.0f / 6, __fmul_rn(t, series));
  series = __fadd_rn(1.0f / 2, __fmul_rn(t, series));
  series = __fadd_rn(1.0f, __fmul_rn(t, series));
  series = __fadd_rn(1.0f, __fmul_rn(t, series));
  return __fmul_rn(series, __uint_as_float(static_cast<uint32_t>(whole + 127) << 23));
}

// ---- Approximations of the GPU; subnormal operands and results count as 0 ----

// Error at most 2^-22 for x from 1/2 to 2, at most 2^-22 of the result for others. 0 gives -infinity.
__device__ inline float approximate_log2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Error at most 2^-22 of the result.
__device__ inline float approximate_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Errors at most 2^-22 and 2^-23 of the result.
__device__ inline float approximate_rsqrt(float x) {
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ inline float approximate_reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

constexpr float kLargestReciprocal = 0x1p125f;  // numbers below this have a reciprocal that is not subnormal

// ---- Encoding ----

// log2 of the range a group is stretched over, as range_expansion_exponent has it.
template <typename F8>
constexpr double kLog2Range = std::is_same_v<F8, Float8E4M3>
                                  ? detail::log2_of(448.0 * 448.0 / 2)
                                  : detail::log2_of(kE5M2Traits.max / kE5M2Traits.min_subnormal / 2);

// smallest_moment_amax(format)
template <typename F8>
constexpr float kSmallestAmax = std::numeric_limits<float>::min() *
                                (kFloat8Traits<F8>.max / kFloat8Traits<F8>.min_subnormal);

// range_expansion_exponent(amax, amin, format), for finite amax >= amin > 0.
template <typename F8>
__device__ inline int moment_exponent(float amax, float amin) {
  constexpr float kLeast = 16.0f, kMost = 255.0f;
  if (amax <= amin) return 16;
  // Groups narrower than half a power of two get the largest exponent whatever the error of log2, or even its sign,
  // is. From there up to 1 they get it, too; above, `exponent` is good to 2^-20 of itself.
  const float group_range = fmaxf(approximate_log2(amax * approximate_reciprocal(amin)), 0.5f);
  const float exponent = static_cast<float>(16.0 * kLog2Range<F8>) * approximate_reciprocal(group_range);
  const auto low = static_cast<int>(fminf(fmaxf(exponent * (1.0f - 0x1p-20f), kLeast), kMost));
  const auto high = static_cast<int>(fminf(fmaxf(exponent * (1.0f + 0x1p-20f), kLeast), kMost));
  if (low == high && amin < kLargestReciprocal) return low;
  const double exact = floor(16.0 * kLog2Range<F8> / log2(double{amax} / double{amin}));
  return static_cast<int>(fmin(fmax(exact, double{kLeast}), double{kMost}));
}

// What a group is stored by.
struct MomentExtremes {
  float amax;  // NaN if a member is
  float amin;  // smallest magnitude that is not zero; 0 if there is none
};

// What all codes of a group have in common.
struct MomentGroup {
  float amax;     // as stored; in a group of zeros any other number than 0
  float inverse;  // of amax, good to 2^-23
  float k;

  __device__ MomentGroup(float amax_, int exponent)
      : amax(amax_),
        inverse(amax_ < kLargestReciprocal ? approximate_reciprocal(amax_) : 1.0f / amax_),
        k(static_cast<float>(exponent) * (1.0f / 16)) {}
};

// The code of one number, by the defined operations. 0x80 for what rounds to zero from below.
template <typename F8>
__device__ __noinline__ uint32_t defined_moment_code(float x, float amax, float k) {
  float fraction = __fdiv_rn(fabsf(x), amax);
  if (k != 1.0f) fraction = exp2_of_negative(__fmul_rn(k, log2_of_fraction(fraction)));
  const float scaled = copysignf(__fmul_rn(kFloat8Traits<F8>.max, fraction), x);
  return __nv_cvt_float_to_fp8(scaled, __NV_SATFINITE, kFloat8Kind<F8>);
}

// How far from each other, relatively, max * (|x| / amax)^k may be as approximated here and as defined, where it is
// not so small that both round to 0. In units of 2^-22, with |y| = |log2| of the power at most 19 (E4M3) or 33
// (E5M2), k < 16, and ln 2 where an error of y becomes one of 2^y:
//   here:   16 * 3 / 4 from the division, 13.2 or 22.9 from log2, a quarter of that from rounding y, 2 from the
//   rest there:  16 / 4 from the division, twice 13.2 or 22.9 from log2 at its bound, 1 from exp2
// in all less than 63 and 95: below 2^-16 and 2^-15.
template <typename F8>
constexpr float kMomentTolerance = std::is_same_v<F8, Float8E4M3> ? 0x1p-16f : 0x1p-15f;

// The codes of four numbers of a group. kIsSecond: those of numbers that are not 0 are not 0.
template <typename F8, bool kIsSecond>
__device__ inline uint32_t encode_moment(const float (&x)[4], const MomentGroup& group) {
  constexpr float kMax = kFloat8Traits<F8>.max;
  constexpr float kLowMax = kMax * (1.0f - kMomentTolerance<F8>), kHighMax = kMax * (1.0f + kMomentTolerance<F8>);
  constexpr uint32_t kSigns = 0x80808080u;
  float power[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float log2_fraction = approximate_log2(fabsf(__fmul_rn(x[i], group.inverse)));
    power[i] = copysignf(approximate_exp2(group.k * log2_fraction), x[i]);
  }
  const auto codes_of = [&](float max) {
    return encode_float8x4<F8>(power[0] * max, power[1] * max, power[2] * max, power[3] * max);
  };
  uint32_t codes = codes_of(kLowMax);
  uint32_t undecided = codes ^ codes_of(kHighMax);
  while (undecided != 0) {
    const int shift = (__ffs(static_cast<int>(undecided)) - 1) & 24;
    const float number = shift < 16 ? (shift == 0 ? x[0] : x[1]) : (shift == 16 ? x[2] : x[3]);
    codes = (codes & ~(0xffu << shift)) | defined_moment_code<F8>(number, group.amax, group.k) << shift;
    undecided &= ~(0xffu << shift);
  }
  uint32_t zeros = ~((codes & ~kSigns) + ~kSigns) & kSigns;  // the top bits of the bytes whose code is 0
  if (kIsSecond && zeros != 0) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if ((zeros >> 8 * i & 0x80u) == 0 || x[i] == 0.0f) continue;
      codes |= 1u << 8 * i;
      zeros &= ~(0x80u << 8 * i);
    }
  }
  return codes & ~zeros;  // no zero has a sign
}

}  // namespace parka::cuda
