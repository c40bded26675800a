#pragma once
#include <cstdint>
#include <limits>

#include "kernels/cuda/optimizer/lanes.cuh"
#include "kernels/cuda/ptx/mma.cuh"
#include "kernels/cuda/quantize/fp8.cuh"

// Moments in FP8, with range expansion:
//
//   value x = sgn(q) amax (|q| / 448)^(1 / k)        amax and k are a group's of 128 elements
//   code  q = sgn(x) E4M3(448 (|x| / amax)^k)        k = exponent / 16, an exponent from 16 to 255, so that
//   smallest
//                                                    and largest magnitude of the group fill the format's range
//
// bit for bit as kernels/cpu/optimizer/adamw.cpp and kernels/cpu/math/log2_exp2.h define it, in few instructions.
// Decoding looks the root up in a table. Encoding takes approximate log2 and exp2, which settle nearly every code;
// between two candidates the defined operations decide.
namespace parka::cuda {

// ---- The table of roots ----

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

// (|q| / max)^(1 / k), rounded once from double, for every k and magnitude of a code. Codes beyond max are NaN's.
struct RootTable {
  static constexpr int kRows = kMostExponent - kLeastExponent + 1, kMagnitudes = 128;
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

// Copies the table to a block's dynamic shared memory, where gathering from it costs least.
template <int kThreads>
__device__ const RootTable& copy_roots() {
  extern __shared__ uint4 shared[];
  constexpr int kVectors = sizeof(RootTable) / sizeof(uint4);
  static_assert(kVectors % kThreads == 0);
  for_each<kVectors / kThreads>([&](int i) {
    const int place = i * kThreads + static_cast<int>(threadIdx.x);
    shared[place] = reinterpret_cast<const uint4*>(&kRootTable)[place];
  });
  __syncthreads();
  return *reinterpret_cast<const RootTable*>(shared);
}

// ---- The defined log2 and exp2: kernels/cpu/math/log2_exp2.h, nothing fused ----

// The polynomial of x with these coefficients, the highest first.
template <typename... Terms>
__device__ float horner(float x, float sum, Terms... terms) {
  ((sum = __fadd_rn(terms, __fmul_rn(x, sum))), ...);
  return sum;
}

__device__ inline float log2_of_fraction(float x) {
  constexpr uint32_t kSqrtHalfBits = 0x3f3504f3u;
  constexpr float kTwoOverLn2 = 2.885390081777927f;
  const uint32_t bits = __float_as_uint(x);
  const int32_t exponent = static_cast<int32_t>(bits - kSqrtHalfBits) >> 23;
  const float f = __uint_as_float(bits - (static_cast<uint32_t>(exponent) << 23));
  const float s = __fdiv_rn(__fsub_rn(f, 1.0f), __fadd_rn(f, 1.0f)), z = __fmul_rn(s, s);
  const float series = horner(z, 1.0f / 9, 1.0f / 7, 1.0f / 5, 1.0f / 3, 1.0f);
  return __fadd_rn(static_cast<float>(exponent), __fmul_rn(__fmul_rn(kTwoOverLn2, s), series));
}

__device__ inline float exp2_of_negative(float y) {
  constexpr float kLn2 = 0.6931471805599453f;
  y = fmaxf(y, -126.0f);
  const int32_t whole = static_cast<int32_t>(__fsub_rn(y, 0.5f));
  const float t = __fmul_rn(__fsub_rn(y, static_cast<float>(whole)), kLn2);
  const float series = horner(t, 1.0f / 5040, 1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 1.0f / 2, 1.0f, 1.0f);
  return __fmul_rn(series, __uint_as_float(static_cast<uint32_t>(whole + 127) << 23));
}

// ---- Approximations of the GPU; subnormal operands and results count as 0 ----

// Error at most 2^-22 for x from 1/2 to 2, at most 2^-22 of the result for others. 0 gives -infinity.
__device__ inline float approximate_log2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// Error at most 2^-23 of the result, as exp2_approximate's is at most 2^-22.
__device__ inline float approximate_reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
constexpr float kLargestReciprocal = 0x1p125f;  // numbers below this have a reciprocal that is not subnormal

// ---- A group's exponent, and its codes ----

// log2 of the range that a group is expanded to, as in range_expansion_exponent: up to 448, from 2 / 448.
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
  float amax;  // as stored; in a group of zeros, which is stored as 0, a number above 0
  float k;
  float inverse;      // of amax, good to 2^-23
  float log2_low;     // log2 of the format's largest number, less the tolerance
  float low_to_high;  // the factor from the lower end of the tolerance to the upper one

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

// The codes of numbers of a group. kIsSecond: those of numbers that are not 0 are not 0. kSigned: numbers may have
// signs. To be called by all lanes of a warp.
//
// Powers are taken at both ends of the tolerance. For about one number in 5000 the ends have different codes, and
// the defined operations decide.
template <bool kIsSecond, bool kSigned, typename Shape>
__device__ StoredPart<Float8E4M3, Shape> encode_moment(const float (&values)[Shape::kCount],
                                                       const MomentGroup& group) {
  constexpr uint32_t kSigns = 0x80808080u, kMagnitudesOf = ~kSigns;
  constexpr int kWords = Shape::kCount / 4;
  StoredPart<Float8E4M3, Shape> codes;
  uint32_t undecided[kWords], any_undecided = 0, any_zero = 0;
  float x[kWords][4];
  for_each_element<Shape>([&](int e) { x[e / 4][e % 4] = values[e]; });
  for_each<kWords>([&](int word) {
    float low[4], high[4];
    for_each<4>([&](int i) {
      const float log2_fraction = approximate_log2(fabsf(__fmul_rn(x[word][i], group.inverse)));
      low[i] = exp2_approximate(__fmaf_rn(group.k, log2_fraction, group.log2_low));
      high[i] = __fmul_rn(low[i], group.low_to_high);
    });
    codes.word(word) = encode_float8x4<Float8E4M3>(low[0], low[1], low[2], low[3]);
    undecided[word] = codes.word(word) ^ encode_float8x4<Float8E4M3>(high[0], high[1], high[2], high[3]);
    any_undecided |= undecided[word];
  });
  if (__any_sync(kFullWarp, any_undecided != 0)) {
    for_each<kWords>([&](int word) {
      while (undecided[word] != 0) {
        const int shift = (__ffs(static_cast<int>(undecided[word])) - 1) & 24;
        const float number =
            shift < 16 ? (shift == 0 ? x[word][0] : x[word][1]) : (shift == 16 ? x[word][2] : x[word][3]);
        const uint32_t code = defined_moment_code(number, group.amax, group.k) & 0x7fu;
        codes.word(word) = (codes.word(word) & ~(0xffu << shift)) | code << shift;
        undecided[word] &= ~(0xffu << shift);
      }
    });
  }
  const auto zero_codes = [&](int word) { return ~(codes.word(word) + kMagnitudesOf) & kSigns; };
  for_each<kWords>([&](int word) { any_zero |= zero_codes(word); });
  if (kIsSecond && __any_sync(kFullWarp, any_zero != 0)) {
    for_each<kWords>([&](int word) {
      const uint32_t zeros = zero_codes(word);
      for_each<4>([&](int i) {
        if (x[word][i] != 0.0f) codes.word(word) |= zeros >> 7 & 1u << 8 * i;
      });
    });
  }
  if constexpr (kSigned) {
    for_each<kWords>([&](int word) {
      // Any conversion keeps signs. No zero has one.
      const uint32_t signs = encode_float8x4<Float8E4M3>(x[word][0], x[word][1], x[word][2], x[word][3]);
      codes.word(word) |= signs & (codes.word(word) + kMagnitudesOf) & kSigns;
    });
  }
  return codes;
}

// ---- A lane's part of a moment; all lanes of a warp call these functions ----

// The extremes of a group, which decide how it is stored.
struct MomentExtremes {
  float amax;  // NaN if a member is
  float amin;  // smallest magnitude that is not zero; 0 if there is none
  bool has_zeros;
};

template <int kLanes, typename F>
__device__ uint32_t over_group(uint32_t x, const F& reduce) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) x = reduce(x, __shfl_xor_sync(kFullWarp, x, offset));
  return x;
}

template <bool kSigned, typename Shape>
struct StoredMoment {
  StoredPart<Float8E4M3, Shape> codes;
  float amax;
  uint32_t exponent;
};

// The values of codes, one gather for each. The table lies in global or, where there are many codes, shared memory.
template <bool kSigned, typename Shape>
__device__ void decode(const StoredMoment<kSigned, Shape>& stored, const RootTable& roots,
                       float (&x)[Shape::kCount]) {
  static_assert(RootTable::kRowBytes == 512 && sizeof(float) == 4);
  constexpr uint32_t kMagnitudeMask = (RootTable::kMagnitudes - 1) * sizeof(float), kSign = 0x80000000u;
  const uint32_t row = max(stored.exponent, kLeastExponent) - kLeastExponent;
  for_each<Shape::kCount / 4>([&](int word) {
    const uint32_t codes = stored.codes.word(word);
    for_each<4>([&](int i) {
      const uint32_t scaled_code = i == 0 ? codes << 2 : codes >> (8 * i - 2);  // bytes into the row
      const uint32_t place = row * RootTable::kRowBytes | (scaled_code & kMagnitudeMask);
      const auto* const root = reinterpret_cast<const float*>(reinterpret_cast<const char*>(&roots) + place);
      float& value = x[4 * word + i];
      value = __fmul_rn(stored.amax, *root);
      if (kSigned) value = __uint_as_float(__float_as_uint(value) | (codes << (24 - 8 * i) & kSign));
    });
  });
}
template <bool kSigned, typename Shape>
__device__ void to_floats(const StoredMoment<kSigned, Shape>& stored, float (&x)[Shape::kCount]) {
  decode(stored, kRootTable, x);
}

// kOfFastStep: there is range expansion, and no second moment has a sign. Otherwise expansion is found at run time,
// and signs are always kept.
template <bool kIsSecond, bool kOfFastStep>
struct Fp8Moment {
  static constexpr bool kSigned = !(kIsSecond && kOfFastStep);

  Float8E4M3* codes_N;
  float* amax_G;
  uint8_t* exponent_G;  // null without range expansion

  explicit Fp8Moment(const MomentView& moment)
      : codes_N(moment.values.as<Float8E4M3>()),
        amax_G(moment.amax.as<float>()),
        exponent_G(moment.exponent.empty() ? nullptr : moment.exponent.as<uint8_t>()) {}

  PARKA_HOST_DEVICE void move(int64_t elements) {
    codes_N += elements;
    amax_G += elements / kMomentGroup;
    if (is_expanded()) exponent_G += elements / kMomentGroup;
  }
  PARKA_HOST_DEVICE bool is_expanded() const { return kOfFastStep || exponent_G != nullptr; }

  template <typename Part>
  __device__ StoredMoment<kSigned, typename Part::Shape> load(const Part& part) const {
    const bool has_group = Part::kWhole || part.has_group();
    const bool has_exponent = is_expanded() && has_group;
    return {load_part<Float8E4M3>(codes_N, part), has_group ? *amax_G : 0.0f,
            has_exponent ? uint32_t{*exponent_G} : kLeastExponent};
  }

  // The group's extremes, in all of its lanes.
  template <typename Part>
  static __device__ MomentExtremes extremes(const Part&, const float (&x)[Part::kCount]) {
    // As integers, NaNs are the largest magnitudes.
    const auto magnitude = [&](int e) { return __float_as_uint(x[e]) & (kSigned ? 0x7fffffffu : ~0u); };
    const auto lesser = [](uint32_t a, uint32_t b) { return min(a, b); };
    uint32_t largest = 0, smallest = ~0u;
    for_each_element<typename Part::Shape>([&](int e) {
      largest = max(largest, magnitude(e));
      smallest = min(smallest, magnitude(e));
    });
    largest = over_group<Part::kLanes>(largest, [](uint32_t a, uint32_t b) { return max(a, b); });
    smallest = over_group<Part::kLanes>(smallest, lesser);
    uint32_t smallest_nonzero = smallest;
    if (__any_sync(kFullWarp, smallest == 0 && largest != 0)) {
      uint32_t less_one = ~0u;  // a zero wraps round and is no minimum
      for_each_element<typename Part::Shape>([&](int e) { less_one = min(less_one, magnitude(e) - 1u); });
      smallest_nonzero = over_group<Part::kLanes>(less_one, lesser) + 1u;
    }
    return {__uint_as_float(largest), __uint_as_float(smallest_nonzero), smallest == 0};
  }

  template <typename Part>
  __device__ void store(const Part& part, const float (&x)[Part::kCount], const MomentExtremes& found) const {
    const float amax = fmaxf(found.amax, kSmallestMomentAmax);
    const float exponent = is_expanded() ? moment_exponent(amax, found.amin) : float{kLeastExponent};
    const MomentGroup group(amax, exponent);
    store_part(codes_N, part, encode_moment<kIsSecond, kSigned, typename Part::Shape>(x, group));
    // A group with a number that is not finite, as the square of a huge gradient, becomes zeros: stored, it would
    // come back at every step. Its codes were made first, because encode_moment() needs all lanes.
    const bool is_finite = found.amax <= std::numeric_limits<float>::max();
    if (!is_finite) store_part(codes_N, part, StoredPart<Float8E4M3, typename Part::Shape>{});
    if (Part::lane() == 0 && (Part::kWhole || part.has_group())) {
      *amax_G = is_finite && found.amax != 0.0f ? amax : 0.0f;
      if (is_expanded()) *exponent_G = static_cast<uint8_t>(is_finite ? exponent : kLeastExponent);
    }
  }
  template <typename Part>
  __device__ void store(const Part& part, const float (&x)[Part::kCount]) const {
    store(part, x, extremes(part, x));
  }
};
template <bool kIsSecond>
using AnyFp8Moment = Fp8Moment<kIsSecond, false>;

}  // namespace parka::cuda
