#include "kernels/ops/elementwise/pool_channels.h"

#include "kernels/cuda/vector.cuh"
#include "kernels/device/cuda/check.h"
#include "kernels/device/cuda/cuda_device.h"

namespace parka::cuda {
namespace {

constexpr int kPoolThreads = 256;

// A thread makes one element of out [T, s] from the group of x [T, C] that it stands for, kWidth elements at a time
// where groups are whole packs.
template <int kWidth, typename T>
__global__ void __launch_bounds__(kPoolThreads)
    pool_channels_kernel(PoolKind kind, const T* x_TC, T* out_Ts, int64_t group, int64_t cols, int64_t pooled,
                         int64_t count) {
  const int64_t at = int64_t{blockIdx.x} * kPoolThreads + threadIdx.x;
  if (at >= count) return;
  const int64_t row = at / pooled, first = min(at % pooled * group, cols), last = min(first + group, cols);
  const T* const x_C = x_TC + row * cols;
  float largest = first < last ? to_float(x_C[first]) : 0.0f, sum = 0.0f;
  for (int64_t c = first; c < last; c += kWidth) {
    const Stored<T, kWidth> x = load_stored<kWidth>(x_C + c);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      if (x[i] > largest || isnan(x[i])) largest = x[i];
      sum += x[i];
    }
  }
  const bool is_mean = kind == PoolKind::kAverage && first < last;
  out_Ts[at] = from_float<T>(is_mean ? __fdiv_rn(sum, static_cast<float>(last - first)) : largest);
}

}  // namespace

void pool_channels(Device& device, const PoolChannels& a) {
  const int64_t cols = a.x.dim[1], pooled = a.out.dim[1], count = a.out.numel();
  const int64_t blocks = ceil_div(count, int64_t{kPoolThreads});
  PARKA_REQUIRE(blocks <= INT32_MAX);
  with_plain_type(a.x.dtype, [&](auto type) {
    using T = decltype(type);
    constexpr int kWide = 16 / sizeof(T);
    const bool wide = a.group % kWide == 0 && cols % kWide == 0 && is_aligned(a.x.data, 16);
    const auto kernel = wide ? pool_channels_kernel<kWide, T> : pool_channels_kernel<1, T>;
    kernel<<<static_cast<unsigned>(blocks), kPoolThreads, 0, as_cuda(device).stream()>>>(
        a.kind, a.x.as<T>(), a.out.as<T>(), a.group, cols, pooled, count);
  });
  check_launch("pool_channels");
}

}  // namespace parka::cuda
