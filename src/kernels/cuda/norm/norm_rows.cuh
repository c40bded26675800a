#pragma once
#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <type_traits>

#include "core/tensor.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/ops/norm/norm.h"

// The norm kernels share these. One block works on one row at a time.
namespace parka::cuda {

constexpr int kThreadElements = 16;  // of a row, that a thread holds in registers
constexpr int kMaxThreads = 512;
constexpr int kMaxWarps = kMaxThreads / kWarpSize;
constexpr int64_t kMaxWideCols = int64_t{kMaxThreads} * kThreadElements;

// The counterpart of load_stored().
template <int N, typename E>
__device__ inline void store_stored(E* p, const Stored<E, N>& x) {
  if constexpr (N == 1 && sizeof(E) == 2) {
    p->bits = static_cast<uint16_t>(x.word[0]);
  } else if constexpr (N == 1) {
    *p = __uint_as_float(x.word[0]);
  } else {
    Pack<uint32_t, Stored<E, N>::kWords> words;
#pragma unroll
    for (int i = 0; i < Stored<E, N>::kWords; ++i) words.element[i] = x.word[i];
    *reinterpret_cast<Pack<uint32_t, Stored<E, N>::kWords>*>(p) = words;
  }
}

// A thread's share of a chunk of a row: kPacks packs of kWidth adjacent columns, `stride` apart. Wide: packs are 16
// bytes of T, and the row is one chunk, which stays in registers between passes. Not wide: packs are single
// columns, and a row has as many chunks as it needs, read again in every pass.
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

  // Elements that were read, or are stored alike.
  template <typename E>
  __device__ void write(E* row, const Stored<E, kWidth> (&x)[kPacks]) const {
#pragma unroll
    for (int pack = 0; pack < kPacks; ++pack) {
      if (has(pack)) store_stored<kWidth>(row + column(pack), x[pack]);
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

// The maximum over a warp of numbers that are neither negative nor NaN: they are ordered as their bits are.
__device__ inline float warp_max_of_magnitudes(float x) {
  return __uint_as_float(__reduce_max_sync(kFullWarp, __float_as_uint(x)));
}

// Such a maximum over the block, in its first warp; `shared` as above.
__device__ inline float row_max(float x, float* shared) {
  x = warp_max_of_magnitudes(x);
  if (blockDim.x == kWarpSize) return x;
  const int lane = threadIdx.x % kWarpSize;
  if (lane == 0) shared[threadIdx.x / kWarpSize] = x;
  __syncthreads();
  return warp_max_of_magnitudes(lane < static_cast<int>(blockDim.x) / kWarpSize ? shared[lane] : 0.0f);
}

// x / n for an n whose inverse is known, rounded as a division rounds: the product plus its remainder. An infinite
// x is treated apart, because its remainder would be infinity minus infinity.
__device__ inline float divided(float x, float n, float inverse) {
  const float quotient = x * inverse;
  if (isinf(quotient)) return quotient;
  return fmaf(fmaf(-quotient, n, x), inverse, quotient);
}

// The operations that compute y in every kernel. The compiler cannot fuse them, so norm_recompute repeats
// norm_forward bit for bit. kCentred: the norm subtracts the mean.
template <bool kCentred>
__device__ inline float normalized(float x, float mean, float rstd) {
  if constexpr (kCentred) x = __fsub_rn(x, mean);
  return __fmul_rn(x, rstd);
}

// x + y, rounded to the format they are stored in.
template <int N>
__device__ inline Stored<float, N> rounded_sum(const Stored<float, N>& x, const Stored<float, N>& y) {
  Stored<float, N> sum;
#pragma unroll
  for (int i = 0; i < N; ++i) sum.word[i] = __float_as_uint(x[i] + y[i]);
  return sum;
}

// One addition of bf16 pairs: rounding an fp32 sum gives the same, as it is exact or one number has no effect.
template <int N>
__device__ inline Stored<BFloat16, N> rounded_sum(const Stored<BFloat16, N>& x, const Stored<BFloat16, N>& y) {
  const auto pair = [](uint32_t word) { return *reinterpret_cast<const __nv_bfloat162*>(&word); };
  Stored<BFloat16, N> sum;
#pragma unroll
  for (int i = 0; i < Stored<BFloat16, N>::kWords; ++i) {
    const __nv_bfloat162 of_pair = __hadd2_rn(pair(x.word[i]), pair(y.word[i]));
    sum.word[i] = *reinterpret_cast<const uint32_t*>(&of_pair);
  }
  return sum;
}

// ---- Sums over blocks ----

constexpr int kColumnSumThreads = kWarpSize * kWarpSize;

// Sums each column of [blocks, columns], and adds the sum once to an element of `first` and, with kTwo, after its
// elements to one of `second`; one of them may be null. A block of 32 x 32 threads has 32 columns.
template <bool kTwo, typename G>
__global__ void __launch_bounds__(kColumnSumThreads)
    add_column_sums_kernel(const float* sums_BC, G* first, int blocks, int columns, G* second, int first_columns) {
  __shared__ float shared[kWarpSize][kWarpSize + 1];
  const int column = blockIdx.x * kWarpSize + threadIdx.x;
  float sum = 0.0f;
  if (column < columns) {
#pragma unroll 4
    for (int b = threadIdx.y; b < blocks; b += kWarpSize) sum += sums_BC[int64_t{b} * columns + column];
  }
  shared[threadIdx.x][threadIdx.y] = sum;
  __syncthreads();
  sum = warp_sum(shared[threadIdx.y][threadIdx.x]);  // of the column that threadIdx.y counts
  int sum_column = blockIdx.x * kWarpSize + threadIdx.y;
  if (threadIdx.x == 0 && sum_column < columns) {
    if constexpr (kTwo) {
      if (sum_column >= first_columns) {
        sum_column -= first_columns;
        first = second;
      }
      if (first == nullptr) return;
    }
    first[sum_column] = from_float<G>(to_float(first[sum_column]) + sum);
  }
}

template <bool kTwo = false>
void add_column_sums(const CudaDevice& device, const char* op, const float* sums_BC, int64_t blocks,
                     int64_t columns, const TensorView& first, const TensorView& second = {},
                     int64_t first_columns = 0) {
  if (first.empty() && second.empty()) return;
  with_plain_type((first.empty() ? second : first).dtype, [&](auto type) {
    using G = decltype(type);
    launch(device, op, add_column_sums_kernel<kTwo, G>, {ceil_div(columns, kWarpSize), dim3(kWarpSize, kWarpSize)},
           sums_BC, optional<G>(first), static_cast<int>(blocks), static_cast<int>(columns), optional<G>(second),
           static_cast<int>(first_columns));
  });
}

// ---- Launches ----

// True if rows of `cols` elements move in packs of `width` and fit registers. Tensors not given are null.
inline bool fits_wide(int64_t cols, int width, std::initializer_list<const void*> tensors) {
  return cols % width == 0 && cols <= kMaxWideCols && are_aligned(tensors);
}

inline unsigned threads_for(int64_t cols) {
  const int64_t warps = ceil_div(cols, int64_t{kThreadElements} * kWarpSize);
  return static_cast<unsigned>(std::min<int64_t>(warps, kMaxWarps)) * kWarpSize;
}

// Calls f with a constant for a kind of norm, to instantiate a kernel for it. kNone is no norm.
template <typename F>
void with_norm_kind(NormKind kind, const F& f) {
  switch (kind) {
    case NormKind::kLayerNorm: f(std::integral_constant<NormKind, NormKind::kLayerNorm>()); return;
    case NormKind::kRmsNorm: f(std::integral_constant<NormKind, NormKind::kRmsNorm>()); return;
    case NormKind::kAffineLayerNorm: f(std::integral_constant<NormKind, NormKind::kAffineLayerNorm>()); return;
    case NormKind::kNone: PARKA_REQUIRE(!"a norm");
  }
}

// Checks the limits of rows and columns: a block per row, and columns plus one chunk must fit in an int.
inline void check_row_extents(int64_t rows, int64_t cols) {
  PARKA_REQUIRE(rows <= INT32_MAX && cols <= INT32_MAX - kMaxWideCols);
}

}  // namespace parka::cuda
