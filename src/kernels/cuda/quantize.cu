#include "kernels/cuda/quantize.h"

#include "kernels/cuda/check.h"
#include "kernels/cuda/cuda_device.h"
#include "kernels/cuda/vector.cuh"

// Shapes: R rows and C columns of x.
namespace parka::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWideWidth = 4;  // elements that convert_kernel moves as one: 16 bytes of fp32
constexpr int kPacks = 4;      // per thread

// Element by element, whatever the shape.
template <typename X, typename Y, int kWidth>
__global__ void __launch_bounds__(kThreads) convert_kernel(const X* x, Y* y, int64_t count) {
  const int64_t first = (int64_t{blockIdx.x} * kThreads * kPacks + threadIdx.x) * kWidth;
  Stored<X, kWidth> packs[kPacks];
#pragma unroll
  for (int n = 0; n < kPacks; ++n) {
    const int64_t at = first + n * kThreads * kWidth;
    packs[n] = load_stored<kWidth>(x + at, at < count);
  }
#pragma unroll
  for (int n = 0; n < kPacks; ++n) {
    const int64_t at = first + n * kThreads * kWidth;
    if (at >= count) return;
    float values[kWidth];
#pragma unroll
    for (int i = 0; i < kWidth; ++i) values[i] = packs[n][i];
    store(y + at, values);
  }
}

constexpr int kTile = 64;  // rows and columns that a block transposes
constexpr int kTileWarps = kThreads / kWarpSize;

// Calls f(n, across, along) for the elements of a tile that are this thread's: a warp goes along a line of the
// tile.
template <typename F>
__device__ void for_each_in_tile(const F& f) {
#pragma unroll
  for (int n = 0; n < kTile * kTile / kThreads; ++n) {
    constexpr int kPerLine = kTile / kWarpSize;
    f(n, threadIdx.y + n / kPerLine * kTileWarps, threadIdx.x + n % kPerLine * kWarpSize);
  }
}

template <typename X, typename Y>
__global__ void __launch_bounds__(kThreads) transpose_kernel(const X* x_RC, Y* y_CR, int64_t rows, int64_t cols) {
  __shared__ float tile[kTile][kTile + 1];  // a column more, so that columns too lie in different banks
  const int64_t col_tiles = (cols + kTile - 1) / kTile;
  const int64_t first_row = blockIdx.x / col_tiles * kTile, first_col = blockIdx.x % col_tiles * kTile;
  Stored<X, 1> values[kTile * kTile / kThreads];
  for_each_in_tile([&](int n, int r, int c) {
    const int64_t row = first_row + r, col = first_col + c;
    values[n] = load_stored<1>(x_RC + row * cols + col, row < rows && col < cols);
  });
  for_each_in_tile([&](int n, int r, int c) { tile[r][c] = values[n][0]; });
  __syncthreads();
  for_each_in_tile([&](int, int c, int r) {
    const int64_t row = first_row + r, col = first_col + c;
    if (row < rows && col < cols) y_CR[col * rows + row] = from_float<Y>(tile[r][c]);
  });
}

template <typename X, typename Y>
void convert(cudaStream_t stream, const TensorView& x, const TensorView& y) {
  const bool wide = x.numel() % kWideWidth == 0 && is_aligned(x.data, 16) && is_aligned(y.data, 16);
  const auto kernel = wide ? convert_kernel<X, Y, kWideWidth> : convert_kernel<X, Y, 1>;
  const int64_t blocks = ceil_div(x.numel(), int64_t{kThreads} * kPacks * (wide ? kWideWidth : 1));
  PARKA_REQUIRE(blocks <= INT32_MAX);
  kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(x.as<X>(), y.as<Y>(), x.numel());
}

template <typename X, typename Y>
void transpose(cudaStream_t stream, const TensorView& x, const TensorView& y) {
  const int64_t rows = x.dim[0], cols = x.dim[1], blocks = ceil_div(rows, kTile) * ceil_div(cols, kTile);
  PARKA_REQUIRE(blocks <= INT32_MAX);
  transpose_kernel<X, Y>
      <<<static_cast<unsigned>(blocks), dim3(kWarpSize, kTileWarps), 0, stream>>>(x.as<X>(), y.as<Y>(), rows, cols);
}

}  // namespace

void quantize(Device& device, const Quantize& a) {
  PARKA_REQUIRE(a.x.scaling == Scaling::kNone);
  PARKA_REQUIRE(a.out.scaling == Scaling::kNone && a.out_t.scaling == Scaling::kNone);
  const cudaStream_t stream = as_cuda(device).stream();
  with_plain_type(a.x.data.dtype, [&](auto x) {
    using X = decltype(x);
    if (!a.out.empty()) {
      with_plain_type(a.out.data.dtype, [&](auto y) { convert<X, decltype(y)>(stream, a.x.data, a.out.data); });
    }
    if (!a.out_t.empty()) {
      with_plain_type(a.out_t.data.dtype,
                      [&](auto y) { transpose<X, decltype(y)>(stream, a.x.data, a.out_t.data); });
    }
  });
  check_launch("quantize");
}

}  // namespace parka::cuda
