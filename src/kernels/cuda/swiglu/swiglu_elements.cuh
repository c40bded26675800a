#pragma once
#include "kernels/cuda/ptx/mma.cuh"
#include "kernels/cuda/vector.cuh"

// The functions of one element of SwiGLU. The compiler cannot fuse their operations with others, so every kernel
// gets the same bits, forward and backward, plain and FP8.
namespace parka::cuda {

constexpr float kLog2E = 1.44269504088896340736f, kLn2 = 0.693147180559945309417f;

// Of e^-gate. The reciprocal of a number that is never below 1: one instruction, where a division has to look for
// small ones.
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

// Of a gate that is stored as FP8, for all but a silu that is to be saved: without the above correction, to within
// 1e-7 |gate|. What FP8 keeps of a gate changes silu by more than 1e-2 of itself.
__device__ inline float sigmoid_of_coded(float gate) {
  return sigmoid_of_exponential(exp2_approximate(__fmul_rn(gate, -kLog2E)));
}

__device__ inline float silu(float gate, float sigmoid_of_gate) { return __fmul_rn(gate, sigmoid_of_gate); }
__device__ inline float product_of(float up, float silu_of_gate) { return __fmul_rn(up, silu_of_gate); }

__device__ inline float up_gradient(float d_product, float silu_of_gate) {
  return __fmul_rn(d_product, silu_of_gate);
}
// up times the derivative of silu.
__device__ inline float up_times_slope(float up, float sigmoid_of_gate, float silu_of_gate) {
  return __fmul_rn(up, __fmaf_rn(silu_of_gate, __fsub_rn(1.0f, sigmoid_of_gate), sigmoid_of_gate));
}
__device__ inline float gate_gradient(float d_product, float up, float sigmoid_of_gate, float silu_of_gate) {
  return __fmul_rn(d_product, up_times_slope(up, sigmoid_of_gate, silu_of_gate));
}

// The larger magnitude of both gradients, bit for bit: rounding keeps the order of |d_product| times the two
// factors.
__device__ inline float gradient_magnitude(float d_product, float up, float sigmoid_of_gate, float silu_of_gate) {
  const float slope = up_times_slope(up, sigmoid_of_gate, silu_of_gate);
  return __fmul_rn(fabsf(d_product), fmaxf(fabsf(silu_of_gate), fabsf(slope)));
}

}  // namespace parka::cuda
