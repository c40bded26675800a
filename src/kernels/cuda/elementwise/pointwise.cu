#include "kernels/ops/elementwise/pointwise.h"

#include <algorithm>

#include "kernels/cuda/map.cuh"
#include "kernels/cuda/norm/norm_rows.cuh"
#include "kernels/cuda/swiglu/swiglu_elements.cuh"
#include "kernels/op/workspace.h"

// Shapes: T rows (tokens), N columns.
namespace parka::cuda {
namespace {

// ---- Add, activation ----

struct Sum {
  __device__ float operator()(const float (&x)[2]) const { return x[0] + x[1]; }
};

// A block has a row.
constexpr int kColumnThreads = 256;

template <typename T>
__global__ void __launch_bounds__(kColumnThreads)
    add_columns_kernel(const T* x, int64_t x_pitch, T* y, int64_t y_pitch, int cols, float factor,
                       bool accumulate) {
  x += blockIdx.x * x_pitch;
  y += blockIdx.x * y_pitch;
  for (int n = static_cast<int>(threadIdx.x); n < cols; n += kColumnThreads) {
    const float scaled = __fmul_rn(factor, to_float(x[n]));
    y[n] = from_float<T>(accumulate ? __fadd_rn(to_float(y[n]), scaled) : scaled);
  }
}

struct Activated {
  float y, slope;
};

// kGelu takes the normal distribution function by erfc, which keeps its digits where it is nearly 0.
__device__ Activated activated(Activation kind, float x) {
  if (kind == Activation::kGelu) {
    constexpr float kSqrtHalf = 0.70710678f, kInverseSqrtTwoPi = 0.39894228f;
    const float probability = 0.5f * erfcf(-kSqrtHalf * x);
    const float density = kInverseSqrtTwoPi * expf(-0.5f * x * x);
    return {x * probability, fmaf(x, density, probability)};
  }
  const bool linear = kind == Activation::kQuickGelu || kind == Activation::kSilu;
  const float factor = kind == Activation::kSilu ? 1.0f : kQuickGeluFactor;
  const float s = sigmoid(linear ? factor * x : gelu_argument(x));
  const float y = x * s, change = y * (1.0f - s);
  return {y, fmaf(change, linear ? factor : gelu_argument_slope(x), s)};
}

struct Activate {
  Activation kind;
  __device__ float operator()(const float (&x)[1]) const { return activated(kind, x[0]).y; }
};

struct ActivationGradient {  // of x and d_y
  Activation kind;
  __device__ float operator()(const float (&x)[2]) const { return x[1] * activated(kind, x[0]).slope; }
};

// ---- Bias: a warp has adjacent columns, kWidth for each lane ----

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

// Sums each piece of rows, [pieces, N]. A block has one piece of 32 kWidth columns, a warp every eighth row
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

// ---- Dropout ----

constexpr int kThreads = 256;
constexpr int kChunk = 4;  // columns that share a draw

struct Mask {
  const int32_t* position;
  int64_t rows, cols, sequence_length;
  uint64_t seed;
  uint32_t stream, threshold;
  float factor;

  __device__ std::array<uint32_t, 4> words(int64_t t, int64_t chunks, int64_t c) const {
    const int64_t sequence = int64_t{position[1]} + t / sequence_length * position[2];
    return dropout_words(seed, stream, static_cast<uint32_t>(position[0]),
                         static_cast<uint64_t>(sequence * sequence_length + t % sequence_length),
                         static_cast<uint64_t>(chunks), static_cast<uint64_t>(c));
  }
  __device__ float apply(uint32_t word, float x) const { return word < threshold ? 0.0f : __fmul_rn(x, factor); }
};

// A thread has the four columns of a draw: side by side in memory where they are `kWide`. Neighbours have the next
// columns, or with kTransposed the next rows, which lie side by side there.
template <typename T, bool kWide, bool kTransposed, bool kAccumulate>
__global__ void __launch_bounds__(kThreads) dropout_kernel(const T* x, T* y, Mask mask) {
  const int64_t chunks = (mask.cols + kChunk - 1) / kChunk;
  const int64_t n = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (n >= mask.rows * chunks) return;
  const int64_t t = kTransposed ? n % mask.rows : n / chunks, c = kTransposed ? n / mask.rows : n % chunks;
  const std::array<uint32_t, 4> words = mask.words(t, chunks, c);
  if constexpr (kWide) {
    const int64_t at = t * mask.cols + c * kChunk;
    float values[kChunk], sum[kChunk] = {};
    load(x + at, values);
    if constexpr (kAccumulate) load(y + at, sum);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) sum[i] = __fadd_rn(sum[i], mask.apply(words[i], values[i]));
    store(y + at, sum);
  } else {
    for (int i = 0; i < kChunk && c * kChunk + i < mask.cols; ++i) {
      const int64_t k = c * kChunk + i, at = kTransposed ? k * mask.rows + t : t * mask.cols + k;
      const float kept = mask.apply(words[i], to_float(x[at]));
      y[at] = from_float<T>(kAccumulate ? __fadd_rn(to_float(y[at]), kept) : kept);
    }
  }
}

template <typename T, bool kAccumulate>
auto choose_dropout_kernel(const Dropout& a, const Mask& mask) {
  constexpr size_t kBytes = kChunk * sizeof(T);
  const bool wide = mask.cols % kChunk == 0 && is_aligned(a.x.data, kBytes) && is_aligned(a.y.data, kBytes);
  return a.transposed ? dropout_kernel<T, false, true, kAccumulate>
         : wide       ? dropout_kernel<T, true, false, kAccumulate>
                      : dropout_kernel<T, false, false, kAccumulate>;
}

}  // namespace

void add(Device& device, const Add& a) {
  with_plain_type(a.x.dtype, [&](auto type) {
    using T = decltype(type);
    map_elements(as_cuda(device), "add", Sum(), {a.x.as<T>(), a.total.as<T>()}, a.total.as<T>(), a.x.numel());
  });
}

void add_columns(Device& device, const AddColumns& a) {
  with_plain_type(a.x.dtype, [&](auto type) {
    using T = decltype(type);
    const int64_t R = a.x.dim[0], N = a.x.dim[1];
    launch(as_cuda(device), "add_columns", add_columns_kernel<T>, {R, kColumnThreads}, a.x.as<T>(), N + a.x_padding,
           a.y.as<T>(), N + a.y_padding, static_cast<int>(N), a.factor, a.accumulate);
  });
}

void activation_forward(Device& device, const ActivationForward& a) {
  with_plain_type(a.x.dtype, [&](auto type) {
    using T = decltype(type);
    map_elements(as_cuda(device), "activation_forward", Activate{a.kind}, {a.x.as<T>()}, a.y.as<T>(), a.x.numel());
  });
}

void activation_backward(Device& device, const ActivationBackward& a) {
  with_plain_type(a.x.dtype, [&](auto type) {
    using T = decltype(type);
    map_elements(as_cuda(device), "activation_backward", ActivationGradient{a.kind}, {a.x.as<T>(), a.d_y.as<T>()},
                 a.d_x.as<T>(), a.x.numel());
  });
}

void bias_forward(Device& any_device, const BiasForward& a) {
  CudaDevice& device = as_cuda(any_device);
  const int64_t rows = a.x.dim[0], cols = a.x.dim[1], across = ceil_div(rows, kBiasRows);
  check_row_extents(rows, cols);
  with_plain_type(a.x.dtype, [&](auto type) {
    using T = decltype(type);
    constexpr int kWide = 16 / sizeof(T);
    const bool wide = cols % kWide == 0 && is_aligned(a.x.data, 16) && is_aligned(a.bias.data, 16);
    const auto blocks = static_cast<unsigned>(ceil_div(cols, int64_t{kBiasThreads} * (wide ? kWide : 1)));
    // A grid has fewer rows of blocks than columns of them.
    for (int64_t done = 0; done < across; done += UINT16_MAX) {
      const int64_t first = done * kBiasRows;
      const auto count = static_cast<unsigned>(std::min<int64_t>(across - done, UINT16_MAX));
      launch(device, "bias_forward", wide ? bias_forward_kernel<kWide, T> : bias_forward_kernel<1, T>,
             {dim3(blocks, count), kBiasThreads}, a.bias.as<T>(), a.x.as<T>() + first * cols,
             static_cast<int>(rows - first), static_cast<int>(cols));
    }
  });
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
    const int64_t blocks = ceil_div(cols, int64_t{kWarpSize} * (wide ? kWide : 1));
    launch(device, "bias_backward", wide ? bias_pieces_kernel<kWide, T> : bias_pieces_kernel<1, T>,
           {dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(pieces)), kBiasThreads}, a.d_y.as<T>(),
           sums_PN, static_cast<int>(rows), static_cast<int>(ceil_div(rows, pieces)), static_cast<int>(cols));
  });
  with_plain_type(a.d_bias.dtype, [&](auto type) {
    using G = decltype(type);
    launch(device, "bias_backward", bias_sum_kernel<G>, {ceil_div(cols, kBiasThreads), kBiasThreads}, sums_PN,
           a.d_bias.as<G>(), static_cast<int>(pieces), static_cast<int>(cols));
  });
}

void dropout(Device& device, const Dropout& a) {
  const Mask mask = {a.position.as<int32_t>(),
                     a.x.dim[a.transposed ? 1 : 0],
                     a.x.dim[a.transposed ? 0 : 1],
                     a.sequence_length,
                     a.seed,
                     a.stream,
                     dropout_threshold(a.probability),
                     dropout_factor(a.probability)};
  with_plain_type(a.x.dtype, [&](auto type) {
    using T = decltype(type);
    launch(as_cuda(device), "dropout",
           a.accumulate ? choose_dropout_kernel<T, true>(a, mask) : choose_dropout_kernel<T, false>(a, mask),
           {ceil_div(mask.rows * ceil_div(mask.cols, int64_t{kChunk}), int64_t{kThreads}), kThreads}, a.x.as<T>(),
           a.y.as<T>(), mask);
  });
}

}  // namespace parka::cuda
