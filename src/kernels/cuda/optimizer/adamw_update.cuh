#pragma once
#include <cmath>

#include "kernels/cuda/optimizer/step_kernels.cuh"

// AdamW of one parameter (ops/optimizer/adamw.h), g = gradient * grad_scale:
//
//   m += (1 - beta1) (g - m)                     first moment,  exp_avg
//   v += (1 - beta2) (g^2 - v)                   second moment, exp_avg_sq
//   w -= lr (m / bias1 / (sqrt(v / bias2) + eps) + weight_decay w)        update_weight() of step_kernels.cuh
//
// with bias_i = 1 - beta_i^t. Numbers are multiplied by the rounded 1 / bias1 and 1 / sqrt(bias2). Weights are bf16
// or fp32, with a master or what is left of one beside them (SteppedWeights of step_kernels.cuh), gradients bf16 or
// fp32.
//
// A lane has a part of each tensor in registers, as floats g[e], m[e], v[e], w[e] (lanes.cuh); moments.cuh says how
// m and v are stored in FP8. There are two kernels, which give equal bits:
//
//   adamw_fp8_kernel    whole blocks with expanded FP8 moments, which is where the time goes
//   adamw_kernel        all else: other moments, ends of tensors, tensors that are not aligned
//
// All arithmetic is in intrinsics that round once: otherwise a compiler would make one operation of a product and a
// sum in one instance, and not in another.
namespace parka::cuda {

struct UpdateConstants {
  float gain1, gain2;  // 1 - beta
  float inverse_bias1, inverse_sqrt_bias2;
  float lr, eps, weight_decay;
  bool are_safe;  // for safe_direction_of, or for a direction of 0

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

__device__ inline void update_moments(const UpdateConstants& c, float g, float& m, float& v) {
  m = __fadd_rn(m, __fmul_rn(c.gain1, __fsub_rn(g, m)));
  v = __fadd_rn(v, __fmul_rn(c.gain2, __fsub_rn(__fmul_rn(g, g), v)));
}

// The root of v is taken before the bias correction: v / bias2 could overflow.
__device__ inline float direction_of(float m, float v, float inverse_bias1, float inverse_sqrt_bias2, float eps) {
  const float root = __fmul_rn(__fsqrt_rn(v), inverse_sqrt_bias2);
  return __fdiv_rn(__fmul_rn(m, inverse_bias1), __fadd_rn(root, eps));
}

// Tensors, or a lane's part of them, as they are stored.
template <typename Weights, typename Gradient, typename ExpAvg, typename ExpAvgSq>
struct AdamwTensors {
  Weights weights;
  Gradient gradient;
  ExpAvg exp_avg;
  ExpAvgSq exp_avg_sq;

  PARKA_HOST_DEVICE void move(int64_t elements) {
    weights.move(elements);
    gradient.move(elements);
    exp_avg.move(elements);
    exp_avg_sq.move(elements);
  }
};

template <typename Tensors>
using LargestWeight = LargestStored<typename decltype(Tensors::weights)::Type>;

// ---- Any formats ----

// Where grad_scale is not finite nothing changes; then only the largest weight is found.
template <typename Shape, typename Tensors>
__global__ void __launch_bounds__(Shape::kThreads)
    adamw_kernel(Tensors tensors, const float* grad_scale, float* weight_amax, UpdateConstants c, int64_t N,
                 bool aligned) {
  const float scale = *grad_scale;
  const bool changes = isfinite(scale);
  if (!changes && weight_amax == nullptr) return;
  LargestWeight<Tensors> largest;  // elements past the end are read as zeros and raise nothing, nor does NaN
  with_part<Shape>(N, aligned, [&](const auto& part, int64_t first) {
    tensors.move(first);
    if (!changes) {
      largest.raise_to(load_part(tensors.weights.x_N, part));
    } else {
      float g[Shape::kCount], w[Shape::kCount], m[Shape::kCount], v[Shape::kCount];
      to_floats(tensors.gradient.load(part), g);
      to_floats(tensors.weights.load(part), w);
      to_floats(tensors.exp_avg.load(part), m);
      to_floats(tensors.exp_avg_sq.load(part), v);
      for_each_element<Shape>([&](int e) {
        update_moments(c, __fmul_rn(g[e], scale), m[e], v[e]);
        update_weight(c, direction_of(m[e], v[e], c.inverse_bias1, c.inverse_sqrt_bias2, c.eps), w[e]);
      });
      largest.raise_to(tensors.weights.store(part, w));
      tensors.exp_avg.store(part, m);
      tensors.exp_avg_sq.store(part, v);
    }
  });
  largest.template write<Shape::kThreads>(weight_amax);
}

// ---- FP8 moments: the direction in half the instructions ----

// As a call, which takes few instructions where it is rarely wanted.
__device__ __noinline__ inline float call_direction_of(float m, float v, float inverse_bias1,
                                                       float inverse_sqrt_bias2, float eps) {
  return direction_of(m, v, inverse_bias1, inverse_sqrt_bias2, eps);
}

// direction_of, the same bits, for elements of groups that are in_safe_range: root and quotient as __fsqrt_rn and
// __fdiv_rn have them, without checks for other operands, which are half of their instructions.
__device__ inline float safe_direction_of(const UpdateConstants& c, float m, float v) {
  float inverse_root;  // to within 2^-22 of itself
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(inverse_root) : "f"(v));
  float root = __fmul_rn(v, inverse_root);
  root = __fmaf_rn(__fmaf_rn(-root, root, v), __fmul_rn(inverse_root, 0.5f), root);
  const float x = __fmul_rn(m, c.inverse_bias1), y = __fadd_rn(__fmul_rn(root, c.inverse_sqrt_bias2), c.eps);
  float inverse = approximate_reciprocal(y);
  inverse = __fmaf_rn(inverse, __fmaf_rn(-y, inverse, 1.0f), inverse);
  const float quotient = __fmul_rn(x, inverse);
  return __fmaf_rn(inverse, __fmaf_rn(-y, quotient, x), quotient);
}

constexpr float kLargestSafeV = 0x1p60f;

// True if no step of safe_direction_of can leave fp32's range, or lose bits below it, for any element of a group.
__device__ inline bool in_safe_range(const UpdateConstants& c, const MomentExtremes& m, const MomentExtremes& v) {
  return c.are_safe && m.amin >= 0x1p-80f && m.amax <= 0x1p10f && !v.has_zeros && v.amin >= 0x1p-100f &&
         v.amax <= kLargestSafeV;
}

template <typename Shape>
__device__ void update_weights(const UpdateConstants& c, const float (&m)[Shape::kCount],
                               const float (&v)[Shape::kCount], const MomentExtremes& of_m,
                               const MomentExtremes& of_v, float (&w)[Shape::kCount]) {
  if (__all_sync(kFullWarp, in_safe_range(c, of_m, of_v))) {
    for_each_element<Shape>([&](int e) { update_weight(c, safe_direction_of(c, m[e], v[e]), w[e]); });
  } else if (c.are_safe && of_m.amax == 0.0f && of_v.amax <= kLargestSafeV) {
    // m is zero, as in rows of an embedding that no token has had yet, and so is the quotient: m is the direction.
    for_each_element<Shape>([&](int e) { update_weight(c, m[e], w[e]); });
  } else {
    for_each_element<Shape>([&](int e) {
      const float direction = call_direction_of(m[e], v[e], c.inverse_bias1, c.inverse_sqrt_bias2, c.eps);
      update_weight(c, direction, w[e]);
    });
  }
}

template <typename Tensors, typename Part>
__device__ auto load_elements(const Tensors& t, const Part& part) {
  return AdamwTensors{t.weights.load(part), t.gradient.load(part), t.exp_avg.load(part), t.exp_avg_sq.load(part)};
}

// Takes a plain pointer: with the step's tensors here, the step would need more registers.
template <typename Shape, typename Tensors, typename T>
__device__ void find_unchanged_amax(const T* weight_N, int count, float* weight_amax) {
  if (weight_amax == nullptr) return;
  LargestWeight<Tensors> largest;
  for (int block = static_cast<int>(blockIdx.x); block < count; block += static_cast<int>(gridDim.x)) {
    const T* const first = weight_N + int64_t{block} * Shape::kBlockElements + Shape::offset();
    largest.raise_to(load_part(first, WholePart<Shape>{}));
  }
  largest.template write<Shape::kThreads>(weight_amax);
}

// Steps `count` times Shape::kBlockElements elements of aligned tensors: every block copies the table of roots to
// its shared memory, so there is one block for each SM.
//
// Each warp asks BlockScheduler for its share of one block of elements after another, and loads the next one while
// it encodes; asynchronous copies all the time were slower. Dynamic scheduling matters: with equal shares for all
// warps, some multiprocessors wait for others during 8 % of the time. After memory, instructions are the limit:
// docs/kernels/adamw.md counts them. Registers are used up: a few more live values spill.
template <typename Shape, typename Tensors>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    adamw_fp8_kernel(const __grid_constant__ Tensors tensors, const float* grad_scale, float* weight_amax,
                     UpdateConstants c, int count, unsigned* counters) {
  wait_for_kernel_before();
  const float scale = *grad_scale;
  if (!isfinite(scale)) {
    find_unchanged_amax<Shape, Tensors>(tensors.weights.x_N, count, weight_amax);
    return;
  }
  constexpr WholePart<Shape> part;
  BlockScheduler scheduler(counters, count);
  auto elements = load_elements(at_block<Shape>(tensors, scheduler.block()), part);
  const RootTable& roots = copy_roots<Shape::kThreads>();

  LargestWeight<Tensors> largest;
  for (; scheduler.has_block(); scheduler.advance()) {
    scheduler.ask();
    const Tensors t = at_block<Shape>(tensors, scheduler.block());
    float g[Shape::kCount], w[Shape::kCount], m[Shape::kCount], v[Shape::kCount];
    to_floats(elements.gradient, g);
    decode(elements.exp_avg, roots, m);
    decode(elements.exp_avg_sq, roots, v);
    for_each_element<Shape>([&](int e) { update_moments(c, __fmul_rn(g[e], scale), m[e], v[e]); });
    const MomentExtremes of_m = t.exp_avg.extremes(part, m), of_v = t.exp_avg_sq.extremes(part, v);
    to_floats(elements.weights, w);
    update_weights<Shape>(c, m, v, of_m, of_v, w);
    largest.raise_to(t.weights.store(part, w));
    if (scheduler.has_next()) elements = load_elements(at_block<Shape>(tensors, scheduler.next()), part);
    t.exp_avg.store(part, m, of_m);
    t.exp_avg_sq.store(part, v, of_v);
  }
  BlockScheduler::end<Shape::kThreads>(counters);
  largest.template write<Shape::kThreads>(weight_amax);
}

}  // namespace parka::cuda
