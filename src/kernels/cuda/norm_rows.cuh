#pragma once
#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <type_traits>

#include "core/tensor.h"
#include "kernels/cuda/vector.cuh"

// What the norms' kernels over rows share. One block works on one row at a time.
namespace parka::cuda {

constexpr int kThreadElements = 16;  // of a row, that a thread holds in registers
constexpr int kMaxThreads = 512;
constexpr int kMaxWarps = kMaxThreads / kWarpSize;
constexpr int64_t kMaxWideCols = int64_t{kMaxThreads} * kThreadElements;

// A thread's share of a chunk of a row: kPacks packs of kWidth adjacent columns, `stride` apart. Wide: packs of 16
// bytes of T, and the row is one chunk, which stays in registers from pass to pass. If not: single columns, and as
// many chunks as the row needs, read again in every pass.
template <typename T, bool kWide>
struct RowPart {
  static constexpr int kWidth = kWide ? 16 / sizeof(T) : 1;
  static constexpr int kPacks = kWide ? kThreadElements / kWidth : 4;

  int first, stride, cols;

  __device__ RowPart(int chunk, int cols_)
      : first(chunk + static_cast<int>(threadIdx.x) * kWidth), stride(blockDim.x * kWidth), cols(cols_) {}

  __device__ int column(int pack) const { return first + pack * stride; }
  __device__ bool has(int pack) const { return column(pack) < cols; }

  // Zeros where the row has no column.
  template <typename E>
  __device__ void read(const E* row, Stored<E, kWidth> (&x)[kPacks]) const {
#pragma unroll
    for (int pack = 0; pack < kPacks; ++pack) x[pack] = load_stored<kWidth>(row + column(pack), has(pack));
  }

  // f(pack, i) for the elements of every pack, those that the row has not included.
  template <typename F>
  static __device__ void for_each(const F& f) {
#pragma unroll
    for (int pack = 0; pack < kPacks; ++pack) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) f(pack, i);
    }
  }

  template <typename E>
  __device__ void write(E* row, const float (&x)[kPacks][kWidth]) const {
#pragma unroll
    for (int pack = 0; pack < kPacks; ++pack) {
      if (has(pack)) store(row + column(pack), x[pack]);
    }
  }

  template <typename F>
  static __device__ void for_each_chunk(int cols, const F& f) {
    if constexpr (kWide) {
      f(RowPart(0, cols));
    } else {
      for (int chunk = 0; chunk < cols; chunk += blockDim.x * kPacks) f(RowPart(chunk, cols));
    }
  }
};

// The sums over the block, in every thread, in a fixed order. `shared`, of kMaxWarps, must not be used again until
// all threads have passed another barrier.
__device__ inline float2 row_sum(float2 x, float2* shared) {
  x = make_float2(warp_sum(x.x), warp_sum(x.y));
  if (blockDim.x == kWarpSize) return x;
  const int lane = threadIdx.x % kWarpSize;
  if (lane == 0) shared[threadIdx.x / kWarpSize] = x;
  __syncthreads();
  x = lane < static_cast<int>(blockDim.x) / kWarpSize ? shared[lane] : make_float2(0.0f, 0.0f);
  return make_float2(warp_sum(x.x), warp_sum(x.y));
}

__device__ inline float row_sum(float x, float* shared) {
  x = warp_sum(x);
  if (blockDim.x == kWarpSize) return x;
  const int lane = threadIdx.x % kWarpSize;
  if (lane == 0) shared[threadIdx.x / kWarpSize] = x;
  __syncthreads();
  return warp_sum(lane < static_cast<int>(blockDim.x) / kWarpSize ? shared[lane] : 0.0f);
}

// The maximum over the block, in its first warp; `shared` as above.
__device__ inline float row_max(float x, float* shared) {
  x = warp_max(x);
  if (blockDim.x == kWarpSize) return x;
  const int lane = threadIdx.x % kWarpSize;
  if (lane == 0) shared[threadIdx.x / kWarpSize] = x;
  __syncthreads();
  return warp_max(lane < static_cast<int>(blockDim.x) / kWarpSize ? shared[lane] : 0.0f);
}

// x / n for an n whose inverse is known, rounded as a division rounds: by what the product misses, added to it. Of an
// infinite x that would be infinity less infinity.
__device__ inline float divided(float x, float n, float inverse) {
  const float quotient = x * inverse;
  if (isinf(quotient)) return quotient;
  return fmaf(fmaf(-quotient, n, x), inverse, quotient);
}

// What y is made of in every kernel, in operations that the compiler cannot fuse into others: norm_recompute
// repeats norm_forward bit for bit.
__device__ inline float normalized(float x, float mean, float rstd) { return __fmul_rn(__fsub_rn(x, mean), rstd); }

// ---- Launches ----

// Whether rows of `cols` elements can be moved in packs of `width` and held in registers. Of tensors not given the
// pointer is null.
inline bool fits_wide(int64_t cols, int width, std::initializer_list<const void*> tensors) {
  return cols % width == 0 && cols <= kMaxWideCols &&
         std::all_of(tensors.begin(), tensors.end(), [](const void* p) { return is_aligned(p, 16); });
}

inline int threads_for(int64_t cols) {
  const int64_t warps = ceil_div(cols, int64_t{kThreadElements} * kWarpSize);
  return static_cast<int>(std::min<int64_t>(warps, kMaxWarps)) * kWarpSize;
}

// Rows and columns as kernels count them: a block per row, and columns with room for one chunk more in an int.
inline void check_row_extents(int64_t rows, int64_t cols) {
  PARKA_REQUIRE(rows <= INT32_MAX && cols <= INT32_MAX - kMaxWideCols);
}

template <typename T>
T* optional(const TensorView& t) {
  return t.empty() ? nullptr : t.as<T>();
}

// Calls f with a constant for a bool, to instantiate a kernel for it.
template <typename F>
void with_constant(bool value, const F& f) {
  if (value) {
    f(std::true_type());
  } else {
    f(std::false_type());
  }
}

}  // namespace parka::cuda
