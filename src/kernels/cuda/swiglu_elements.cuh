#pragma once
#include "kernels/cuda/vector.cuh"

// The functions of one element of SwiGLU. Nothing can fuse their operations with others: every kernel that uses
// them makes the same bits, forward and backward, plain and FP8.
namespace parka::cuda {

// It saturates to 0 and 1: exp(-gate) becomes infinity, or 0.
__device__ inline float sigmoid(float gate) {
  // The reciprocal of a number that is never below 1: one instruction, where a division has to look for small ones.
  float reciprocal;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(__fadd_rn(1.0f, expf(-gate))));
  return reciprocal;
}

__device__ inline float silu(float gate, float sigmoid_of_gate) { return __fmul_rn(gate, sigmoid_of_gate); }
__device__ inline float product_of(float up, float silu_of_gate) { return __fmul_rn(up, silu_of_gate); }

__device__ inline float up_gradient(float d_product, float silu_of_gate) {
  return __fmul_rn(d_product, silu_of_gate);
}
__device__ inline float gate_gradient(float d_product, float up, float sigmoid_of_gate, float silu_of_gate) {
  const float slope = __fmaf_rn(silu_of_gate, __fsub_rn(1.0f, sigmoid_of_gate), sigmoid_of_gate);
  return __fmul_rn(__fmul_rn(d_product, up), slope);
}

}  // namespace parka::cuda
