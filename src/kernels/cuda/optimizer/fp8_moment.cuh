#pragma once
#include <cstdint>
#include <limits>

#include "kernels/cuda/quantize/fp8.cuh"
#include "kernels/ops/optimizer/adamw.h"

// The arithmetic of moments in FP8: bit for bit what kernels/cpu/optimizer/adamw.cpp and
// kernels/cpu/math/log2_exp2.h define, in few instructions. A root (decoding) is looked up. A power (encoding) is
// approximate log2 and exp2, which settle nearly every code; between two candidates the defined operations decide.
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

// An exponent is 16 k. Zeroed memory has exponent 0 and only zeros, which any row of the table reads as zeros.
constexpr uint32_t kLeastExponent = 16, kMostExponent = 255;
constexpr int kMagnitudes = 128;  // of codes

// (|q| / max)^(1 / k), rounded once from double, for every k and magnitude of a code. Codes beyond max are NaN's.
struct RootTable {
  static constexpr int kRows = kMostExponent - kLeastExponent + 1;
  static constexpr int kRowBytes = kMagnitudes * sizeof(float);

  float root[kRows][kMagnitudes];

  constexpr RootTable() : root{} {
    constexpr Float8Traits traits = kE4M3Traits;
    const int mantissas = 1 << traits.mantissa_bits;
    for (int code = 1; code < kMagnitudes; ++code) {
      // In units of the smallest subnormal: a mantissa, and from the second exponent on its leading one.
      double units = code < mantissas ? code : mantissas + code % mantissas;
      for (int exponent = code / mantissas; exponent > 1; --exponent) units *= 2.0;
      const double log2_fraction = detail::log2_of(units * traits.min_subnormal / traits.max);
      const bool is_number = code <= traits.max_code;
      for (int row = 0; row < kRows; ++row) {
        const double inverse_k = 16.0 / (row + kLeastExponent);
        root[row][code] = is_number ? static_cast<float>(detail::exp2_of(log2_fraction * inverse_k))
                                    : std::numeric_limits<float>::quiet_NaN();
      }
    }
  }
};

__device__ constexpr RootTable kRootTable;

// Copies a table, by a block of kThreads.
template <int kThreads>
__device__ void copy_roots(const RootTable& from, RootTable& to) {
  constexpr int kVectors = sizeof(RootTable) / sizeof(uint4);
  static_assert(kVectors % kThreads == 0);
#pragma unroll
  for (int i = 0; i < kVectors / kThreads; ++i) {
    const int place = i * kThreads + static_cast<int>(threadIdx.x);
    reinterpret_cast<uint4*>(&to)[place] = reinterpret_cast<const uint4*>(&from)[place];
  }
}

// The values of four codes of a group with this `amax`, by its exponent's row of the table. The table lies in
// global or, where there are many codes, in shared memory: one gather for each code. kSigned: codes may have signs.
template <bool kSigned>
__device__ inline void decode_moment(uint32_t codes, float amax, const RootTable& table, uint32_t row,
                                     float (&x)[4]) {
  static_assert(RootTable::kRowBytes == 512 && sizeof(float) == 4);
  constexpr uint32_t kMagnitudeMask = (kMagnitudes - 1) * sizeof(float), kSign = 0x80000000u;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t scaled_code = i == 0 ? codes << 2 : codes >> (8 * i - 2);  // bytes into the row
    const uint32_t place = row * RootTable::kRowBytes | (scaled_code & kMagnitudeMask);
    const auto* const root = reinterpret_cast<const float*>(reinterpret_cast<const char*>(&table) + place);
    x[i] = __fmul_rn(amax, *root);
    if (kSigned) x[i] = __uint_as_float(__float_as_uint(x[i]) | (codes << (24 - 8 * i) & kSign));
  }
}

// ---- The defined log2 and exp2: kernels/cpu/math/log2_exp2.h, nothing fused ----

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

// log2 of the range that a group is expanded to, as in range_expansion_exponent.
constexpr double kLog2Range = detail::log2_of(448.0 * 448.0 / 2);

// range_expansion_exponent(amax, amin) as a float, for finite amax > 0, amin >= 0; 16 for amin = 0: only zeros.
__device__ inline float moment_exponent(float amax, float amin) {
  constexpr auto kScaledRange = static_cast<float>(16.0 * kLog2Range);
  // Just inside the integers that they round down to: there the two estimates below never disagree.
  constexpr float kLeast = kLeastExponent + 0x1p-10f, kMost = kMostExponent + 0.5f;
  constexpr float kWhole = 0x1p23f;  // sums with it are whole numbers, here rounded down
  // Groups narrower than half a power of two get the largest exponent whatever the error of log2, or even its sign,
  // is. From there up to 1 they get it, too; above, the estimate is good to 2^-20 of itself.
  const float group_range = approximate_log2(amax * approximate_reciprocal(amin));
  float estimate = kScaledRange * approximate_reciprocal(fabsf(group_range));
  estimate = fminf(fmaxf(estimate, kLeast), kMost);
  const float low = __fmaf_rd(estimate, 1.0f - 0x1p-20f, kWhole);
  const float high = __fmaf_rd(estimate, 1.0f + 0x1p-20f, kWhole);
  if (low == high && amin < kLargestReciprocal) return amax <= amin ? float{kLeastExponent} : low - kWhole;
  const double exact = floor(16.0 * kLog2Range / log2(double{amax} / double{amin}));
  return static_cast<float>(fmin(fmax(exact, double{kLeastExponent}), double{kMostExponent}));
}

// The extremes of a group, which decide how it is stored.
struct MomentExtremes {
  float amax;  // NaN if a member is
  float amin;  // smallest magnitude that is not zero; 0 if there is none
  bool has_zeros;
};

// The code of one number, by the defined operations. 0x80 for what rounds to zero from below.
__device__ __noinline__ inline uint32_t defined_moment_code(float x, float amax, float k) {
  float fraction = __fdiv_rn(fabsf(x), amax);
  if (k != 1.0f) fraction = exp2_of_negative(__fmul_rn(k, log2_of_fraction(fraction)));
  const float scaled = copysignf(__fmul_rn(kE4M3Traits.max, fraction), x);
  return __nv_cvt_float_to_fp8(scaled, __NV_SATFINITE, __NV_E4M3);
}

// How far from each other, relatively, max * (|x| / amax)^k may be as approximated here and as defined, where it is
// not so small that both round to 0: kToleranceUnit * (kToleranceBase + k). In units of 2^-22, with |y| = |log2| of
// the power at most 18.8:
//   here:   3 / 4 k from the division, 13.1 from log2, 4.2 from rounding y, 1.5 from the rest
//   there:  1 / 4 k from the division, 9.3 from log2 (its error is 0.46 of its result or less: measured) and
//           rounding y, 0.7 from the rest
// |log2| of a fraction below 1 has absolute errors of below 1 and 0.57, and so less than that.
constexpr float kToleranceUnit = 0x1p-22f, kToleranceBase = 30.0f;

// All codes of a group have these in common.
struct MomentGroup {
  float amax;  // as stored; in a group of zeros any other number than 0
  float k;
  float inverse;   // of amax, good to 2^-23
  float log2_low;  // log2 of the format's largest number, less the tolerance
  float low_to_high;

  __device__ MomentGroup(float amax_, float exponent)
      : amax(amax_), k(exponent * (1.0f / 16)), inverse(approximate_reciprocal(amax_)) {
    constexpr double kLog2E = 1.0 / detail::kLn2;
    constexpr double kLog2Max = detail::log2_of(kE4M3Traits.max);
    constexpr auto kLog2Low = static_cast<float>(kLog2Max - kLog2E * kToleranceUnit * kToleranceBase);
    log2_low = __fmaf_rn(k, static_cast<float>(-kLog2E * kToleranceUnit), kLog2Low);
    low_to_high = __fmaf_rn(k, 2 * kToleranceUnit, 1.0f + 2 * kToleranceUnit * kToleranceBase);
    // The reciprocal is 0 here, and so are the powers, whose product with infinity is NaN: all codes are in doubt.
    if (amax_ >= kLargestReciprocal) low_to_high = std::numeric_limits<float>::infinity();
  }
};

// The codes of 4 kWords numbers of a group. kIsSecond: those of numbers that are not 0 are not 0. kSigned: numbers
// may have signs. To be called by all lanes of a warp.
//
// Powers are taken at both ends of the tolerance; for a number in 5000 codes differ, and definitions decide.
template <bool kIsSecond, bool kSigned, int kWords>
__device__ inline void encode_moment(const float (&x)[kWords][4], const MomentGroup& group,
                                     uint32_t (&codes)[kWords]) {
  constexpr uint32_t kSigns = 0x80808080u, kMagnitudesOf = ~kSigns;
  uint32_t undecided[kWords], any_undecided = 0, any_zero = 0;
#pragma unroll
  for (int word = 0; word < kWords; ++word) {
    float low[4], high[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float log2_fraction = approximate_log2(fabsf(__fmul_rn(x[word][i], group.inverse)));
      low[i] = approximate_exp2(__fmaf_rn(group.k, log2_fraction, group.log2_low));
      high[i] = __fmul_rn(low[i], group.low_to_high);
    }
    codes[word] = encode_float8x4<Float8E4M3>(low[0], low[1], low[2], low[3]);
    undecided[word] = codes[word] ^ encode_float8x4<Float8E4M3>(high[0], high[1], high[2], high[3]);
    any_undecided |= undecided[word];
  }
  if (__any_sync(kFullWarp, any_undecided != 0)) {
#pragma unroll
    for (int word = 0; word < kWords; ++word) {
      while (undecided[word] != 0) {
        const int shift = (__ffs(static_cast<int>(undecided[word])) - 1) & 24;
        const float number =
            shift < 16 ? (shift == 0 ? x[word][0] : x[word][1]) : (shift == 16 ? x[word][2] : x[word][3]);
        const uint32_t code = defined_moment_code(number, group.amax, group.k) & 0x7fu;
        codes[word] = (codes[word] & ~(0xffu << shift)) | code << shift;
        undecided[word] &= ~(0xffu << shift);
      }
    }
  }
#pragma unroll
  for (int word = 0; word < kWords; ++word) any_zero |= ~(codes[word] + kMagnitudesOf) & kSigns;
  if (kIsSecond && __any_sync(kFullWarp, any_zero != 0)) {
#pragma unroll
    for (int word = 0; word < kWords; ++word) {
      const uint32_t zero_codes = ~(codes[word] + kMagnitudesOf) & kSigns;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (x[word][i] != 0.0f) codes[word] |= zero_codes >> 7 & 1u << 8 * i;
      }
    }
  }
  if constexpr (kSigned) {
#pragma unroll
    for (int word = 0; word < kWords; ++word) {
      // Any conversion keeps signs. No zero has one.
      const uint32_t signs = encode_float8x4<Float8E4M3>(x[word][0], x[word][1], x[word][2], x[word][3]);
      codes[word] |= signs & (codes[word] + kMagnitudesOf) & kSigns;
    }
  }
}

}  // namespace parka::cuda
