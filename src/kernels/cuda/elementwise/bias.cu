#include "kernels/ops/elementwise/bias.h"

#include <algorithm>

#include "kernels/cuda/norm/norm_rows.cuh"
#include "kernels/cuda/vector.cuh"
#include "kernels/device/cuda/check.h"
#include "kernels/device/cuda/cuda_device.h"
#include "kernels/op/workspace.h"

// Shapes: T rows (tokens), N columns. A warp has adjacent columns, kWidth for each lane.
namespace parka::cuda {
namespace {

constexpr int kBiasWarps = 8;
constexpr int kBiasThreads = kBiasWarps * kWarpSize;
constexpr int kBiasRows = 4;  // that a thread loads before it adds to the first

template <int kWidth, typename T>
__global__ void __launch_bounds__(kBiasThreads) bias_forward_kernel(const T* bias_N, T* x_TN, int rows, int cols) {
  const int column = static_cast<int>(blockIdx.x * kBiasThreads + threadIdx.x) * kWidth;
  if (column >= cols) return;
  const Stored<T, kWidth> bias = load_stored<kWidth>(bias_N + column);
  const int first = static_cast<int>(blockIdx.y) * kBiasRows;
  Stored<T, kWidth> x[kBiasRows];
#pragma unroll
  for (int r = 0; r < kBiasRows; ++r) {
    x[r] = load_stored<kWidth>(x_TN + int64_t{first + r} * cols + column, first + r < rows);
  }
#pragma unroll
  for (int r = 0; r < kBiasRows; ++r) {
    if (first + r >= rows) return;
    store_stored<kWidth>(x_TN + int64_t{first + r} * cols + column, rounded_sum(x[r], bias));
  }
}

// Of each piece of rows the sum, [pieces, N]. A block has one piece of 32 kWidth columns, a warp every eighth row
// of it.
template <int kWidth, typename T>
__global__ void __launch_bounds__(kBiasThreads)
    bias_pieces_kernel(const T* d_y_TN, float* sums_PN, int rows, int rows_of_piece, int cols) {
  constexpr int kCols = kWarpSize * kWidth;
  __shared__ float shared[kBiasWarps][kCols];
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize, warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int first_column = static_cast<int>(blockIdx.x) * kCols, column = first_column + lane * kWidth;
  const int begin = static_cast<int>(blockIdx.y) * rows_of_piece, end = min(begin + rows_of_piece, rows);
  float sum[kWidth] = {};
  if (column < cols) {
#pragma unroll 4
    for (int t = begin + warp; t < end; t += kBiasWarps) {
      const Stored<T, kWidth> d_y = load_stored<kWidth>(d_y_TN + int64_t{t} * cols + column);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) sum[i] += d_y[i];
    }
  }
#pragma unroll
  for (int i = 0; i < kWidth; ++i) shared[warp][lane * kWidth + i] = sum[i];
  __syncthreads();
  for (int c = static_cast<int>(threadIdx.x); c < kCols && first_column + c < cols; c += kBiasThreads) {
    float total = 0.0f;
#pragma unroll
    for (int w = 0; w < kBiasWarps; ++w) total += shared[w][c];
    sums_PN[int64_t{blockIdx.y} * cols + first_column + c] = total;
  }
}

// d_bias += the sum of the pieces, added once.
template <typename G>
__global__ void __launch_bounds__(kBiasThreads)
    bias_sum_kernel(const float* sums_PN, G* d_bias_N, int pieces, int cols) {
  const int column = static_cast<int>(blockIdx.x * kBiasThreads + threadIdx.x);
  if (column >= cols) return;
  float sum = 0.0f;
#pragma unroll 8
  for (int p = 0; p < pieces; ++p) sum += sums_PN[int64_t{p} * cols + column];
  d_bias_N[column] = from_float<G>(to_float(d_bias_N[column]) + sum);
}

}  // namespace

void bias_forward(Device& any_device, const BiasForward& a) {
  CudaDevice& device = as_cuda(any_device);
  const int64_t rows = a.x.dim[0], cols = a.x.dim[1], across = ceil_div(rows, kBiasRows);
  check_row_extents(rows, cols);
  with_plain_type(a.x.dtype, [&](auto type) {
    using T = decltype(type);
    constexpr int kWide = 16 / sizeof(T);
    const bool wide = cols % kWide == 0 && is_aligned(a.x.data, 16) && is_aligned(a.bias.data, 16);
    const auto kernel = wide ? bias_forward_kernel<kWide, T> : bias_forward_kernel<1, T>;
    const int64_t blocks = ceil_div(cols, int64_t{kBiasThreads} * (wide ? kWide : 1));
    // A grid has fewer rows of blocks than columns of them.
    for (int64_t done = 0; done < across; done += UINT16_MAX) {
      const int64_t first = done * kBiasRows, count = std::min<int64_t>(across - done, UINT16_MAX);
      kernel<<<dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(count)), kBiasThreads, 0,
               device.stream()>>>(a.bias.as<T>(), a.x.as<T>() + first * cols, static_cast<int>(rows - first),
                                  static_cast<int>(cols));
    }
  });
  check_launch("bias_forward");
}

void bias_backward(Device& any_device, const BiasBackward& a) {
  CudaDevice& device = as_cuda(any_device);
  const int64_t rows = a.d_y.dim[0], cols = a.d_y.dim[1], pieces = bias_backward_pieces(rows);
  check_row_extents(rows, cols);
  auto* const sums_PN = static_cast<float*>(device.workspace("bias_backward", workspace_of(a)));
  with_plain_type(a.d_y.dtype, [&](auto type) {
    using T = decltype(type);
    constexpr int kWide = 16 / sizeof(T);
    const bool wide = cols % kWide == 0 && is_aligned(a.d_y.data, 16);
    const auto kernel = wide ? bias_pieces_kernel<kWide, T> : bias_pieces_kernel<1, T>;
    const int64_t blocks = ceil_div(cols, int64_t{kWarpSize} * (wide ? kWide : 1));
    kernel<<<dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(pieces)), kBiasThreads, 0,
             device.stream()>>>(a.d_y.as<T>(), sums_PN, static_cast<int>(rows),
                                static_cast<int>(ceil_div(rows, pieces)), static_cast<int>(cols));
  });
  check_launch("bias_backward");
  with_plain_type(a.d_bias.dtype, [&](auto type) {
    using G = decltype(type);
    bias_sum_kernel<G><<<static_cast<unsigned>(ceil_div(cols, kBiasThreads)), kBiasThreads, 0, device.stream()>>>(
        sums_PN, a.d_bias.as<G>(), static_cast<int>(pieces), static_cast<int>(cols));
  });
  check_launch("bias_backward");
}

}  // namespace parka::cuda
