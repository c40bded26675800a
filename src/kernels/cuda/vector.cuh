#pragma once
#include <cstdint>
#include <type_traits>

#include <cuda_bf16.h>

#include "core/dtype.h"
#include "core/error.h"
#include "core/number_formats.h"

// Building blocks of memory-bound kernels: wide loads and stores, converted to fp32, and sums in a fixed order.
namespace parka::cuda {

constexpr int kWarpSize = 32;
constexpr unsigned kFullWarp = 0xffffffffu;

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(BFloat16 x) { return decode_bf16(x); }

template <typename T>
__device__ inline T from_float(float x) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    return {__bfloat16_as_ushort(__float2bfloat16_rn(x))};  // as encode_bf16, in one instruction
  } else {
    return x;
  }
}

// Calls f(i) for i < kCount, unrolled.
template <int kCount, typename F>
__device__ inline void for_each(const F& f) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) f(i);
}

// N elements that are loaded or stored as one, of up to 16 bytes.
template <typename T, int N>
struct alignas(sizeof(T) * N > 16 ? 16 : sizeof(T) * N) Pack {
  T element[N];
};

// x[i] = p[i], in accesses as wide as 16 bytes allow. p is aligned to min(16, N * sizeof(T)) bytes.
template <int N, typename T>
__device__ inline void load(const T* p, float (&x)[N]) {
  const Pack<T, N> pack = *reinterpret_cast<const Pack<T, N>*>(p);
#pragma unroll
  for (int i = 0; i < N; ++i) x[i] = to_float(pack.element[i]);
}

// p[i] = x[i], rounded to nearest even.
template <int N, typename T>
__device__ inline void store(T* p, const float (&x)[N]) {
  Pack<T, N> pack;
#pragma unroll
  for (int i = 0; i < N; ++i) pack.element[i] = from_float<T>(x[i]);
  *reinterpret_cast<Pack<T, N>*>(p) = pack;
}

// The sum over the lanes of a warp, in every lane, added in a fixed order. The additions must not be fused with a
// product that yields x, or lanes would get different sums.
__device__ inline float warp_sum(float x) {
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) x = __fadd_rn(x, __shfl_xor_sync(kFullWarp, x, offset));
  return x;
}

__device__ inline float warp_max(float x) {
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) x = fmaxf(x, __shfl_xor_sync(kFullWarp, x, offset));
  return x;
}

// The sum over a block of kThreads (a multiple of 32, all of them here), in every thread, in a fixed order.
// `shared` holds kThreads / 32 floats and may be used for anything else before and after the call.
template <int kThreads>
__device__ inline float block_sum(float x, float* shared) {
  constexpr int kWarps = kThreads / kWarpSize;
  x = warp_sum(x);
  if constexpr (kWarps > 1) {
    if (threadIdx.x % kWarpSize == 0) shared[threadIdx.x / kWarpSize] = x;
    __syncthreads();
    x = 0.0f;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) x += shared[warp];
    __syncthreads();
  }
  return x;
}

// The same in double. To be called once in a kernel.
template <int kThreads>
__device__ inline double block_sum_double(double x) {
  constexpr int kWarps = kThreads / kWarpSize;
  __shared__ double warp_sums[kWarps];
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(kFullWarp, x, offset);
  if (threadIdx.x % kWarpSize == 0) warp_sums[threadIdx.x / kWarpSize] = x;
  __syncthreads();
  x = 0.0;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) x += warp_sums[warp];
  return x;
}

template <int kThreads>
__device__ inline float block_max(float x, float* shared) {
  constexpr int kWarps = kThreads / kWarpSize;
  x = warp_max(x);
  if constexpr (kWarps > 1) {
    if (threadIdx.x % kWarpSize == 0) shared[threadIdx.x / kWarpSize] = x;
    __syncthreads();
    x = shared[0];
#pragma unroll
    for (int warp = 1; warp < kWarps; ++warp) x = fmaxf(x, shared[warp]);
    __syncthreads();
  }
  return x;
}

// Calls f with a value of the C++ type of a plain dtype, float or BFloat16, to instantiate a kernel for it.
template <typename F>
void with_plain_type(DType dtype, const F& f) {
  switch (dtype) {
    case DType::kF32: f(float{}); return;
    case DType::kBF16: f(BFloat16{}); return;
    default: PARKA_REQUIRE(!"a plain format");
  }
}

// N elements in their stored format. Unlike the floats of load() they take no more registers than memory, and
// nothing waits for them until one is read. Use them where many loads should be in flight at once.
template <typename T, int N>
struct Stored {
  static constexpr int kWords = N * sizeof(T) <= 4 ? 1 : N * sizeof(T) / 4;
  uint32_t word[kWords];

  __device__ float operator[](int i) const {
    if constexpr (sizeof(T) == 4) {
      return __uint_as_float(word[i]);
    } else {
      return __uint_as_float(i % 2 == 0 ? word[i / 2] << 16 : word[i / 2] & 0xffff0000u);
    }
  }
};

// The N elements at p, aligned as for load(); zeros, and no access, unless `wanted`.
template <int N, typename T>
__device__ inline Stored<T, N> load_stored(const T* p, bool wanted = true) {
  Stored<T, N> x = {};
  if (!wanted) return x;
  if constexpr (N == 1 && sizeof(T) == 2) {
    x.word[0] = p->bits;
  } else if constexpr (N == 1) {
    x.word[0] = __float_as_uint(*p);
  } else {
    const auto words = *reinterpret_cast<const Pack<uint32_t, Stored<T, N>::kWords>*>(p);
#pragma unroll
    for (int i = 0; i < Stored<T, N>::kWords; ++i) x.word[i] = words.element[i];
  }
  return x;
}

inline bool is_aligned(const void* p, size_t bytes) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; }

}  // namespace parka::cuda
