#include "comm/cuda/sum_chunks.h"

#include "kernels/cuda/vector.cuh"
#include "kernels/device/cuda/check.h"

namespace parka::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kDepth = 4;  // addends loaded at once

// Short blocks: they fill gaps in other work and must not delay what comes after.
template <typename T, int kWidth>
__global__ void __launch_bounds__(kThreads) sum_kernel(Addends addends, T* out, int64_t n, bool adds) {
  const int64_t i = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * kWidth;
  if (i >= n) return;
  float sum[kWidth];
  const auto before = load_stored<kWidth>(out + i, adds);
#pragma unroll
  for (int k = 0; k < kWidth; ++k) sum[k] = before[k];
  const auto addend = [&](int place) {
    if (place == addends.place) return static_cast<const T*>(addends.own);
    return static_cast<const T*>(addends.others) + (place < addends.place ? place : place - 1) * n;
  };
  for (int first = 0; first < addends.count; first += kDepth) {
    Stored<T, kWidth> values[kDepth];
#pragma unroll
    for (int p = 0; p < kDepth; ++p)
      values[p] = load_stored<kWidth>(addend(first + p) + i, first + p < addends.count);
#pragma unroll
    for (int p = 0; p < kDepth; ++p) {
#pragma unroll
      for (int k = 0; k < kWidth; ++k) sum[k] += values[p][k];  // zeros beyond the last
    }
  }
  store(out + i, sum);
}

}  // namespace

void queue_sum(const Addends& addends, const TensorView& out, bool adds, cudaStream_t stream) {
  const int64_t n = out.numel();
  if (n == 0) return;
  with_plain_type(out.dtype, [&](auto type) {
    using T = decltype(type);
    constexpr int kWide = 16 / sizeof(T);
    const bool wide =
        n % kWide == 0 && is_aligned(addends.own, 16) && is_aligned(addends.others, 16) && is_aligned(out.data, 16);
    const auto kernel = wide ? sum_kernel<T, kWide> : sum_kernel<T, 1>;
    const int64_t blocks = ceil_div(n, int64_t{kThreads} * (wide ? kWide : 1));
    PARKA_REQUIRE(blocks <= INT32_MAX);
    kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(addends, out.as<T>(), n, adds);
  });
  check_launch("reduce_scatter");
}

}  // namespace parka::cuda
