#include "kernels/ops/elementwise/mix.h"

#include "kernels/cuda/vector.cuh"
#include "kernels/device/cuda/check.h"
#include "kernels/device/cuda/cuda_device.h"
#include "kernels/op/workspace.h"

// Tensors are flat: N elements. A block of threads has one piece of kMixPiece elements, so that the sums of pieces
// are the same on every GPU.
namespace parka::cuda {
namespace {

constexpr int kMixThreads = 256;

// w
template <typename T>
__device__ float mix_weight(MixWeight kind, const T* c) {
  const float value = to_float(*c);
  return kind == MixWeight::kScalar ? value : 1.0f / (1.0f + expf(-value));
}

// For each element of the block's piece f(at, width), where width is kWidth or, behind the last whole pack, 1.
template <int kWidth, typename F>
__device__ void for_each_pack(int64_t count, const F& f) {
  constexpr int kStride = kMixThreads * kWidth;
  const int64_t begin = blockIdx.x * kMixPiece, end = min(begin + kMixPiece, count);
  for (int64_t at = begin + int64_t{threadIdx.x} * kWidth; at < end; at += kStride) {
    if (at + kWidth <= end) {
      f(at, std::integral_constant<int, kWidth>{});
    } else {
      for (int64_t i = at; i < end; ++i) f(i, std::integral_constant<int, 1>{});
    }
  }
}

template <int kWidth, typename T>
__global__ void __launch_bounds__(kMixThreads)
    mix_forward_kernel(MixWeight kind, const T* c, const T* x_N, const T* residual_N, const T* branch_N, T* out_N,
                       T* difference_N, int64_t count) {
  const float w = mix_weight(kind, c), rest = 1.0f - w;
  for_each_pack<kWidth>(count, [&](int64_t at, auto width) {
    constexpr int kCount = decltype(width)::value;
    const Stored<T, kCount> x = load_stored<kCount>(x_N + at), residual = load_stored<kCount>(residual_N + at);
    const Stored<T, kCount> branch = load_stored<kCount>(branch_N + at, branch_N != nullptr);
    float out[kCount], difference[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float y = residual[i] + branch[i];
      out[i] = __fadd_rn(__fmul_rn(rest, x[i]), __fmul_rn(w, y));
      difference[i] = y - x[i];
    }
    store(out_N + at, out);
    if (difference_N != nullptr) store(difference_N + at, difference);
  });
}

template <int kWidth, typename T>
__global__ void __launch_bounds__(kMixThreads)
    mix_backward_kernel(MixWeight kind, const T* c, const T* difference_N, const T* d_out_N, T* d_x_N, T* d_y_N,
                        float* sums_P, int64_t count) {
  __shared__ float shared[kMixThreads / kWarpSize];
  const float w = mix_weight(kind, c), rest = 1.0f - w;
  float sum = 0.0f;
  for_each_pack<kWidth>(count, [&](int64_t at, auto width) {
    constexpr int kCount = decltype(width)::value;
    const Stored<T, kCount> difference = load_stored<kCount>(difference_N + at);
    const Stored<T, kCount> d_out = load_stored<kCount>(d_out_N + at);
    float d_x[kCount], d_y[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      d_x[i] = rest * d_out[i];
      d_y[i] = w * d_out[i];
      sum = __fadd_rn(sum, __fmul_rn(d_out[i], difference[i]));
    }
    if (d_x_N != nullptr) store(d_x_N + at, d_x);
    if (d_y_N != nullptr) store(d_y_N + at, d_y);
  });
  if (sums_P == nullptr) return;
  const float total = block_sum<kMixThreads>(sum, shared);
  if (threadIdx.x == 0) sums_P[blockIdx.x] = total;
}

// d_c += w'(c) times the sum of the pieces. One block.
template <typename T, typename G>
__global__ void __launch_bounds__(kMixThreads)
    mix_sum_kernel(MixWeight kind, const T* c, const float* sums_P, int64_t pieces, G* d_c) {
  __shared__ float shared[kMixThreads / kWarpSize];
  float sum = 0.0f;
  for (int64_t p = threadIdx.x; p < pieces; p += kMixThreads) sum = __fadd_rn(sum, sums_P[p]);
  const float total = block_sum<kMixThreads>(sum, shared);
  if (threadIdx.x != 0) return;
  const float w = mix_weight(kind, c), slope = kind == MixWeight::kScalar ? 1.0f : w * (1.0f - w);
  *d_c = from_float<G>(__fadd_rn(to_float(*d_c), __fmul_rn(slope, total)));
}

unsigned mix_blocks(int64_t count) {
  const int64_t blocks = mix_pieces(count);
  PARKA_REQUIRE(blocks <= INT32_MAX);
  return static_cast<unsigned>(blocks);
}

}  // namespace

void mix_forward(Device& device, const MixForward& a) {
  with_plain_type(a.x.dtype, [&](auto type) {
    using T = decltype(type);
    constexpr int kWide = 16 / sizeof(T);
    const bool wide = is_aligned(a.x.data, 16) && is_aligned(a.residual.data, 16) &&
                      is_aligned(a.branch.data, 16) && is_aligned(a.out.data, 16) &&
                      is_aligned(a.difference.data, 16);
    const auto kernel = wide ? mix_forward_kernel<kWide, T> : mix_forward_kernel<1, T>;
    const int64_t count = a.x.numel();
    kernel<<<mix_blocks(count), kMixThreads, 0, as_cuda(device).stream()>>>(
        a.kind, a.c.as<T>(), a.x.as<T>(), a.residual.as<T>(), a.branch.empty() ? nullptr : a.branch.as<T>(),
        a.out.as<T>(), a.difference.empty() ? nullptr : a.difference.as<T>(), count);
  });
  check_launch("mix_forward");
}

void mix_backward(Device& any_device, const MixBackward& a) {
  CudaDevice& device = as_cuda(any_device);
  const int64_t count = a.d_out.numel();
  float* const sums_P =
      a.d_c.empty() ? nullptr : static_cast<float*>(device.workspace("mix_backward", workspace_of(a)));
  with_plain_type(a.d_out.dtype, [&](auto type) {
    using T = decltype(type);
    constexpr int kWide = 16 / sizeof(T);
    const bool wide = is_aligned(a.difference.data, 16) && is_aligned(a.d_out.data, 16) &&
                      is_aligned(a.d_x.data, 16) && is_aligned(a.d_y.data, 16);
    const auto kernel = wide ? mix_backward_kernel<kWide, T> : mix_backward_kernel<1, T>;
    kernel<<<mix_blocks(count), kMixThreads, 0, device.stream()>>>(
        a.kind, a.c.as<T>(), a.difference.as<T>(), a.d_out.as<T>(), a.d_x.empty() ? nullptr : a.d_x.as<T>(),
        a.d_y.empty() ? nullptr : a.d_y.as<T>(), sums_P, count);
    check_launch("mix_backward");
    if (sums_P == nullptr) return;
    with_plain_type(a.d_c.dtype, [&](auto sum_type) {
      using G = decltype(sum_type);
      mix_sum_kernel<T, G>
          <<<1, kMixThreads, 0, device.stream()>>>(a.kind, a.c.as<T>(), sums_P, mix_pieces(count), a.d_c.as<G>());
    });
    check_launch("mix_backward");
  });
}

}  // namespace parka::cuda
