#include "kernels/ops/elementwise/add.h"

#include "kernels/cuda/vector.cuh"
#include "kernels/device/cuda/check.h"
#include "kernels/device/cuda/cuda_device.h"

namespace parka::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kPacks = 4;  // of each tensor, which a thread loads before it adds the first

// Each thread adds kPacks packs of kWidth elements, and one thread the elements that fill no pack.
template <int kWidth, typename T>
__global__ void __launch_bounds__(kThreads) add_kernel(const T* x, T* total, int64_t count) {
  constexpr int64_t kStride = int64_t{kThreads} * kWidth;
  const int64_t first = blockIdx.x * kPacks * kStride + int64_t{threadIdx.x} * kWidth;
  Stored<T, kWidth> added[kPacks], before[kPacks];
#pragma unroll
  for (int n = 0; n < kPacks; ++n) {
    const int64_t at = first + n * kStride;
    const bool is_whole = at + kWidth <= count;
    added[n] = load_stored<kWidth>(x + at, is_whole);
    before[n] = load_stored<kWidth>(total + at, is_whole);
  }
#pragma unroll
  for (int n = 0; n < kPacks; ++n) {
    const int64_t at = first + n * kStride;
    if (at + kWidth <= count) {
      float sum[kWidth];
#pragma unroll
      for (int i = 0; i < kWidth; ++i) sum[i] = before[n][i] + added[n][i];
      store(total + at, sum);
    } else {
      for (int64_t i = at; i < count; ++i) total[i] = from_float<T>(to_float(total[i]) + to_float(x[i]));
    }
  }
}

}  // namespace

void add(Device& device, const Add& a) {
  with_plain_type(a.x.dtype, [&](auto type) {
    using T = decltype(type);
    constexpr int kWide = 16 / sizeof(T);
    const bool wide = is_aligned(a.x.data, 16) && is_aligned(a.total.data, 16);
    const auto kernel = wide ? add_kernel<kWide, T> : add_kernel<1, T>;
    const int64_t count = a.x.numel(), blocks = ceil_div(count, int64_t{kThreads} * kPacks * (wide ? kWide : 1));
    PARKA_REQUIRE(blocks <= INT32_MAX);
    kernel<<<static_cast<unsigned>(blocks), kThreads, 0, as_cuda(device).stream()>>>(a.x.as<T>(), a.total.as<T>(),
                                                                                     count);
  });
  check_launch("add");
}

}  // namespace parka::cuda
