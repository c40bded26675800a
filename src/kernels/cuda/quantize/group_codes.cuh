#pragma once
#include <cstdint>

#include "kernels/cuda/quantize/fp8.cuh"

// FP8 codes and scales of groups that span several threads of a warp. Each thread has parts of two groups, and a
// group lies in `lanes` neighbouring threads, a power of 2 from 2 to 32.
namespace parka::cuda {

// The scales of the two groups of a thread. Its threads share the work: even ones compute the scale of the first
// group, odd ones that of the second. `own` is the one that this thread computed.
struct GroupScales {
  PieceScale first, second, own;

  static __device__ bool owns_first() { return threadIdx.x % 2 == 0; }
};

// The scales, from the maxima of this thread's parts. To be called by whole warps.
template <typename F8, typename S>
__device__ inline GroupScales scales_for_groups(float first_amax, float second_amax, int lanes) {
  const bool owns_first = GroupScales::owns_first();
  float amax = owns_first ? first_amax : second_amax;
  amax = fmaxf(amax, __shfl_xor_sync(kFullWarp, owns_first ? second_amax : first_amax, 1));
  for (int step = 2; step < lanes; step *= 2) amax = fmaxf(amax, __shfl_xor_sync(kFullWarp, amax, step));
  const PieceScale own = scale_for<F8, S>(amax);
  const PieceScale other{__shfl_xor_sync(kFullWarp, own.scale, 1), __shfl_xor_sync(kFullWarp, own.inverse, 1)};
  return {owns_first ? own : other, owns_first ? other : own, own};
}

// Returns the codes of kWidth adjacent columns, and replaces x by the values that they decode to.
template <typename F8, int kWidth>
__device__ inline Pack<uint32_t, kWidth / 4> encode_and_decode(const PieceScale& piece, float (&x)[kWidth]) {
  Pack<uint32_t, kWidth / 4> codes;
#pragma unroll
  for (int w = 0; w < kWidth / 4; ++w) {
    float four[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) four[i] = __fmul_rn(x[4 * w + i], piece.inverse);
    codes.element[w] = encode_float8x4<F8>(four[0], four[1], four[2], four[3]);
    decode_float8x4<F8>(codes.element[w], four);
#pragma unroll
    for (int i = 0; i < 4; ++i) x[4 * w + i] = __fmul_rn(four[i], piece.scale);
  }
  return codes;
}

}  // namespace parka::cuda
