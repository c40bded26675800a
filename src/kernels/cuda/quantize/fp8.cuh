#pragma once
#include <cstdint>
#include <type_traits>

#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "kernels/cuda/vector.cuh"

// FP8 on the GPU, bitwise equal to core/number_formats.h and kernels/cpu/codec.cpp.
namespace parka::cuda {

template <typename F8>
constexpr bool kIsFloat8 = std::is_same_v<F8, Float8E4M3> || std::is_same_v<F8, Float8E5M2>;

template <typename F8>
constexpr Float8Traits kFloat8Traits = std::is_same_v<F8, Float8E4M3> ? kE4M3Traits : kE5M2Traits;

template <typename F8>
constexpr __nv_fp8_interpretation_t kFloat8Kind = std::is_same_v<F8, Float8E4M3> ? __NV_E4M3 : __NV_E5M2;

// GPUs before compute capability 8.9 have no instructions for FP8. CUDA's functions take several times the
// instructions of core/number_formats.h there, for each number of each kernel.
template <typename F8>
__device__ inline uint32_t emulated_code(float x) {
  if constexpr (std::is_same_v<F8, Float8E4M3>) {
    return encode_e4m3(x).bits;
  } else {
    return encode_e5m2(x).bits;
  }
}
template <typename F8>
__device__ inline float emulated_number(uint8_t code) {
  if constexpr (std::is_same_v<F8, Float8E4M3>) {
    return decode_e4m3({code});
  } else {
    return decode_e5m2({code});
  }
}

// The codes of four numbers, the first in the lowest byte: to nearest even, saturating, NaN to NaN.
template <typename F8>
__device__ inline uint32_t encode_float8x4(float x0, float x1, float x2, float x3) {
#if __CUDA_ARCH__ >= 890
  const uint32_t low = __nv_cvt_float2_to_fp8x2(make_float2(x0, x1), __NV_SATFINITE, kFloat8Kind<F8>);
  const uint32_t high = __nv_cvt_float2_to_fp8x2(make_float2(x2, x3), __NV_SATFINITE, kFloat8Kind<F8>);
  return low | high << 16;
#else
  return emulated_code<F8>(x0) | emulated_code<F8>(x1) << 8 | emulated_code<F8>(x2) << 16 |
         emulated_code<F8>(x3) << 24;
#endif
}

// The numbers of four codes; exact.
template <typename F8>
__device__ inline void decode_float8x4(uint32_t codes, float (&x)[4]) {
#if __CUDA_ARCH__ >= 890
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const auto pair = static_cast<__nv_fp8x2_storage_t>(codes >> 16 * half);
    const float2 numbers = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(pair, kFloat8Kind<F8>)));
    x[2 * half] = numbers.x;
    x[2 * half + 1] = numbers.y;
  }
#else
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = emulated_number<F8>(static_cast<uint8_t>(codes >> 8 * i));
#endif
}

// ---- Scales, by the rule of ops/quantize/quantize.h ----

constexpr float kTinyAmax = 0x1p-100f;  // below it 1 / scale would leave fp32's range

struct PieceScale {
  float scale;    // stored; decoding multiplies by it
  float inverse;  // encoding multiplies by it
};

// 1 / scale, correctly rounded, for scales of scale_for(); 0 for infinity. Equals __frcp_rn() where neither number
// is subnormal, but without its branches, across which the compiler could not schedule other work.
__device__ inline float inverse_of_scale(float scale) {
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(scale));
  // Infinity * 0 is NaN, which fminf replaces by 1; otherwise the error is far below 1.
  const float error = fminf(__fmaf_rn(scale, inverse, -1.0f), 1.0f);
  return __fmaf_rn(inverse, -error, inverse);
}

// amax / F8's maximum, correctly rounded for every amax of at least kTinyAmax: one Newton step is enough for these
// divisors (both are 7 * 2^n; all mantissas were tried).
template <typename F8>
__device__ inline float scale_of_maximum(float amax) {
  constexpr float kMax = kFloat8Traits<F8>.max, kInverse = 1.0f / kMax;
  const float estimate = __fmul_rn(amax, kInverse);
  // For infinity this is NaN, which fminf replaces by infinity; otherwise the remainder is far below amax.
  const float remainder = fminf(__fmaf_rn(-estimate, kMax, amax), amax);
  return __fmaf_rn(remainder, kInverse, estimate);
}

// The scale of a piece with maximum magnitude `amax`, codes F8 and scales stored as S (float or BFloat16).
template <typename F8, typename S>
__device__ inline PieceScale scale_for(float amax) {
  float scale = scale_of_maximum<F8>(amax);
  // As encode_bf16_round_up(), of a number that is not NaN.
  if constexpr (std::is_same_v<S, BFloat16>)
    scale = __uint_as_float((__float_as_uint(scale) + 0xffffu) & 0xffff0000u);
  const float inverse = inverse_of_scale(scale);
  const bool is_tiny = amax < kTinyAmax;
  return {is_tiny ? 1.0f : scale, is_tiny ? 0.0f : inverse};
}

// The maximum of `amax` and |x|. NaN is ignored: it stays visible because its code is NaN.
__device__ inline float max_magnitude(float amax, float x) { return fmaxf(amax, fabsf(x)); }

template <int kCount>
__device__ inline float max_magnitude_of(float amax, const float (&x)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) amax = max_magnitude(amax, x[i]);
  return amax;
}

// Raises *target, which is not negative, to a block's maximum `amax`; the result does not depend on the order.
__device__ inline void raise_to(float* target, float amax) {
  // Most blocks find a larger one there already; a stale value only costs the atomic operation.
  if (amax > *static_cast<volatile float*>(target)) {
    atomicMax(reinterpret_cast<int*>(target), __float_as_int(amax));
  }
}

// The same with the maximum of a block of kThreads, of numbers that are not negative and not NaN. To be called by
// all threads, as the last thing they do with `shared`.
template <int kThreads>
__device__ inline void raise_to_block_max(float* target, float amax, uint32_t (&shared)[kThreads / kWarpSize]) {
  constexpr unsigned kWarps = kThreads / kWarpSize;
  const unsigned lane = threadIdx.x % kWarpSize;
  // Such numbers are ordered as their bits are.
  const uint32_t of_warp = __reduce_max_sync(kFullWarp, __float_as_uint(amax));
  if (lane == 0) shared[threadIdx.x / kWarpSize] = of_warp;
  __syncthreads();
  if (threadIdx.x >= kWarpSize) return;
  const uint32_t of_block = __reduce_max_sync(kFullWarp, shared[lane % kWarps]);
  if (lane == 0) raise_to(target, __uint_as_float(of_block));
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
