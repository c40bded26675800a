#pragma once

// A pair of a head rotated by an angle (ops/rope.h); with -sin, rotated back.
namespace parka::cuda {

// The intrinsics keep the compiler from fusing products with the sum, so the bits equal those of the CPU.
__device__ inline float rotated_low(float low, float high, float cos, float sin) {
  return __fsub_rn(__fmul_rn(low, cos), __fmul_rn(high, sin));
}
__device__ inline float rotated_high(float low, float high, float cos, float sin) {
  return __fadd_rn(__fmul_rn(high, cos), __fmul_rn(low, sin));
}

}  // namespace parka::cuda
