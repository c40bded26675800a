#include "comm/cuda/sum_pieces.h"

#include <algorithm>

#include "kernels/cuda/check.h"
#include "kernels/cuda/vector.cuh"

namespace parka::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kDepth = 4;  // pieces that are loaded at once

// Blocks that end soon: they fill gaps in other work, and are not to hold up what comes after.
template <typename T, int kWidth>
__global__ void __launch_bounds__(kThreads) sum_kernel(const T* pieces, int count, T* out, int64_t n, bool adds) {
  const int64_t i = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * kWidth;
  if (i >= n) return;
  float sum[kWidth];
  const auto before = load_stored<kWidth>(out + i, adds);
#pragma unroll
  for (int k = 0; k < kWidth; ++k) sum[k] = before[k];
  for (int first = 0; first < count; first += kDepth) {
    Stored<T, kWidth> values[kDepth];
#pragma unroll
    for (int p = 0; p < kDepth; ++p)
      values[p] = load_stored<kWidth>(pieces + (first + p) * n + i, first + p < count);
#pragma unroll
    for (int p = 0; p < kDepth; ++p) {
#pragma unroll
      for (int k = 0; k < kWidth; ++k) sum[k] += values[p][k];  // zeros beyond the last piece
    }
  }
  store(out + i, sum);
}

}  // namespace

void queue_sum(const void* pieces, int count, const TensorView& out, bool adds, cudaStream_t stream) {
  const int64_t n = out.numel();
  if (n == 0) return;
  with_plain_type(out.dtype, [&](auto type) {
    using T = decltype(type);
    constexpr int kWide = 16 / sizeof(T);
    const bool wide = n % kWide == 0 && is_aligned(pieces, 16) && is_aligned(out.data, 16);
    const auto kernel = wide ? sum_kernel<T, kWide> : sum_kernel<T, 1>;
    const int64_t blocks = ceil_div(n, int64_t{kThreads} * (wide ? kWide : 1));
    PARKA_REQUIRE(blocks <= INT32_MAX);
    kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(static_cast<const T*>(pieces), count,
                                                                   out.as<T>(), n, adds);
  });
  check_launch("reduce_scatter");
}

}  // namespace parka::cuda
