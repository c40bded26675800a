#pragma once
#include <algorithm>
#include <cstdint>

namespace parka::cuda {

// The position of a row, without a division.
struct Positions {
  unsigned count, inverse;  // inverse: 2^32 / count, rounded down

  explicit Positions(int64_t positions)
      : count(static_cast<unsigned>(positions)),
        inverse(static_cast<unsigned>(std::min<int64_t>((int64_t{1} << 32) / positions, UINT32_MAX))) {}

  __device__ int of(unsigned row) const {
    const unsigned rest = row - __umulhi(row, inverse) * count;  // the quotient is at most 1 too small
    return static_cast<int>(rest < count ? rest : rest - count);
  }
};

// A pair of a head rotated by an angle (ops/attention/rope.h); with -sin, rotated back.

// The intrinsics keep the compiler from fusing products with the sum, so the bits equal those of the CPU.
__device__ inline float rotated_low(float low, float high, float cos, float sin) {
  return __fsub_rn(__fmul_rn(low, cos), __fmul_rn(high, sin));
}
__device__ inline float rotated_high(float low, float high, float cos, float sin) {
  return __fadd_rn(__fmul_rn(high, cos), __fmul_rn(low, sin));
}

}  // namespace parka::cuda
