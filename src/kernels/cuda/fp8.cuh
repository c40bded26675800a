#pragma once
#include <cstdint>
#include <type_traits>

#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "kernels/cuda/vector.cuh"

// FP8 on the GPU, bit for bit what core/number_formats.h and kernels/cpu/codec.cpp define.
namespace parka::cuda {

template <typename F8>
constexpr bool kIsFloat8 = std::is_same_v<F8, Float8E4M3> || std::is_same_v<F8, Float8E5M2>;

template <typename F8>
constexpr Float8Traits kFloat8Traits = std::is_same_v<F8, Float8E4M3> ? kE4M3Traits : kE5M2Traits;

template <typename F8>
constexpr __nv_fp8_interpretation_t kFloat8Kind = std::is_same_v<F8, Float8E4M3> ? __NV_E4M3 : __NV_E5M2;

// The codes of four numbers, the first in the lowest byte: to nearest even, saturating, NaN to NaN.
template <typename F8>
__device__ inline uint32_t encode_float8x4(float x0, float x1, float x2, float x3) {
  const uint32_t low = __nv_cvt_float2_to_fp8x2(make_float2(x0, x1), __NV_SATFINITE, kFloat8Kind<F8>);
  const uint32_t high = __nv_cvt_float2_to_fp8x2(make_float2(x2, x3), __NV_SATFINITE, kFloat8Kind<F8>);
  return low | high << 16;
}

// The numbers of four codes; exact.
template <typename F8>
__device__ inline void decode_float8x4(uint32_t codes, float (&x)[4]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const auto pair = static_cast<__nv_fp8x2_storage_t>(codes >> 16 * half);
    const float2 numbers = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(pair, kFloat8Kind<F8>)));
    x[2 * half] = numbers.x;
    x[2 * half + 1] = numbers.y;
  }
}

// ---- Scales, by the rule of ops/quantize.h ----

constexpr float kTinyAmax = 0x1p-100f;  // below it 1 / scale would leave fp32's range

struct PieceScale {
  float scale;    // stored; decoding multiplies by it
  float inverse;  // encoding multiplies by it
};

// Of a piece with maximum magnitude `amax`, codes F8 and scales stored as S (float or BFloat16).
template <typename F8, typename S>
__device__ inline PieceScale scale_for(float amax) {
  if (amax < kTinyAmax) return {1.0f, 0.0f};
  float scale = __fdiv_rn(amax, kFloat8Traits<F8>.max);
  if constexpr (std::is_same_v<S, BFloat16>) scale = decode_bf16(encode_bf16_round_up(scale));
  return {scale, __frcp_rn(scale)};
}

// The maximum of `amax` and |x|; NaN is skipped: it stays visible because its code is NaN.
__device__ inline float max_magnitude(float amax, float x) { return fmaxf(amax, fabsf(x)); }

// Raises *target, which is not negative, to `amax`: what every block of a kernel does with its own maximum. The
// result does not depend on the order.
__device__ inline void raise_to(float* target, float amax) {
  // Most blocks find a larger one there already; a stale value only costs the atomic operation.
  if (amax > *static_cast<volatile float*>(target)) {
    atomicMax(reinterpret_cast<int*>(target), __float_as_int(amax));
  }
}

// Calls f with a value of the C++ type of an fp8 dtype, to instantiate a kernel for it.
template <typename F>
void with_float8_type(DType dtype, const F& f) {
  switch (dtype) {
    case DType::kE4M3: f(Float8E4M3{}); return;
    case DType::kE5M2: f(Float8E5M2{}); return;
    default: PARKA_REQUIRE(!"an fp8 format");
  }
}

}  // namespace parka::cuda
