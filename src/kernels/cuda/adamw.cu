#include "kernels/cuda/adamw.h"

#include <bit>
#include <cmath>
#include <type_traits>

#include "core/philox.h"
#include "core/split_float.h"
#include "kernels/cuda/check.h"
#include "kernels/cuda/cuda_device.h"
#include "kernels/cuda/fp8_moment.cuh"

// A warp takes one group of 128 elements, or several: it reads them of every tensor as fp32, updates them and
// writes them back. A lane has packs of four neighbours, which share a draw of philox4x32.
namespace parka::cuda {
namespace {

constexpr int kPackElements = 4;
constexpr int kWarpsPerBlock = 8;
constexpr int kThreads = kWarpsPerBlock * kWarpSize;
static_assert(kMomentGroup == kWarpSize * kPackElements);

template <typename T>
using ElementPack = Pack<T, kPackElements>;
template <typename T>
using StoredPack = Stored<T, kPackElements>;

// ---- One lane's elements of a tensor ----

// Where a lane works: it has kPacks packs of one group, which it shares with 32 / kPacks - 1 other lanes, so that
// a warp has kPacks groups. The packs of a group's lanes are next to each other.
template <int kPacks>
struct LanePart {
  static constexpr int kLanes = kWarpSize / kPacks;  // of a group
  static constexpr int kStride = kLanes * kPackElements;

  int64_t group, numel;

  static __device__ int lane() { return static_cast<int>(threadIdx.x) % kLanes; }

  // Whether the last group may lie beyond the tensor's end, as other lanes' may not.
  __device__ bool has_group() const { return group * kMomentGroup < numel; }
  __device__ int64_t first(int pack) const {
    return group * kMomentGroup + lane() * kPackElements + pack * kStride;
  }
  // Below 4 only in the last group of a tensor and beyond, where it may be 0.
  __device__ int count(int pack) const {
    const int64_t left = numel - first(pack);
    return left >= kPackElements ? kPackElements : left > 0 ? static_cast<int>(left) : 0;
  }
};

// kWhole: all packs have four elements, and the tensor is aligned to four. Elements past the end read as 0.
template <bool kWhole, int kPacks, typename T>
__device__ ElementPack<T> read_pack(const T* p, const LanePart<kPacks>& part, int pack) {
  if constexpr (kWhole) {
    return *reinterpret_cast<const ElementPack<T>*>(p + part.first(pack));
  } else {
    ElementPack<T> x{};
#pragma unroll
    for (int i = 0; i < kPackElements; ++i) {
      if (i < part.count(pack)) x.element[i] = p[part.first(pack) + i];
    }
    return x;
  }
}

template <bool kWhole, int kPacks, typename T>
__device__ void write_pack(T* p, const LanePart<kPacks>& part, int pack, const ElementPack<T>& x) {
  if constexpr (kWhole) {
    *reinterpret_cast<ElementPack<T>*>(p + part.first(pack)) = x;
  } else {
#pragma unroll
    for (int i = 0; i < kPackElements; ++i) {
      if (i < part.count(pack)) p[part.first(pack) + i] = x.element[i];
    }
  }
}

template <bool kWhole, int kPacks, typename T>
__device__ void read_floats(const T* p, const LanePart<kPacks>& part, float (&x)[kPacks][kPackElements]) {
#pragma unroll
  for (int pack = 0; pack < kPacks; ++pack) {
    const auto elements = std::bit_cast<StoredPack<T>>(read_pack<kWhole>(p, part, pack));
#pragma unroll
    for (int i = 0; i < kPackElements; ++i) x[pack][i] = elements[i];
  }
}

template <bool kWhole, int kPacks, typename T>
__device__ void write_floats(T* p, const LanePart<kPacks>& part, const float (&x)[kPacks][kPackElements]) {
#pragma unroll
  for (int pack = 0; pack < kPacks; ++pack) {
    ElementPack<T> elements;
#pragma unroll
    for (int i = 0; i < kPackElements; ++i) elements.element[i] = from_float<T>(x[pack][i]);
    write_pack<kWhole>(p, part, pack, elements);
  }
}

// ---- Moments: read(), extremes() and write() are called by all lanes of a warp ----

// fp32 or bf16.
template <typename T>
struct PlainMoment {
  static constexpr int kPacks = 1;
  struct Extremes {};  // of no use
  T* values_N;

  template <bool kWhole>
  __device__ void read(const LanePart<kPacks>& part, float (&x)[kPacks][kPackElements]) const {
    read_floats<kWhole>(values_N, part, x);
  }
  static __device__ Extremes extremes(const float (&)[kPacks][kPackElements]) { return {}; }
  template <bool kWhole>
  __device__ void write(const LanePart<kPacks>& part, const float (&x)[kPacks][kPackElements],
                        const Extremes&) const {
    write_floats<kWhole>(values_N, part, x);
  }
};

// With several groups for each warp, what is done once for a group costs less.
template <typename F8, bool kIsSecond>
struct Fp8Moment {
  static constexpr int kPacks = 4;
  using Part = LanePart<kPacks>;
  using Values = float[kPacks][kPackElements];
  using Extremes = MomentExtremes;

  F8* codes_N;
  float* amax_G;
  uint8_t* exponent_G;  // null without range expansion

  template <bool kWhole>
  __device__ void read(const Part& part, Values& x) const {
    const bool has_group = kWhole || part.has_group();
    const float amax = has_group ? amax_G[part.group] : 0.0f;
    const int exponent = exponent_G != nullptr && has_group ? exponent_G[part.group] : 16;
    const float* const root = kRootTable<F8>.root[exponent];
#pragma unroll
    for (int pack = 0; pack < kPacks; ++pack) {
      decode_moment(std::bit_cast<uint32_t>(read_pack<kWhole>(codes_N, part, pack)), amax, root, x[pack]);
    }
  }

  // Of the group, in all of its lanes. A NaN is the largest of integers, so it is the maximum; a zero becomes the
  // largest one, and is no minimum.
  static __device__ Extremes extremes(const Values& x) {
    uint32_t largest = 0, smallest_less_one = ~0u;
#pragma unroll
    for (int pack = 0; pack < kPacks; ++pack) {
#pragma unroll
      for (int i = 0; i < kPackElements; ++i) {
        const uint32_t magnitude = __float_as_uint(x[pack][i]) & 0x7fffffffu;
        largest = max(largest, magnitude);
        smallest_less_one = min(smallest_less_one, magnitude - 1u);
      }
    }
#pragma unroll
    for (int offset = Part::kLanes / 2; offset > 0; offset /= 2) {
      largest = max(largest, __shfl_xor_sync(kFullWarp, largest, offset));
      smallest_less_one = min(smallest_less_one, __shfl_xor_sync(kFullWarp, smallest_less_one, offset));
    }
    return {__uint_as_float(largest), __uint_as_float(smallest_less_one + 1u)};
  }

  template <bool kWhole>
  __device__ void write(const Part& part, const Values& x, const Extremes& found) const {
    // What is not finite, which no step makes, becomes zeros: stored, it would be read back at every step after.
    const bool zeros = !(found.amax > 0.0f && found.amax <= std::numeric_limits<float>::max());
    const float amax = fmaxf(found.amax, kSmallestAmax<F8>);
    const int exponent = zeros || exponent_G == nullptr ? 16 : moment_exponent<F8>(amax, found.amin);
    const MomentGroup group(amax, exponent);
#pragma unroll
    for (int pack = 0; pack < kPacks; ++pack) {
      const uint32_t codes = zeros ? 0u : encode_moment<F8, kIsSecond>(x[pack], group);
      write_pack<kWhole>(codes_N, part, pack, std::bit_cast<ElementPack<F8>>(codes));
    }
    if (Part::lane() != 0 || !(kWhole || part.has_group())) return;
    amax_G[part.group] = zeros ? 0.0f : amax;
    if (exponent_G != nullptr) exponent_G[part.group] = static_cast<uint8_t>(exponent);
  }
};

// Calls f with the moment's device form.
template <typename F>
void with_plain_moment(const MomentView& moment, const F& f) {
  with_plain_type(moment.values.dtype, [&](auto type) {
    using T = decltype(type);
    f(PlainMoment<T>{moment.values.as<T>()});
  });
}

template <bool kIsSecond, typename F>
void with_fp8_moment(const MomentView& moment, const F& f) {
  with_float8_type(moment.values.dtype, [&](auto type) {
    using F8 = decltype(type);
    uint8_t* const exponent = moment.exponent.empty() ? nullptr : moment.exponent.as<uint8_t>();
    f(Fp8Moment<F8, kIsSecond>{moment.values.as<F8>(), moment.amax.as<float>(), exponent});
  });
}

template <typename F>
void with_moment(const MomentView& moment, bool is_second, const F& f) {
  if (!is_float8(moment.values.dtype)) {
    with_plain_moment(moment, f);
  } else if (is_second) {
    with_fp8_moment<true>(moment, f);
  } else {
    with_fp8_moment<false>(moment, f);
  }
}

// Both moments are plain, or both are fp8: there is no kernel for one of each, and no config asks for it.
template <typename F>
void with_moments(const AdamwStep& a, const F& f) {
  const bool float8 = is_float8(a.exp_avg.values.dtype);
  PARKA_REQUIRE(is_float8(a.exp_avg_sq.values.dtype) == float8);
  if (float8) {
    with_fp8_moment<false>(a.exp_avg, [&](auto exp_avg) {
      with_fp8_moment<true>(a.exp_avg_sq, [&](auto exp_avg_sq) { f(exp_avg, exp_avg_sq); });
    });
  } else {
    with_plain_moment(a.exp_avg, [&](auto exp_avg) {
      with_plain_moment(a.exp_avg_sq, [&](auto exp_avg_sq) { f(exp_avg, exp_avg_sq); });
    });
  }
}

// ---- Weights, one type for each MasterForm ----

struct Fp32Master {
  BFloat16* weight_N;
  float* master_N;

  template <bool kWhole, int kPacks>
  __device__ void read(const LanePart<kPacks>& part, float (&w)[kPacks][kPackElements]) const {
    read_floats<kWhole>(master_N, part, w);
  }
  template <bool kWhole, int kPacks>
  __device__ void write(const LanePart<kPacks>& part, const float (&w)[kPacks][kPackElements]) const {
#pragma unroll
    for (int pack = 0; pack < kPacks; ++pack) {
      ElementPack<BFloat16> weight;
#pragma unroll
      for (int i = 0; i < kPackElements; ++i) weight.element[i] = split_float(w[pack][i]).weight;
      write_pack<kWhole>(weight_N, part, pack, weight);
    }
    write_floats<kWhole>(master_N, part, w);
  }
};

struct SplitMaster {
  BFloat16* weight_N;
  uint16_t* remainder_N;

  template <bool kWhole, int kPacks>
  __device__ void read(const LanePart<kPacks>& part, float (&w)[kPacks][kPackElements]) const {
#pragma unroll
    for (int pack = 0; pack < kPacks; ++pack) {
      const auto weight = std::bit_cast<StoredPack<BFloat16>>(read_pack<kWhole>(weight_N, part, pack));
      const ElementPack<uint16_t> remainder = read_pack<kWhole>(remainder_N, part, pack);
#pragma unroll
      for (int i = 0; i < kPackElements; ++i) {
        // join_float, in the form that takes fewest instructions.
        const auto last_places = static_cast<int16_t>(remainder.element[i]);
        w[pack][i] = __int_as_float(__float_as_int(weight[i]) + last_places);
      }
    }
  }
  template <bool kWhole, int kPacks>
  __device__ void write(const LanePart<kPacks>& part, const float (&w)[kPacks][kPackElements]) const {
#pragma unroll
    for (int pack = 0; pack < kPacks; ++pack) {
      ElementPack<BFloat16> weight;
      ElementPack<uint16_t> remainder;
#pragma unroll
      for (int i = 0; i < kPackElements; ++i) {
        const SplitFloat split = split_float(w[pack][i]);
        weight.element[i] = split.weight;
        remainder.element[i] = split.remainder;
      }
      write_pack<kWhole>(weight_N, part, pack, weight);
      write_pack<kWhole>(remainder_N, part, pack, remainder);
    }
  }
};

struct StochasticWeight {
  BFloat16* weight_N;
  uint64_t seed, step, first_element;

  template <bool kWhole, int kPacks>
  __device__ void read(const LanePart<kPacks>& part, float (&w)[kPacks][kPackElements]) const {
    read_floats<kWhole>(weight_N, part, w);
  }
  template <bool kWhole, int kPacks>
  __device__ void write(const LanePart<kPacks>& part, const float (&w)[kPacks][kPackElements]) const {
#pragma unroll
    for (int pack = 0; pack < kPacks; ++pack) {
      const uint64_t first = first_element + static_cast<uint64_t>(part.first(pack));
      const auto random = philox4x32(seed, step, first / kPackElements);
      ElementPack<BFloat16> weight;
#pragma unroll
      for (int i = 0; i < kPackElements; ++i) weight.element[i] = encode_bf16_stochastic(w[pack][i], random[i]);
      write_pack<kWhole>(weight_N, part, pack, weight);
    }
  }
};

struct Fp32Weight {
  float* weight_N;

  template <bool kWhole, int kPacks>
  __device__ void read(const LanePart<kPacks>& part, float (&w)[kPacks][kPackElements]) const {
    read_floats<kWhole>(weight_N, part, w);
  }
  template <bool kWhole, int kPacks>
  __device__ void write(const LanePart<kPacks>& part, const float (&w)[kPacks][kPackElements]) const {
    write_floats<kWhole>(weight_N, part, w);
  }
};

// Calls f with the weights' device form.
template <typename F>
void with_weights(const AdamwStep& a, const F& f) {
  switch (a.master_form) {
    case MasterForm::kFp32: f(Fp32Master{a.weight.as<BFloat16>(), a.master.as<float>()}); return;
    case MasterForm::kFp32Split: f(SplitMaster{a.weight.as<BFloat16>(), a.master.as<uint16_t>()}); return;
    case MasterForm::kBf16Sr: f(StochasticWeight{a.weight.as<BFloat16>(), a.seed, a.step, a.first_element}); return;
    case MasterForm::kNone: f(Fp32Weight{a.weight.as<float>()}); return;
  }
}

// ---- The update ----

struct UpdateConstants {
  float gain1, gain2;  // 1 - beta
  float inverse_bias1, inverse_sqrt_bias2;
  float lr, eps, weight_decay;
  bool are_safe;  // for safe_direction_of

  explicit UpdateConstants(const AdamwStep& a)
      : gain1(static_cast<float>(1.0 - a.beta1)),
        gain2(static_cast<float>(1.0 - a.beta2)),
        inverse_bias1(static_cast<float>(1.0 / a.bias_correction1)),
        inverse_sqrt_bias2(static_cast<float>(1.0 / std::sqrt(double{a.bias_correction2}))),
        lr(a.lr),
        eps(a.eps),
        weight_decay(a.weight_decay),
        are_safe(inverse_bias1 <= 0x1p10f && inverse_sqrt_bias2 <= 0x1p10f && eps >= 0x1p-100f && eps <= 0x1p10f) {}
};

// The update of one element, in three parts. Each operation is rounded by itself: left to the compiler, instances
// would contract different ones to fused multiply-adds, and master forms would drift apart. So all of them, and the
// CPU, give equal bits.

__device__ void update_moments(const UpdateConstants& c, float g, float& m, float& v) {
  m = __fadd_rn(m, __fmul_rn(c.gain1, __fsub_rn(g, m)));
  v = __fadd_rn(v, __fmul_rn(c.gain2, __fsub_rn(__fmul_rn(g, g), v)));
}

// Where the weight goes. The root of v is taken before the bias correction: v / bias2 could overflow.
__device__ float direction_of(float m, float v, float inverse_bias1, float inverse_sqrt_bias2, float eps) {
  const float root = __fmul_rn(__fsqrt_rn(v), inverse_sqrt_bias2);
  return __fdiv_rn(__fmul_rn(m, inverse_bias1), __fadd_rn(root, eps));
}

// As a call, which takes few instructions where it is rarely wanted.
__device__ __noinline__ float call_direction_of(float m, float v, float inverse_bias1, float inverse_sqrt_bias2,
                                                float eps) {
  return direction_of(m, v, inverse_bias1, inverse_sqrt_bias2, eps);
}

__device__ void update_weight(const UpdateConstants& c, float direction, float& w) {
  w = __fsub_rn(w, __fmul_rn(c.lr, __fadd_rn(direction, __fmul_rn(c.weight_decay, w))));
}

constexpr float kSmallestSafeV = 0x1p-100f;

// direction_of, the same bits, for elements of groups that are in_safe_range: root and quotient by the sequences
// that __fsqrt_rn and __fdiv_rn have for such operands, without their checks for others and the branches, which are
// half of their instructions. v may be 0, too: its root is 0 times a number.
__device__ float safe_direction_of(const UpdateConstants& c, float m, float v) {
  const float inverse_root = approximate_rsqrt(fmaxf(v, kSmallestSafeV));
  float root = __fmul_rn(v, inverse_root);
  root = __fmaf_rn(__fmaf_rn(-root, root, v), __fmul_rn(inverse_root, 0.5f), root);
  const float x = __fmul_rn(m, c.inverse_bias1), y = __fadd_rn(__fmul_rn(root, c.inverse_sqrt_bias2), c.eps);
  float inverse = approximate_reciprocal(y);
  inverse = __fmaf_rn(inverse, __fmaf_rn(-y, inverse, 1.0f), inverse);
  const float quotient = __fmul_rn(x, inverse);
  return __fmaf_rn(inverse, __fmaf_rn(-y, quotient, x), quotient);
}

// Whether no step of safe_direction_of can leave fp32's range, or lose bits below it, for any element of a group.
__device__ bool in_safe_range(const UpdateConstants& c, const MomentExtremes& m, const MomentExtremes& v) {
  const auto within = [](const MomentExtremes& found, float smallest, float largest) {
    return found.amax == 0.0f || (found.amin >= smallest && found.amax <= largest);
  };
  return c.are_safe && within(m, 0x1p-80f, 0x1p10f) && within(v, kSmallestSafeV, 0x1p60f);
}

template <bool kWhole, typename Weights, typename Gradient, typename ExpAvg, typename ExpAvgSq, int kPacks>
__device__ void step_part(const LanePart<kPacks>& part, const Weights& weights, const Gradient* gradient_N,
                          const ExpAvg& exp_avg, const ExpAvgSq& exp_avg_sq, float grad_scale,
                          const UpdateConstants& c) {
  float g[kPacks][kPackElements], m[kPacks][kPackElements], v[kPacks][kPackElements], w[kPacks][kPackElements];
  read_floats<kWhole>(gradient_N, part, g);
  weights.template read<kWhole>(part, w);
  exp_avg.template read<kWhole>(part, m);
  exp_avg_sq.template read<kWhole>(part, v);
  const auto for_each = [](const auto& f) {
#pragma unroll
    for (int pack = 0; pack < kPacks; ++pack) {
#pragma unroll
      for (int i = 0; i < kPackElements; ++i) f(pack, i);
    }
  };
  for_each([&](int k, int i) { update_moments(c, __fmul_rn(g[k][i], grad_scale), m[k][i], v[k][i]); });
  const auto extremes = exp_avg.extremes(m);
  const auto extremes_sq = exp_avg_sq.extremes(v);
  if constexpr (!std::is_same_v<typename ExpAvg::Extremes, MomentExtremes>) {
    for_each([&](int k, int i) {
      update_weight(c, direction_of(m[k][i], v[k][i], c.inverse_bias1, c.inverse_sqrt_bias2, c.eps), w[k][i]);
    });
  } else if (in_safe_range(c, extremes, extremes_sq)) {
    for_each([&](int k, int i) { update_weight(c, safe_direction_of(c, m[k][i], v[k][i]), w[k][i]); });
  } else {
    for_each([&](int k, int i) {
      update_weight(c, call_direction_of(m[k][i], v[k][i], c.inverse_bias1, c.inverse_sqrt_bias2, c.eps), w[k][i]);
    });
  }
  weights.template write<kWhole>(part, w);
  exp_avg.template write<kWhole>(part, m, extremes);
  exp_avg_sq.template write<kWhole>(part, v, extremes_sq);
}

// ---- Kernels ----

// Calls f(part, kWhole) for the lane's part of a tensor of N elements, unless nothing is left for its warp.
// kWhole: all lanes of the warp have whole groups, in aligned tensors.
template <int kPacks, typename F>
__device__ void with_part(int64_t N, bool aligned, const F& f) {
  const int64_t warp = int64_t{blockIdx.x} * kWarpsPerBlock + threadIdx.x / kWarpSize;
  if (warp * kPacks * kMomentGroup >= N) return;
  const LanePart<kPacks> part{warp * kPacks + threadIdx.x % kWarpSize / LanePart<kPacks>::kLanes, N};
  if (aligned && (warp + 1) * kPacks * kMomentGroup <= N) {
    f(part, std::true_type());
  } else {
    f(part, std::false_type());
  }
}

template <typename Weights, typename Gradient, typename ExpAvg, typename ExpAvgSq>
__global__ void __launch_bounds__(kThreads)
    adamw_kernel(Weights weights, const Gradient* gradient_N, ExpAvg exp_avg, ExpAvgSq exp_avg_sq,
                 const float* grad_scale, UpdateConstants constants, int64_t N, bool aligned) {
  const float scale = *grad_scale;
  if (!isfinite(scale)) return;
  with_part<ExpAvg::kPacks>(N, aligned, [&](const auto& part, auto whole) {
    step_part<whole.value>(part, weights, gradient_N, exp_avg, exp_avg_sq, scale, constants);
  });
}

template <typename Moment>
__global__ void __launch_bounds__(kThreads)
    moment_encode_kernel(const float* values_N, Moment moment, int64_t N, bool aligned) {
  with_part<Moment::kPacks>(N, aligned, [&](const auto& part, auto whole) {
    float x[Moment::kPacks][kPackElements];
    read_floats<whole.value>(values_N, part, x);
    moment.template write<whole.value>(part, x, moment.extremes(x));
  });
}

template <typename Moment>
__global__ void __launch_bounds__(kThreads)
    moment_decode_kernel(Moment moment, float* values_N, int64_t N, bool aligned) {
  with_part<Moment::kPacks>(N, aligned, [&](const auto& part, auto whole) {
    float x[Moment::kPacks][kPackElements];
    moment.template read<whole.value>(part, x);
    write_floats<whole.value>(values_N, part, x);
  });
}

// ---- Launches ----

// With `groups` of them for each warp.
unsigned num_blocks(int64_t N, int groups) {
  return static_cast<unsigned>(ceil_div(N, kMomentGroup * groups * kWarpsPerBlock));
}

// Whether a lane can move four elements as one.
bool is_aligned_for_packs(const TensorView& t) {
  return is_aligned(t.data, static_cast<size_t>(kPackElements * size_of(t.dtype)));
}

}  // namespace

void adamw_step(Device& device, const AdamwStep& a) {
  const int64_t N = a.weight.numel();
  bool aligned = true;
  for (const TensorView& t : {a.weight, a.master, a.gradient, a.exp_avg.values, a.exp_avg_sq.values}) {
    aligned = aligned && is_aligned_for_packs(t);
  }
  const UpdateConstants constants(a);
  const float* grad_scale = a.grad_scale.as<float>();
  const cudaStream_t stream = as_cuda(device).stream();
  with_weights(a, [&](auto weights) {
    with_moments(a, [&](auto exp_avg, auto exp_avg_sq) {
      with_plain_type(a.gradient.dtype, [&](auto type) {
        const auto* gradient = a.gradient.as<decltype(type)>();
        adamw_kernel<<<num_blocks(N, exp_avg.kPacks), kThreads, 0, stream>>>(weights, gradient, exp_avg, exp_avg_sq,
                                                                             grad_scale, constants, N, aligned);
      });
    });
  });
  check_launch("adamw_step");
}

void moment_encode(Device& device, const MomentEncode& a) {
  const int64_t N = a.values.numel();
  const bool aligned = is_aligned_for_packs(a.values) && is_aligned_for_packs(a.moment.values);
  with_moment(a.moment, a.is_second, [&](auto moment) {
    moment_encode_kernel<<<num_blocks(N, moment.kPacks), kThreads, 0, as_cuda(device).stream()>>>(
        a.values.as<float>(), moment, N, aligned);
  });
  check_launch("moment_encode");
}

void moment_decode(Device& device, const MomentDecode& a) {
  const int64_t N = a.values.numel();
  const bool aligned = is_aligned_for_packs(a.values) && is_aligned_for_packs(a.moment.values);
  with_moment(a.moment, /*is_second=*/false, [&](auto moment) {
    moment_decode_kernel<<<num_blocks(N, moment.kPacks), kThreads, 0, as_cuda(device).stream()>>>(
        moment, a.values.as<float>(), N, aligned);
  });
  check_launch("moment_decode");
}

}  // namespace parka::cuda
