#include "kernels/ops/elementwise/side_network.h"

#include "kernels/cuda/launch.cuh"
#include "kernels/op/workspace.h"

// What side networks need: mixing two tensors of N elements, (1 - w) x + w y, and pooling columns of rows.
namespace parka::cuda {
namespace {

// ---- Mixing: tensors are flat, N elements. A block of threads has one piece of kMixPiece of them, so that the
// sums of pieces are the same on every GPU ----

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

// ---- Pooling ----

constexpr int kPoolThreads = 256;

// A thread makes one element of out [T, s] from its group of x [T, C], kWidth elements at a time in whole packs.
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

void mix_forward(Device& device, const MixForward& a) {
  with_plain_type(a.x.dtype, [&](auto type) {
    using T = decltype(type);
    constexpr int kWide = 16 / sizeof(T);
    const bool wide = are_aligned({a.x.data, a.residual.data, a.branch.data, a.out.data, a.difference.data});
    const int64_t count = a.x.numel();
    launch(as_cuda(device), "mix_forward", wide ? mix_forward_kernel<kWide, T> : mix_forward_kernel<1, T>,
           {mix_pieces(count), kMixThreads}, a.kind, a.c.as<T>(), a.x.as<T>(), a.residual.as<T>(),
           optional<T>(a.branch), a.out.as<T>(), optional<T>(a.difference), count);
  });
}

void mix_backward(Device& any_device, const MixBackward& a) {
  CudaDevice& device = as_cuda(any_device);
  const int64_t count = a.d_out.numel(), pieces = mix_pieces(count);
  float* const sums_P =
      a.d_c.empty() ? nullptr : static_cast<float*>(device.workspace("mix_backward", workspace_of(a)));
  with_plain_type(a.d_out.dtype, [&](auto type) {
    using T = decltype(type);
    constexpr int kWide = 16 / sizeof(T);
    const bool wide = are_aligned({a.difference.data, a.d_out.data, a.d_x.data, a.d_y.data});
    launch(device, "mix_backward", wide ? mix_backward_kernel<kWide, T> : mix_backward_kernel<1, T>,
           {pieces, kMixThreads}, a.kind, a.c.as<T>(), a.difference.as<T>(), a.d_out.as<T>(), optional<T>(a.d_x),
           optional<T>(a.d_y), sums_P, count);
    if (sums_P == nullptr) return;
    with_plain_type(a.d_c.dtype, [&](auto sum_type) {
      using G = decltype(sum_type);
      launch(device, "mix_backward", mix_sum_kernel<T, G>, {1, kMixThreads}, a.kind, a.c.as<T>(), sums_P, pieces,
             a.d_c.as<G>());
    });
  });
}

void pool_channels(Device& device, const PoolChannels& a) {
  const int64_t cols = a.x.dim[1], pooled = a.out.dim[1], count = a.out.numel();
  with_plain_type(a.x.dtype, [&](auto type) {
    using T = decltype(type);
    constexpr int kWide = 16 / sizeof(T);
    const bool wide = a.group % kWide == 0 && cols % kWide == 0 && is_aligned(a.x.data, 16);
    launch(as_cuda(device), "pool_channels", wide ? pool_channels_kernel<kWide, T> : pool_channels_kernel<1, T>,
           {ceil_div(count, kPoolThreads), kPoolThreads}, a.kind, a.x.as<T>(), a.out.as<T>(), a.group, cols, pooled,
           count);
  });
}

}  // namespace parka::cuda
