#pragma once
#include <cstdint>
#include <type_traits>

#include "kernels/cuda/optimizer/adamw_moments.cuh"

// A lane's part of AdamW's step, from tensors as stored and back. All lanes of a warp call its functions.
namespace parka::cuda {

template <typename Weights, typename GradientOf, typename ExpAvg, typename ExpAvgSq>
struct Tensors {
  using Part = typename ExpAvg::Part;
  using LargestWeight = LargestStored<std::remove_pointer_t<decltype(Weights::weight_N)>>;

  Weights weights;
  GradientOf gradient;
  ExpAvg exp_avg;
  ExpAvgSq exp_avg_sq;

  PARKA_HOST_DEVICE void move(int64_t elements) {
    weights.move(elements);
    gradient.move(elements);
    exp_avg.move(elements);
    exp_avg_sq.move(elements);
  }
};

// With moments of any kind, one after the other.
template <bool kWhole, typename Tensors, typename Part>
__device__ void step_in_turn(const Tensors& t, const Part& part, float grad_scale, const UpdateConstants& c,
                             typename Tensors::LargestWeight& largest) {
  PartValues<Part> g, w, m, v;
  to_floats(t.gradient.template load<kWhole>(part), g);
  to_floats(t.weights.template load<kWhole>(part), w);
  t.exp_avg.template read<kWhole>(part, m);
  t.exp_avg_sq.template read<kWhole>(part, v);
  for_each_element<Part>([&](int pack, int i) {
    float& m_i = m[pack][i];
    float& v_i = v[pack][i];
    update_moments(c, __fmul_rn(g[pack][i], grad_scale), m_i, v_i);
    update_weight(c, direction_of(m_i, v_i, c.inverse_bias1, c.inverse_sqrt_bias2, c.eps), w[pack][i]);
  });
  largest.raise_to(t.weights.template store<kWhole>(part, w));
  t.exp_avg.template write<kWhole>(part, m);
  t.exp_avg_sq.template write<kWhole>(part, v);
}

// As a call, which takes few instructions where it is rarely wanted.
__device__ __noinline__ inline float call_direction_of(float m, float v, float inverse_bias1,
                                                       float inverse_sqrt_bias2, float eps) {
  return direction_of(m, v, inverse_bias1, inverse_sqrt_bias2, eps);
}

// direction_of, the same bits, for elements of groups that are in_safe_range: root and quotient as __fsqrt_rn and
// __fdiv_rn have them, without checks for other operands, which are half of their instructions.
__device__ inline float safe_direction_of(const UpdateConstants& c, float m, float v) {
  const float inverse_root = approximate_rsqrt(v);
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

template <typename Part>
__device__ void update_weights(const UpdateConstants& c, const PartValues<Part>& m, const PartValues<Part>& v,
                               const MomentExtremes& of_m, const MomentExtremes& of_v, PartValues<Part>& w) {
  if (__all_sync(kFullWarp, in_safe_range(c, of_m, of_v))) {
    for_each_element<Part>(
        [&](int pack, int i) { update_weight(c, safe_direction_of(c, m[pack][i], v[pack][i]), w[pack][i]); });
  } else if (c.are_safe && of_m.amax == 0.0f && of_v.amax <= kLargestSafeV) {
    // A quotient of zero, as in rows of an embedding that no token has had yet.
    for_each_element<Part>([&](int pack, int i) { update_weight(c, m[pack][i], w[pack][i]); });
  } else {
    for_each_element<Part>([&](int pack, int i) {
      const float direction =
          call_direction_of(m[pack][i], v[pack][i], c.inverse_bias1, c.inverse_sqrt_bias2, c.eps);
      update_weight(c, direction, w[pack][i]);
    });
  }
}

// A lane's elements of all tensors, as they are stored.
template <typename Weights, typename GradientOf, typename ExpAvg, typename ExpAvgSq>
struct StoredElements {
  Weights weights;
  GradientOf gradient;
  ExpAvg exp_avg;
  ExpAvgSq exp_avg_sq;
};

template <typename Tensors, typename Part>
__device__ auto load_elements(const Tensors& t, const Part& part) {
  return StoredElements{t.weights.template load<true>(part), t.gradient.template load<true>(part),
                        t.exp_avg.template load<true>(part), t.exp_avg_sq.template load<true>(part)};
}

// With fp8 moments: steps the `elements` of `part`. Calls load_next() once they are read, before encoding.
template <typename Tensors, typename Part, typename Elements, typename LoadNext>
__device__ void step_fp8(const Tensors& t, const Part& part, const RootTable& roots, float grad_scale,
                         const UpdateConstants& c, const Elements& elements,
                         typename Tensors::LargestWeight& largest, const LoadNext& load_next) {
  PartValues<Part> g, w, m, v;
  to_floats(elements.gradient, g);
  t.exp_avg.decode(elements.exp_avg, roots, m);
  t.exp_avg_sq.decode(elements.exp_avg_sq, roots, v);
  for_each_element<Part>(
      [&](int pack, int i) { update_moments(c, __fmul_rn(g[pack][i], grad_scale), m[pack][i], v[pack][i]); });
  const MomentExtremes of_m = t.exp_avg.extremes(m), of_v = t.exp_avg_sq.extremes(v);
  to_floats(elements.weights, w);
  update_weights<Part>(c, m, v, of_m, of_v, w);
  largest.raise_to(t.weights.template store<true>(part, w));
  load_next();
  t.exp_avg.template store<true>(part, m, of_m);
  t.exp_avg_sq.template store<true>(part, v, of_v);
}

}  // namespace parka::cuda
