#pragma once
#include <cstdint>

#include "kernels/cuda/norm/norm_rows.cuh"
#include "kernels/cuda/quantize/fp8.cuh"

// Norm ops without a norm add two tensors of one type, rounded to it.
namespace parka::cuda {

template <typename T, typename Y>
struct ResidualSum {
  const T* x;
  const T* added;  // null: nothing
  T* sum;          // may be x or added
  Y* copy;         // the sum in this format; null: not wanted
  float* amax;     // raised to max |sum|; null: not wanted
};

constexpr int kResidualThreads = 256;
constexpr int kResidualPacks = 4;  // which a thread loads before it adds the first

// `count` is a multiple of kWidth.
template <int kWidth, typename T, typename Y>
__global__ void __launch_bounds__(kResidualThreads) residual_sum_kernel(const ResidualSum<T, Y> a, int64_t count) {
  constexpr int64_t kStride = int64_t{kResidualThreads} * kWidth;
  // The first elements come last, so that the next kernel, which begins with them, finds them in the cache.
  const int64_t block = gridDim.x - 1 - blockIdx.x;
  const int64_t first = block * kResidualPacks * kStride + int64_t{threadIdx.x} * kWidth;
  Stored<T, kWidth> sum[kResidualPacks], added[kResidualPacks];
#pragma unroll
  for (int n = 0; n < kResidualPacks; ++n) {
    const int64_t at = first + n * kStride;
    sum[n] = load_stored<kWidth>(a.x + at, at < count);
    // A condition on the pointer alone is the same for all threads.
    if (a.added != nullptr) added[n] = load_stored<kWidth>(a.added + at, at < count);
  }
  float largest = 0.0f;
#pragma unroll
  for (int n = 0; n < kResidualPacks; ++n) {
    const int64_t at = first + n * kStride;
    if (at >= count) continue;
    if (a.added != nullptr) sum[n] = rounded_sum(sum[n], added[n]);
    if (a.sum != a.x || a.added != nullptr) store_stored<kWidth>(a.sum + at, sum[n]);
    float values[kWidth];
#pragma unroll
    for (int i = 0; i < kWidth; ++i) values[i] = sum[n][i];
    if (a.copy != nullptr) store(a.copy + at, values);
    largest = max_magnitude_of(largest, values);
  }
  if (a.amax == nullptr) return;
  __shared__ uint32_t shared[kResidualThreads / kWarpSize];
  raise_to_block_max<kResidualThreads>(a.amax, largest, shared);
}

// Queues the sum, if there is anything to write. The caller has made *amax 0.
template <typename T, typename Y>
void launch_residual_sum(CudaDevice& device, const ResidualSum<T, Y>& a, int64_t count, const char* op) {
  if (a.added == nullptr && a.sum == a.x && a.copy == nullptr && a.amax == nullptr) return;
  constexpr int kWide = 16 / sizeof(T);
  const bool wide = count % kWide == 0 && are_aligned({a.x, a.added, a.sum, a.copy});
  launch(device, op, wide ? residual_sum_kernel<kWide, T, Y> : residual_sum_kernel<1, T, Y>,
         {ceil_div(count, int64_t{kResidualThreads} * kResidualPacks * (wide ? kWide : 1)), kResidualThreads}, a,
         count);
}

}  // namespace parka::cuda
