#pragma once
#include <cfloat>
#include <type_traits>

#include "kernels/cuda/attention/attention_paths.cuh"

// Rows of a head, up to kMaxGpuHeadDim wide, spread over a warp: lane l holds N elements l, l + 32, ... of a row.
namespace parka::cuda {

// The lane's elements of a row of D; those past the end are zero.
template <int N, typename T>
__device__ void load_row(const T* row, int D, float (&x)[N]) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const int d = n * kWarpSize + static_cast<int>(threadIdx.x);
    x[n] = d < D ? to_float(row[d]) : 0.0f;
  }
}

template <int N, typename T>
__device__ void store_row(T* row, int D, const float (&x)[N]) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const int d = n * kWarpSize + static_cast<int>(threadIdx.x);
    if (d < D) row[d] = from_float<T>(x[n]);
  }
}

// x . y, in every lane.
template <int N>
__device__ float dot(const float (&x)[N], const float (&y)[N]) {
  float sum = 0.0f;
#pragma unroll
  for (int n = 0; n < N; ++n) sum = fmaf(x[n], y[n], sum);
  return warp_sum(sum);
}

// y += a x
template <int N>
__device__ void add_scaled(float (&y)[N], float a, const float (&x)[N]) {
#pragma unroll
  for (int n = 0; n < N; ++n) y[n] = fmaf(a, x[n], y[n]);
}

template <int N>
__device__ void scale_by(float (&x)[N], float factor) {
#pragma unroll
  for (int n = 0; n < N; ++n) x[n] *= factor;
}

// Online softmax: a query's weighted sum of values so far is acc / sum, with weights relative to the largest score.
template <int N>
struct RowSoftmax {
  float acc[N] = {}, max = -FLT_MAX, sum = 0.0f;

  // Adds `count` keys and their values, rows of D that are `stride` apart, 32 at a time: one score per lane.
  template <typename T>
  __device__ void see(const float (&q)[N], const T* k, const T* v, int64_t stride, int count, int D, float scale) {
    const int lane = static_cast<int>(threadIdx.x);
    for (int begin = 0; begin < count; begin += kWarpSize) {
      const int tile = min(kWarpSize, count - begin);
      float x[N], score = -INFINITY;
#pragma unroll 4
      for (int j = 0; j < tile; ++j) {
        load_row(k + (begin + j) * stride, D, x);
        const float s = scale * dot(q, x);
        if (lane == j) score = s;
      }
      const float new_max = fmaxf(max, warp_max(score)), correction = expf(max - new_max);
      const float p = expf(score - new_max);
      max = new_max;
      sum = fmaf(sum, correction, warp_sum(p));
      scale_by(acc, correction);
#pragma unroll 4
      for (int j = 0; j < tile; ++j) {
        load_row(v + (begin + j) * stride, D, x);
        add_scaled(acc, __shfl_sync(kFullWarp, p, j), x);
      }
    }
  }
};

// Calls f with the number of elements per lane, as a type, for rows of D.
template <typename F>
void with_row_size(int64_t D, const F& f) {
  static_assert(kMaxGpuHeadDim == 16 * kWarpSize);
  if (D <= 2 * kWarpSize) return f(std::integral_constant<int, 2>{});
  if (D <= 4 * kWarpSize) return f(std::integral_constant<int, 4>{});
  if (D <= 8 * kWarpSize) return f(std::integral_constant<int, 8>{});
  PARKA_REQUIRE(D <= kMaxGpuHeadDim);
  f(std::integral_constant<int, 16>{});
}

}  // namespace parka::cuda
