#include "kernels/cuda/rope.h"

#include <algorithm>

#include "kernels/cuda/check.h"
#include "kernels/cuda/cuda_device.h"
#include "kernels/cuda/vector.cuh"

// Shapes: T rows (tokens), S positions, D elements of a head, W elements of a row of the fused QKV matrix. A block
// works on heads of one row. A thread turns kWidth adjacent pairs of kHeads of them, all by the same angles.
namespace parka::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kHeads = 4;

// Products that nothing can fuse with the sum: the same bits as on the CPU.
__device__ float turned_low(float low, float high, float cos, float sin) {
  return __fsub_rn(__fmul_rn(low, cos), __fmul_rn(high, sin));
}
__device__ float turned_high(float low, float high, float cos, float sin) {
  return __fadd_rn(__fmul_rn(high, cos), __fmul_rn(low, sin));
}

// Turns the first `num_turned` heads of each row (queries and keys); sign -1 turns them back. half: D / 2.
template <typename T, int kWidth>
__global__ void __launch_bounds__(kThreads)
    rope_kernel(T* qkv_TW, const float* cos_sin_SD, int64_t row_width, unsigned num_positions, int num_turned,
                int half, float sign) {
  const int pair = (blockIdx.y * blockDim.x + threadIdx.x) * kWidth;
  if (pair >= half) return;
  const int first_head = blockIdx.z * blockDim.y * kHeads + threadIdx.y;
  const auto head = [&](int n) { return first_head + n * static_cast<int>(blockDim.y); };
  T* const row = qkv_TW + int64_t{blockIdx.x} * row_width + pair;
  Stored<T, kWidth> low[kHeads], high[kHeads];
#pragma unroll
  for (int n = 0; n < kHeads; ++n) {
    low[n] = load_stored<kWidth>(row + head(n) * 2 * half, head(n) < num_turned);
    high[n] = load_stored<kWidth>(row + head(n) * 2 * half + half, head(n) < num_turned);
  }
  const float* const cos_D = cos_sin_SD + int64_t{blockIdx.x % num_positions} * 2 * half + pair;
  const auto cos = load_stored<kWidth>(cos_D), sin = load_stored<kWidth>(cos_D + half);
#pragma unroll
  for (int n = 0; n < kHeads; ++n) {
    if (head(n) >= num_turned) return;
    float new_low[kWidth], new_high[kWidth];
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      new_low[i] = turned_low(low[n][i], high[n][i], cos[i], sign * sin[i]);
      new_high[i] = turned_high(low[n][i], high[n][i], cos[i], sign * sin[i]);
    }
    store(row + head(n) * 2 * half, new_low);
    store(row + head(n) * 2 * half + half, new_high);
  }
}

void turn(CudaDevice& device, const TensorView& qkv, const TensorView& cos_sin, int64_t num_turned, float sign) {
  const int64_t rows = qkv.dim[0], row_width = qkv.dim[1], half = cos_sin.dim[1] / 2;
  PARKA_REQUIRE(rows <= INT32_MAX && row_width <= INT32_MAX && cos_sin.dim[0] <= INT32_MAX);
  with_plain_type(qkv.dtype, [&](auto element) {
    using T = decltype(element);
    constexpr int kWideWidth = 16 / sizeof(T);
    const bool wide = half % kWideWidth == 0 && is_aligned(qkv.data, 16) && is_aligned(cos_sin.data, 16);
    const auto kernel = wide ? rope_kernel<T, kWideWidth> : rope_kernel<T, 1>;
    const int64_t packs = half / (wide ? kWideWidth : 1), head_groups = ceil_div(num_turned, kHeads);
    const int64_t threads_x = std::min<int64_t>(packs, kThreads);
    const int64_t threads_y = std::min<int64_t>(head_groups, kThreads / threads_x);
    const dim3 blocks(static_cast<unsigned>(rows), static_cast<unsigned>(ceil_div(packs, threads_x)),
                      static_cast<unsigned>(ceil_div(head_groups, threads_y)));
    const dim3 threads(static_cast<unsigned>(threads_x), static_cast<unsigned>(threads_y));
    kernel<<<blocks, threads, 0, device.stream()>>>(qkv.as<T>(), cos_sin.as<float>(), row_width,
                                                    static_cast<unsigned>(cos_sin.dim[0]),
                                                    static_cast<int>(num_turned), static_cast<int>(half), sign);
  });
}

}  // namespace

void rope_forward(Device& device, const RopeForward& a) {
  PARKA_REQUIRE(a.saved.empty());
  turn(as_cuda(device), a.qkv, a.cos_sin, a.num_heads + a.num_kv_heads, 1.0f);
  check_launch("rope_forward");
}

void rope_backward(Device& device, const RopeBackward& a) {
  PARKA_REQUIRE(a.d_quantized.empty() && a.d_quantized_t.empty());
  turn(as_cuda(device), a.d_qkv, a.cos_sin, a.num_heads + a.num_kv_heads, -1.0f);
  check_launch("rope_backward");
}

}  // namespace parka::cuda
