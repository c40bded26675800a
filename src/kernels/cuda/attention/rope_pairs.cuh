#pragma once

// A pair of a head turned by an angle (ops/rope.h); with -sin, turned back.
namespace parka::cuda {

// Products that nothing can fuse with the sum: the same bits as on the CPU.
__device__ inline float turned_low(float low, float high, float cos, float sin) {
  return __fsub_rn(__fmul_rn(low, cos), __fmul_rn(high, sin));
}
__device__ inline float turned_high(float low, float high, float cos, float sin) {
  return __fadd_rn(__fmul_rn(high, cos), __fmul_rn(low, sin));
}

}  // namespace parka::cuda
