#include "kernels/cuda/adamw.h"

#include <cmath>

#include "core/philox.h"
#include "core/split_float.h"
#include "kernels/cuda/check.h"
#include "kernels/cuda/cuda_device.h"
#include "kernels/cuda/vector.cuh"

// A warp takes one group of 128 elements: it reads the group of every tensor as fp32, updates it and writes it
// back. A lane has four neighbours, those that share a draw of philox4x32.
namespace parka::cuda {
namespace {

constexpr int kLaneElements = 4;
constexpr int kGroupsPerBlock = 8;
constexpr int kThreads = kGroupsPerBlock * kWarpSize;
static_assert(kMomentGroup == kWarpSize * kLaneElements);

template <typename T>
using LanePack = Pack<T, kLaneElements>;

// ---- One lane's elements of a tensor ----

// Elements [first, first + count); count is below 4 only in the last group of a tensor, where it may be 0.
struct LaneRange {
  int64_t first;
  int count;
};

// kWhole: count is 4 and the tensor is aligned to four elements. Elements past the end read as 0.
template <bool kWhole, typename T>
__device__ LanePack<T> read_elements(const T* p, const LaneRange& range) {
  if constexpr (kWhole) {
    return *reinterpret_cast<const LanePack<T>*>(p + range.first);
  } else {
    LanePack<T> x{};
#pragma unroll
    for (int i = 0; i < kLaneElements; ++i) {
      if (i < range.count) x.element[i] = p[range.first + i];
    }
    return x;
  }
}

template <bool kWhole, typename T>
__device__ void write_elements(T* p, const LaneRange& range, const LanePack<T>& x) {
  if constexpr (kWhole) {
    *reinterpret_cast<LanePack<T>*>(p + range.first) = x;
  } else {
#pragma unroll
    for (int i = 0; i < kLaneElements; ++i) {
      if (i < range.count) p[range.first + i] = x.element[i];
    }
  }
}

template <bool kWhole, typename T>
__device__ void read_floats(const T* p, const LaneRange& range, float (&x)[kLaneElements]) {
  const LanePack<T> pack = read_elements<kWhole>(p, range);
#pragma unroll
  for (int i = 0; i < kLaneElements; ++i) x[i] = to_float(pack.element[i]);
}

template <bool kWhole, typename T>
__device__ void write_floats(T* p, const LaneRange& range, const float (&x)[kLaneElements]) {
  LanePack<T> pack;
#pragma unroll
  for (int i = 0; i < kLaneElements; ++i) pack.element[i] = from_float<T>(x[i]);
  write_elements<kWhole>(p, range, pack);
}

// ---- Moments: read() and write() are called by all lanes of a group's warp ----

// fp32 or bf16.
template <typename T>
struct PlainMoment {
  T* values_N;

  template <bool kWhole>
  __device__ void read(const LaneRange& range, float (&x)[kLaneElements]) const {
    read_floats<kWhole>(values_N, range, x);
  }
  template <bool kWhole>
  __device__ void write(const LaneRange& range, const float (&x)[kLaneElements]) const {
    write_floats<kWhole>(values_N, range, x);
  }
};

// Calls f with the moment's device form.
template <typename F>
void with_moment(const MomentView& moment, const F& f) {
  PARKA_REQUIRE(!is_float8(moment.values.dtype));
  with_plain_type(moment.values.dtype, [&](auto type) {
    using T = decltype(type);
    f(PlainMoment<T>{moment.values.as<T>()});
  });
}

// ---- Weights, one type for each MasterForm ----

struct Fp32Master {
  BFloat16* weight_N;
  float* master_N;

  template <bool kWhole>
  __device__ void read(const LaneRange& range, float (&w)[kLaneElements]) const {
    read_floats<kWhole>(master_N, range, w);
  }
  template <bool kWhole>
  __device__ void write(const LaneRange& range, const float (&w)[kLaneElements]) const {
    LanePack<BFloat16> weight;
#pragma unroll
    for (int i = 0; i < kLaneElements; ++i) weight.element[i] = split_float(w[i]).weight;
    write_elements<kWhole>(weight_N, range, weight);
    write_floats<kWhole>(master_N, range, w);
  }
};

struct SplitMaster {
  BFloat16* weight_N;
  uint16_t* remainder_N;

  template <bool kWhole>
  __device__ void read(const LaneRange& range, float (&w)[kLaneElements]) const {
    const LanePack<BFloat16> weight = read_elements<kWhole>(weight_N, range);
    const LanePack<uint16_t> remainder = read_elements<kWhole>(remainder_N, range);
#pragma unroll
    for (int i = 0; i < kLaneElements; ++i) w[i] = join_float(weight.element[i], remainder.element[i]);
  }
  template <bool kWhole>
  __device__ void write(const LaneRange& range, const float (&w)[kLaneElements]) const {
    LanePack<BFloat16> weight;
    LanePack<uint16_t> remainder;
#pragma unroll
    for (int i = 0; i < kLaneElements; ++i) {
      const SplitFloat split = split_float(w[i]);
      weight.element[i] = split.weight;
      remainder.element[i] = split.remainder;
    }
    write_elements<kWhole>(weight_N, range, weight);
    write_elements<kWhole>(remainder_N, range, remainder);
  }
};

struct StochasticWeight {
  BFloat16* weight_N;
  uint64_t seed, step, first_element;

  template <bool kWhole>
  __device__ void read(const LaneRange& range, float (&w)[kLaneElements]) const {
    read_floats<kWhole>(weight_N, range, w);
  }
  template <bool kWhole>
  __device__ void write(const LaneRange& range, const float (&w)[kLaneElements]) const {
    const uint64_t first = first_element + static_cast<uint64_t>(range.first);
    const auto random = philox4x32(seed, step, first / kLaneElements);
    LanePack<BFloat16> weight;
#pragma unroll
    for (int i = 0; i < kLaneElements; ++i) weight.element[i] = encode_bf16_stochastic(w[i], random[i]);
    write_elements<kWhole>(weight_N, range, weight);
  }
};

struct Fp32Weight {
  float* weight_N;

  template <bool kWhole>
  __device__ void read(const LaneRange& range, float (&w)[kLaneElements]) const {
    read_floats<kWhole>(weight_N, range, w);
  }
  template <bool kWhole>
  __device__ void write(const LaneRange& range, const float (&w)[kLaneElements]) const {
    write_floats<kWhole>(weight_N, range, w);
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

  explicit UpdateConstants(const AdamwStep& a)
      : gain1(static_cast<float>(1.0 - a.beta1)),
        gain2(static_cast<float>(1.0 - a.beta2)),
        inverse_bias1(static_cast<float>(1.0 / a.bias_correction1)),
        inverse_sqrt_bias2(static_cast<float>(1.0 / std::sqrt(double{a.bias_correction2}))),
        lr(a.lr),
        eps(a.eps),
        weight_decay(a.weight_decay) {}
};

// w, m and v of one element, in place. Each operation is rounded by itself: left to the compiler, instances would
// contract different ones to fused multiply-adds, and master forms would drift apart. So all of them, and the CPU,
// give equal bits. The root of v is taken before the bias correction: v / bias2 could overflow.
__device__ void update(const UpdateConstants& c, float g, float& m, float& v, float& w) {
  m = __fadd_rn(m, __fmul_rn(c.gain1, __fsub_rn(g, m)));
  v = __fadd_rn(v, __fmul_rn(c.gain2, __fsub_rn(__fmul_rn(g, g), v)));
  const float root = __fmul_rn(__fsqrt_rn(v), c.inverse_sqrt_bias2);
  const float direction = __fdiv_rn(__fmul_rn(m, c.inverse_bias1), __fadd_rn(root, c.eps));
  w = __fsub_rn(w, __fmul_rn(c.lr, __fadd_rn(direction, __fmul_rn(c.weight_decay, w))));
}

template <bool kWhole, typename Weights, typename Gradient, typename ExpAvg, typename ExpAvgSq>
__device__ void step_group(const LaneRange& range, const Weights& weights, const Gradient* gradient_N,
                           const ExpAvg& exp_avg, const ExpAvgSq& exp_avg_sq, float grad_scale,
                           const UpdateConstants& c) {
  float g[kLaneElements], m[kLaneElements], v[kLaneElements], w[kLaneElements];
  read_floats<kWhole>(gradient_N, range, g);
  exp_avg.template read<kWhole>(range, m);
  exp_avg_sq.template read<kWhole>(range, v);
  weights.template read<kWhole>(range, w);
#pragma unroll
  for (int i = 0; i < kLaneElements; ++i) update(c, __fmul_rn(g[i], grad_scale), m[i], v[i], w[i]);
  exp_avg.template write<kWhole>(range, m);
  exp_avg_sq.template write<kWhole>(range, v);
  weights.template write<kWhole>(range, w);
}

// ---- Kernels: a warp for each group ----

__device__ int64_t group_of_warp() { return int64_t{blockIdx.x} * kGroupsPerBlock + threadIdx.x / kWarpSize; }

// The lane's share of a group, which begins before N.
__device__ LaneRange lane_range(int64_t group, int64_t N) {
  const int64_t first = group * kMomentGroup + threadIdx.x % kWarpSize * kLaneElements;
  const int64_t left = N - first;
  return {first, left >= kLaneElements ? kLaneElements : left > 0 ? static_cast<int>(left) : 0};
}

// Whether all lanes of a group have four elements.
__device__ bool is_whole(int64_t group, int64_t N) { return (group + 1) * kMomentGroup <= N; }

template <typename Weights, typename Gradient, typename ExpAvg, typename ExpAvgSq>
__global__ void __launch_bounds__(kThreads)
    adamw_kernel(Weights weights, const Gradient* gradient_N, ExpAvg exp_avg, ExpAvgSq exp_avg_sq,
                 const float* grad_scale, UpdateConstants constants, int64_t N, bool aligned) {
  const int64_t group = group_of_warp();
  const float scale = *grad_scale;
  if (group * kMomentGroup >= N || !isfinite(scale)) return;
  const LaneRange range = lane_range(group, N);
  if (aligned && is_whole(group, N)) {
    step_group<true>(range, weights, gradient_N, exp_avg, exp_avg_sq, scale, constants);
  } else {
    step_group<false>(range, weights, gradient_N, exp_avg, exp_avg_sq, scale, constants);
  }
}

template <typename Moment>
__global__ void __launch_bounds__(kThreads)
    moment_encode_kernel(const float* values_N, Moment moment, int64_t N, bool aligned) {
  const int64_t group = group_of_warp();
  if (group * kMomentGroup >= N) return;
  const LaneRange range = lane_range(group, N);
  float x[kLaneElements];
  if (aligned && is_whole(group, N)) {
    read_floats<true>(values_N, range, x);
    moment.template write<true>(range, x);
  } else {
    read_floats<false>(values_N, range, x);
    moment.template write<false>(range, x);
  }
}

template <typename Moment>
__global__ void __launch_bounds__(kThreads)
    moment_decode_kernel(Moment moment, float* values_N, int64_t N, bool aligned) {
  const int64_t group = group_of_warp();
  if (group * kMomentGroup >= N) return;
  const LaneRange range = lane_range(group, N);
  float x[kLaneElements];
  if (aligned && is_whole(group, N)) {
    moment.template read<true>(range, x);
    write_floats<true>(values_N, range, x);
  } else {
    moment.template read<false>(range, x);
    write_floats<false>(values_N, range, x);
  }
}

// ---- Launches ----

unsigned num_blocks(int64_t N) {
  return static_cast<unsigned>(ceil_div(ceil_div(N, kMomentGroup), kGroupsPerBlock));
}

// Whether a lane can move its four elements as one.
bool is_aligned_for_lanes(const TensorView& t) {
  return is_aligned(t.data, static_cast<size_t>(kLaneElements * size_of(t.dtype)));
}

}  // namespace

void adamw_step(Device& device, const AdamwStep& a) {
  const int64_t N = a.weight.numel();
  bool aligned = true;
  for (const TensorView& t : {a.weight, a.master, a.gradient, a.exp_avg.values, a.exp_avg_sq.values}) {
    aligned = aligned && is_aligned_for_lanes(t);
  }
  const UpdateConstants constants(a);
  const float* grad_scale = a.grad_scale.as<float>();
  const cudaStream_t stream = as_cuda(device).stream();
  with_weights(a, [&](auto weights) {
    with_moment(a.exp_avg, [&](auto exp_avg) {
      with_moment(a.exp_avg_sq, [&](auto exp_avg_sq) {
        with_plain_type(a.gradient.dtype, [&](auto type) {
          const auto* gradient = a.gradient.as<decltype(type)>();
          adamw_kernel<<<num_blocks(N), kThreads, 0, stream>>>(weights, gradient, exp_avg, exp_avg_sq, grad_scale,
                                                               constants, N, aligned);
        });
      });
    });
  });
  check_launch("adamw_step");
}

void moment_encode(Device& device, const MomentEncode& a) {
  const int64_t N = a.values.numel();
  const bool aligned = is_aligned_for_lanes(a.values) && is_aligned_for_lanes(a.moment.values);
  with_moment(a.moment, [&](auto moment) {
    moment_encode_kernel<<<num_blocks(N), kThreads, 0, as_cuda(device).stream()>>>(a.values.as<float>(), moment, N,
                                                                                   aligned);
  });
  check_launch("moment_encode");
}

void moment_decode(Device& device, const MomentDecode& a) {
  const int64_t N = a.values.numel();
  const bool aligned = is_aligned_for_lanes(a.values) && is_aligned_for_lanes(a.moment.values);
  with_moment(a.moment, [&](auto moment) {
    moment_decode_kernel<<<num_blocks(N), kThreads, 0, as_cuda(device).stream()>>>(moment, a.values.as<float>(), N,
                                                                                   aligned);
  });
  check_launch("moment_decode");
}

}  // namespace parka::cuda
