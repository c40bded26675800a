#pragma once
#include <type_traits>

#include "kernels/cuda/ptx/mma.cuh"
#include "kernels/cuda/vector.cuh"
#include "kernels/ops/swiglu/swiglu.h"

// The functions of one element of SwiGLU. The compiler cannot fuse their operations with others, so all kernels
// that read a gate in one format get the same bits, forward and backward.
namespace parka::cuda {

constexpr float kLog2E = 1.44269504088896340736f, kLn2 = 0.693147180559945309417f;

// Takes e^-gate. The reciprocal of a number >= 1 is one instruction, where a division also minds numbers near 0.
__device__ inline float sigmoid_of_exponential(float exponential) {
  float reciprocal;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(__fadd_rn(1.0f, exponential)));
  return reciprocal;
}

// To within 1e-6 of itself. It saturates to 0 and 1: e^-gate becomes infinity, or 0.
__device__ inline float sigmoid(float gate) {
  // Rounded down, so that what is left of -gate is never negative where e^-gate is large: where that is lost,
  // because it is NaN, the maximum is right.
  const float exponent = __fmul_rd(gate, -kLog2E);
  const float estimate = exp2_approximate(exponent), left = __fmaf_rn(exponent, -kLn2, -gate);
  return sigmoid_of_exponential(fmaxf(__fmaf_rn(estimate, left, estimate), estimate));
}

// The sigmoid of a gate that is stored as FP8, for all but a silu that is to be saved: without the above
// correction, to within 1e-7 |gate|. FP8 changes silu by more than 1e-2 of itself.
__device__ inline float sigmoid_of_coded(float gate) {
  return sigmoid_of_exponential(exp2_approximate(__fmul_rn(gate, -kLog2E)));
}

__device__ inline float silu(float gate, float sigmoid_of_gate) { return __fmul_rn(gate, sigmoid_of_gate); }
__device__ inline float silu_slope(float sigmoid_of_gate, float silu_of_gate) {
  return __fmaf_rn(silu_of_gate, __fsub_rn(1.0f, sigmoid_of_gate), sigmoid_of_gate);
}

// Kernels get the activation as a constant where it is SiLU, which most models have, and otherwise as a number: the
// former then hold no branch, and another activation that is added makes no kernel of its own.
using SiluActivation = std::integral_constant<GateActivation, GateActivation::kSilu>;

template <typename F>
void with_activation(GateActivation activation, const F& f) {
  if (activation == GateActivation::kSilu) {
    f(SiluActivation());
  } else {
    f(activation);
  }
}

// v(gate) of GELU, and its derivative.
__device__ inline float gelu_argument(float gate) {
  return __fmul_rn(gate, __fmaf_rn(__fmul_rn(kGeluCubic, gate), gate, kGeluLinear));
}
__device__ inline float gelu_argument_slope(float gate) {
  return __fmaf_rn(__fmul_rn(3 * kGeluCubic, gate), gate, kGeluLinear);
}

// Some gates' activated = act(gate), unless it holds what was saved of that, and slope = act'(gate). `coded`: the
// gates are stored as FP8.
template <int kCount>
__device__ inline void activate(GateActivation activation, bool coded, bool saved, const float (&gate)[kCount],
                                float (&activated)[kCount], float (&slope)[kCount]) {
  if (activation == GateActivation::kSilu) {
    for_each<kCount>([&](int i) {
      const float s = coded ? sigmoid_of_coded(gate[i]) : sigmoid(gate[i]);
      if (!saved) activated[i] = silu(gate[i], s);
      slope[i] = silu_slope(s, activated[i]);
    });
  } else {
    for_each<kCount>([&](int i) {
      const float s = sigmoid(gelu_argument(gate[i]));
      if (!saved) activated[i] = silu(gate[i], s);
      slope[i] = __fmaf_rn(__fmul_rn(activated[i], __fsub_rn(1.0f, s)), gelu_argument_slope(gate[i]), s);
    });
  }
}

__device__ inline float product_of(float up, float activated) { return __fmul_rn(up, activated); }

__device__ inline float up_gradient(float d_product, float activated) { return __fmul_rn(d_product, activated); }
__device__ inline float gate_gradient(float d_product, float up, float slope) {
  return __fmul_rn(d_product, __fmul_rn(up, slope));
}

// The larger magnitude of both gradients, bit for bit: rounding keeps the order of the two products.
__device__ inline float gradient_magnitude(float d_product, float up, float activated, float slope) {
  return __fmul_rn(fabsf(d_product), fmaxf(fabsf(activated), fabsf(__fmul_rn(up, slope))));
}

}  // namespace parka::cuda
