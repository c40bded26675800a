#pragma once
#include <bit>
#include <cstdint>

#include "core/tensor.h"
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

// Columns of a row that a thread has side by side: 16 bytes of bf16, and 8 of codes.
constexpr int kGroupCodesWidth = 8;

// The place of codes, with scales S. A group has `lanes` threads.
template <typename F8_, typename S>
struct GroupCodesOutput {
  using F8 = F8_;
  F8* codes;
  S* scales;
  int across;       // scales in a row
  int group_shift;  // log2 of the columns of a group
  int lanes;

  explicit GroupCodesOutput(const ScaledView& t)
      : codes(t.data.as<F8>()),
        scales(t.scale.as<S>()),
        across(static_cast<int>(t.scale.dim[1])),
        group_shift(std::countr_zero(static_cast<uint64_t>(t.group))),
        lanes(static_cast<int>(t.group) / kGroupCodesWidth) {}

  // True if this thread writes a scale: the first two of a group have computed one each.
  __device__ bool writes_scale() const { return (static_cast<int>(threadIdx.x) & (lanes - 1)) < 2; }
};

// True if groups lie in the threads of a warp.
inline bool fits_group_codes(const ScaledView& t) {
  const auto group = static_cast<uint64_t>(t.group);
  return is_aligned(t.data.data, kGroupCodesWidth) && std::has_single_bit(group) && group >= 2 * kGroupCodesWidth &&
         group <= uint64_t{kGroupCodesWidth} * kWarpSize;
}

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
