#include "kernels/cuda/norm.h"

#include <algorithm>
#include <initializer_list>
#include <type_traits>

#include "kernels/cuda/check.h"
#include "kernels/cuda/cuda_device.h"
#include "kernels/cuda/vector.cuh"
#include "kernels/cuda/workspace.h"

// Shapes: T rows (tokens), C columns (elements of a row), B blocks. One block works on one row at a time.
namespace parka::cuda {
namespace {

constexpr int kThreadElements = 16;  // of a row, that a thread holds in registers
constexpr int kMaxThreads = 512;
constexpr int kMaxWarps = kMaxThreads / kWarpSize;
constexpr int64_t kMaxWideCols = int64_t{kMaxThreads} * kThreadElements;

// A thread's share of a chunk of a row: kPacks packs of kWidth adjacent columns, `stride` apart. Wide: packs of 16
// bytes of T, and the row is one chunk, which stays in registers from pass to pass. If not: single columns, and as
// many chunks as the row needs, read again in every pass.
template <typename T, bool kWide>
struct RowPart {
  static constexpr int kWidth = kWide ? 16 / sizeof(T) : 1;
  static constexpr int kPacks = kWide ? kThreadElements / kWidth : 4;

  int first, stride, cols;

  __device__ RowPart(int chunk, int cols_)
      : first(chunk + static_cast<int>(threadIdx.x) * kWidth), stride(blockDim.x * kWidth), cols(cols_) {}

  __device__ int column(int pack) const { return first + pack * stride; }
  __device__ bool has(int pack) const { return column(pack) < cols; }

  // Zeros where the row has no column.
  template <typename E>
  __device__ void read(const E* row, Stored<E, kWidth> (&x)[kPacks]) const {
#pragma unroll
    for (int pack = 0; pack < kPacks; ++pack) x[pack] = load_stored<kWidth>(row + column(pack), has(pack));
  }

  // f(pack, i) for the elements of every pack, those that the row has not included.
  template <typename F>
  static __device__ void for_each(const F& f) {
#pragma unroll
    for (int pack = 0; pack < kPacks; ++pack) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) f(pack, i);
    }
  }

  template <typename E>
  __device__ void write(E* row, const float (&x)[kPacks][kWidth]) const {
#pragma unroll
    for (int pack = 0; pack < kPacks; ++pack) {
      if (has(pack)) store(row + column(pack), x[pack]);
    }
  }

  template <typename F>
  static __device__ void for_each_chunk(int cols, const F& f) {
    if constexpr (kWide) {
      f(RowPart(0, cols));
    } else {
      for (int chunk = 0; chunk < cols; chunk += blockDim.x * kPacks) f(RowPart(chunk, cols));
    }
  }
};

// The sums over the block, in every thread, in a fixed order. `shared`, of kMaxWarps, must not be used again until
// all threads have passed another barrier.
__device__ float2 row_sum(float2 x, float2* shared) {
  x = make_float2(warp_sum(x.x), warp_sum(x.y));
  if (blockDim.x == kWarpSize) return x;
  const int lane = threadIdx.x % kWarpSize;
  if (lane == 0) shared[threadIdx.x / kWarpSize] = x;
  __syncthreads();
  x = lane < static_cast<int>(blockDim.x) / kWarpSize ? shared[lane] : make_float2(0.0f, 0.0f);
  return make_float2(warp_sum(x.x), warp_sum(x.y));
}

__device__ float row_sum(float x, float* shared) {
  x = warp_sum(x);
  if (blockDim.x == kWarpSize) return x;
  const int lane = threadIdx.x % kWarpSize;
  if (lane == 0) shared[threadIdx.x / kWarpSize] = x;
  __syncthreads();
  return warp_sum(lane < static_cast<int>(blockDim.x) / kWarpSize ? shared[lane] : 0.0f);
}

// x / n for an n whose inverse is known, rounded as a division rounds: by what the product misses, added to it.
__device__ float divided(float x, float n, float inverse) {
  const float quotient = x * inverse;
  return fmaf(fmaf(-quotient, n, x), inverse, quotient);
}

// What y is made of in every kernel, in operations that the compiler cannot fuse into others: norm_recompute
// repeats norm_forward bit for bit.
__device__ float normalized(float x, float mean, float rstd) { return __fmul_rn(__fsub_rn(x, mean), rstd); }

// y = normalized(x) * weight, without weight for LayerNorm
template <bool kLayerNorm, typename Part, typename W, typename Y>
__device__ void write_normalized(const Part& part, const float (&x)[Part::kPacks][Part::kWidth], float mean,
                                 float rstd, const W* weight_C, Y* row) {
  float y[Part::kPacks][Part::kWidth];
  if constexpr (kLayerNorm) {
    Part::for_each([&](int pack, int i) { y[pack][i] = normalized(x[pack][i], mean, rstd); });
  } else {
    Stored<W, Part::kWidth> weight[Part::kPacks];
    part.read(weight_C, weight);
    Part::for_each(
        [&](int pack, int i) { y[pack][i] = __fmul_rn(normalized(x[pack][i], mean, rstd), weight[pack][i]); });
  }
  part.write(row, y);
}

template <typename T, typename Y>
struct ForwardTensors {
  const T* residual_TC;
  const T* branch_TC;  // not added unless `adds`, but read all the same: a condition would delay the loads
  bool adds;
  const T* weight_C;  // null for LayerNorm
  T* residual_out_TC;
  bool writes_sum;  // false where residual_out is the residual, and nothing is added
  Y* y_TC;
  float* mean_T;  // null for RMSNorm
  float* rstd_T;
};

template <typename T, typename Y, bool kLayerNorm, bool kWide>
__global__ void __launch_bounds__(kMaxThreads)
    norm_forward_kernel(const ForwardTensors<T, Y> a, float eps, int cols, float inverse_cols) {
  using Part = RowPart<T, kWide>;
  __shared__ float shared[2][kMaxWarps];
  const int64_t row = int64_t{blockIdx.x} * cols;
  float x[Part::kPacks][Part::kWidth];
  const auto read_again = [&](const Part& part) {
    if constexpr (!kWide) {
      Stored<T, Part::kWidth> sum[Part::kPacks];
      part.read(a.residual_out_TC + row, sum);
      Part::for_each([&](int pack, int i) { x[pack][i] = sum[pack][i]; });
    }
  };

  float sum = 0.0f;
  Part::for_each_chunk(cols, [&](const Part& part) {
    Stored<T, Part::kWidth> residual[Part::kPacks], branch[Part::kPacks];
    part.read(a.residual_TC + row, residual);
    part.read(a.branch_TC + row, branch);
    Part::for_each([&](int pack, int i) {
      // The norm reads what backward will read: the sum as stored.
      const float added = to_float(from_float<T>(residual[pack][i] + branch[pack][i]));
      x[pack][i] = a.adds ? added : residual[pack][i];
      sum += x[pack][i];
    });
    if (a.writes_sum) part.write(a.residual_out_TC + row, x);
  });
  const float count = static_cast<float>(cols);
  const float mean = kLayerNorm ? divided(row_sum(sum, shared[0]), count, inverse_cols) : 0.0f;

  float squares = 0.0f;
  Part::for_each_chunk(cols, [&](const Part& part) {
    read_again(part);
    Part::for_each([&](int pack, int i) {
      const float deviation = part.has(pack) ? x[pack][i] - mean : 0.0f;
      squares += deviation * deviation;
    });
  });
  const float rstd = rsqrtf(divided(row_sum(squares, shared[1]), count, inverse_cols) + eps);
  if (threadIdx.x == 0) {
    if (kLayerNorm) a.mean_T[blockIdx.x] = mean;
    a.rstd_T[blockIdx.x] = rstd;
  }

  Part::for_each_chunk(cols, [&](const Part& part) {
    read_again(part);
    write_normalized<kLayerNorm>(part, x, mean, rstd, a.weight_C, a.y_TC + row);
  });
}

template <typename X, typename W, typename Y, bool kLayerNorm, bool kWide>
__global__ void __launch_bounds__(kMaxThreads)
    norm_recompute_kernel(const X* x_TC, const W* weight_C, const float* mean_T, const float* rstd_T, Y* y_TC,
                          int cols) {
  using Part = RowPart<X, kWide>;
  const int64_t row = int64_t{blockIdx.x} * cols;
  const float mean = kLayerNorm ? mean_T[blockIdx.x] : 0.0f, rstd = rstd_T[blockIdx.x];
  Part::for_each_chunk(cols, [&](const Part& part) {
    Stored<X, Part::kWidth> stored[Part::kPacks];
    part.read(x_TC + row, stored);
    float x[Part::kPacks][Part::kWidth];
    Part::for_each([&](int pack, int i) { x[pack][i] = stored[pack][i]; });
    write_normalized<kLayerNorm>(part, x, mean, rstd, weight_C, y_TC + row);
  });
}

template <typename X, typename W, typename G>
struct BackwardTensors {
  const X* x_TC;
  const W* weight_C;    // null for LayerNorm
  const float* mean_T;  // null for RMSNorm
  const float* rstd_T;
  const G* d_y_TC;
  const G* d_residual_TC;  // not added unless `adds`, but read all the same: a condition would delay the loads
  bool adds;
  G* d_residual_out_TC;  // may be d_y or d_residual: a thread reads its part of a row before it writes it
  float* d_weight_BC;    // null for LayerNorm: what the rows of each block add to d_weight
};

// No block has 768 threads. The bound keeps registers few enough for that many on a multiprocessor at once, beside
// the sums of d_weight that they hold.
template <typename X, typename G, bool kLayerNorm>
constexpr int kBackwardMaxThreads = !kLayerNorm && sizeof(X) == 2 && sizeof(G) == 2 ? 768 : kMaxThreads;

// With xhat = (x - mean) * rstd and g = d_y * weight, both functions of the row:
//   d_x = rstd * (g - mean(g) - xhat * mean(g * xhat)),   without mean(g) for RMSNorm
template <typename X, typename W, typename G, bool kLayerNorm, bool kWide>
__global__ void __launch_bounds__(kBackwardMaxThreads<X, G, kLayerNorm>)
    norm_backward_kernel(const BackwardTensors<X, W, G> a, unsigned rows, int cols, float inverse_cols) {
  using Part = RowPart<X, kWide>;
  constexpr int kPacks = Part::kPacks, kWidth = Part::kWidth;
  __shared__ float2 shared[2][kMaxWarps];
  float* const d_weight_C = kLayerNorm ? nullptr : a.d_weight_BC + int64_t{blockIdx.x} * cols;
  float d_weight[kPacks][kWidth] = {};  // wide: of this thread's columns, over the block's rows
  int buffer = 0;
  for (unsigned t = blockIdx.x; t < rows; t += gridDim.x, buffer ^= 1) {
    const int64_t row = int64_t{t} * cols;
    const float mean = kLayerNorm ? a.mean_T[t] : 0.0f, rstd = a.rstd_T[t];
    Stored<X, kWidth> x[kPacks];
    Stored<W, kWidth> weight[kPacks] = {};
    Stored<G, kWidth> d_y[kPacks], d_residual[kPacks];
    const auto read = [&](const Part& part) {
      part.read(a.x_TC + row, x);
      part.read(a.d_y_TC + row, d_y);
      part.read(a.d_residual_TC + row, d_residual);
      if constexpr (!kLayerNorm) part.read(a.weight_C, weight);
    };
    const auto xhat = [&](int pack, int i) { return normalized(x[pack][i], mean, rstd); };
    const auto g = [&](int pack, int i) { return kLayerNorm ? d_y[pack][i] : d_y[pack][i] * weight[pack][i]; };

    float2 sums = {0.0f, 0.0f};  // of g, and of g * xhat
    Part::for_each_chunk(cols, [&](const Part& part) {
      read(part);
      Part::for_each([&](int pack, int i) {
        sums.x += g(pack, i);
        sums.y += g(pack, i) * xhat(pack, i);
        if constexpr (kLayerNorm) {
          return;
        } else if constexpr (kWide) {
          d_weight[pack][i] += d_y[pack][i] * xhat(pack, i);
        } else if (part.has(pack)) {
          float& sum = d_weight_C[part.column(pack)];
          sum = d_y[pack][i] * xhat(pack, i) + (t == blockIdx.x ? 0.0f : sum);
        }
      });
    });
    sums = row_sum(sums, shared[buffer]);
    const float mean_g = kLayerNorm ? sums.x * inverse_cols : 0.0f, mean_g_xhat = sums.y * inverse_cols;

    Part::for_each_chunk(cols, [&](const Part& part) {
      if constexpr (!kWide) read(part);
      float d_x[kPacks][kWidth];
      Part::for_each([&](int pack, int i) {
        d_x[pack][i] = rstd * (g(pack, i) - mean_g - xhat(pack, i) * mean_g_xhat);
        if (a.adds) d_x[pack][i] += d_residual[pack][i];
      });
      part.write(a.d_residual_out_TC + row, d_x);
    });
  }
  if constexpr (kWide && !kLayerNorm) Part(0, cols).write(d_weight_C, d_weight);
}

constexpr int kSumThreads = kWarpSize * kWarpSize;

// d_weight += the sum of what the blocks of norm_backward_kernel left, added once. A block of 32 x 32 threads has
// 32 columns.
template <typename W>
__global__ void __launch_bounds__(kSumThreads)
    norm_weight_gradient_kernel(const float* d_weight_BC, W* d_weight_C, int blocks, int cols) {
  __shared__ float shared[kWarpSize][kWarpSize + 1];
  const int column = blockIdx.x * kWarpSize + threadIdx.x;
  float sum = 0.0f;
  if (column < cols) {
#pragma unroll 4
    for (int b = threadIdx.y; b < blocks; b += kWarpSize) sum += d_weight_BC[int64_t{b} * cols + column];
  }
  shared[threadIdx.x][threadIdx.y] = sum;
  __syncthreads();
  sum = warp_sum(shared[threadIdx.y][threadIdx.x]);  // of the column that threadIdx.y counts
  const int sum_column = blockIdx.x * kWarpSize + threadIdx.y;
  if (threadIdx.x == 0 && sum_column < cols) {
    d_weight_C[sum_column] = from_float<W>(to_float(d_weight_C[sum_column]) + sum);
  }
}

// Whether rows of `cols` elements can be moved in packs of `width` and held in registers. Of tensors not given the
// pointer is null.
bool fits_wide(int64_t cols, int width, std::initializer_list<const void*> tensors) {
  return cols % width == 0 && cols <= kMaxWideCols &&
         std::all_of(tensors.begin(), tensors.end(), [](const void* p) { return is_aligned(p, 16); });
}

int threads_for(int64_t cols) {
  const int64_t warps = ceil_div(cols, int64_t{kThreadElements} * kWarpSize);
  return static_cast<int>(std::min<int64_t>(warps, kMaxWarps)) * kWarpSize;
}

// Rows and columns as kernels count them: a block per row, and columns with room for one chunk more in an int.
void check_extents(int64_t rows, int64_t cols) {
  PARKA_REQUIRE(rows <= INT32_MAX && cols <= INT32_MAX - kMaxWideCols);
}

template <typename T>
T* optional(const TensorView& t) {
  return t.empty() ? nullptr : t.as<T>();
}

// Calls f with a constant for a bool, to instantiate a kernel for it.
template <typename F>
void with_constant(bool value, const F& f) {
  if (value) {
    f(std::true_type());
  } else {
    f(std::false_type());
  }
}

template <typename T, typename Y, bool kLayerNorm>
void launch_forward(CudaDevice& device, const NormForward& a) {
  const int64_t rows = a.residual.dim[0], cols = a.residual.dim[1];
  const bool adds = !a.branch.empty();
  const ForwardTensors<T, Y> tensors{
      .residual_TC = a.residual.as<T>(),
      .branch_TC = (adds ? a.branch : a.residual).as<T>(),
      .adds = adds,
      .weight_C = optional<T>(a.weight),
      .residual_out_TC = a.residual_out.as<T>(),
      .writes_sum = adds || a.residual_out.data != a.residual.data,
      .y_TC = a.y.data.as<Y>(),
      .mean_T = optional<float>(a.mean),
      .rstd_T = a.rstd.as<float>(),
  };
  const bool wide = fits_wide(cols, RowPart<T, true>::kWidth,
                              {a.residual.data, a.branch.data, a.weight.data, a.residual_out.data, a.y.data.data});
  const auto kernel =
      wide ? norm_forward_kernel<T, Y, kLayerNorm, true> : norm_forward_kernel<T, Y, kLayerNorm, false>;
  kernel<<<static_cast<unsigned>(rows), threads_for(cols), 0, device.stream()>>>(
      tensors, a.eps, static_cast<int>(cols), 1.0f / static_cast<float>(cols));
  check_launch("norm_forward");
}

template <typename X, typename W, typename Y, bool kLayerNorm>
void launch_recompute(CudaDevice& device, const NormRecompute& a) {
  const int64_t rows = a.x.num_rows(), cols = a.x.num_cols();
  const bool wide = fits_wide(cols, RowPart<X, true>::kWidth, {a.x.data.data, a.weight.data, a.y.data.data});
  const auto kernel =
      wide ? norm_recompute_kernel<X, W, Y, kLayerNorm, true> : norm_recompute_kernel<X, W, Y, kLayerNorm, false>;
  kernel<<<static_cast<unsigned>(rows), threads_for(cols), 0, device.stream()>>>(
      a.x.data.as<X>(), optional<W>(a.weight), optional<float>(a.mean), a.rstd.as<float>(), a.y.data.as<Y>(),
      static_cast<int>(cols));
  check_launch("norm_recompute");
}

// d_x, and for RMSNorm the partial sums of d_weight in the workspace, one row per block. Returns the number of
// blocks.
template <typename X, typename W, typename G, bool kLayerNorm>
int launch_backward(CudaDevice& device, const NormBackward& a) {
  const int64_t rows = a.x.num_rows(), cols = a.x.num_cols();
  const int threads = threads_for(cols);
  const bool wide = fits_wide(cols, RowPart<X, true>::kWidth,
                              {a.x.data.data, a.weight.data, a.d_y.data, a.d_residual.data, a.d_residual_out.data});
  const auto kernel =
      wide ? norm_backward_kernel<X, W, G, kLayerNorm, true> : norm_backward_kernel<X, W, G, kLayerNorm, false>;
  int64_t blocks = rows;
  float* d_weight_BC = nullptr;
  if constexpr (!kLayerNorm) {
    // As many as run at once, the same number on every multiprocessor.
    int resident = 0;
    check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, threads, 0), "norm_backward");
    const int64_t multiprocessors = device.num_multiprocessors(), max_blocks = norm_backward_max_blocks(cols);
    const int64_t per_multiprocessor = std::clamp<int64_t>(max_blocks / multiprocessors, 1, std::max(resident, 1));
    blocks = std::min({rows, per_multiprocessor * multiprocessors, max_blocks});
    d_weight_BC = static_cast<float*>(device.workspace("norm_backward", norm_backward_workspace_bytes(cols)));
  }
  const bool adds = !a.d_residual.empty();
  const BackwardTensors<X, W, G> tensors{
      .x_TC = a.x.data.as<X>(),
      .weight_C = optional<W>(a.weight),
      .mean_T = optional<float>(a.mean),
      .rstd_T = a.rstd.as<float>(),
      .d_y_TC = a.d_y.as<G>(),
      .d_residual_TC = (adds ? a.d_residual : a.d_y).as<G>(),
      .adds = adds,
      .d_residual_out_TC = a.d_residual_out.as<G>(),
      .d_weight_BC = d_weight_BC,
  };
  kernel<<<static_cast<unsigned>(blocks), threads, 0, device.stream()>>>(
      tensors, static_cast<unsigned>(rows), static_cast<int>(cols), 1.0f / static_cast<float>(cols));
  check_launch("norm_backward");
  return static_cast<int>(blocks);
}

void add_weight_gradient(CudaDevice& device, const TensorView& d_weight, int blocks) {
  const int cols = static_cast<int>(d_weight.dim[0]);
  const auto* const d_weight_BC =
      static_cast<const float*>(device.workspace("norm_backward", norm_backward_workspace_bytes(cols)));
  with_plain_type(d_weight.dtype, [&](auto w) {
    using W = decltype(w);
    norm_weight_gradient_kernel<W>
        <<<(cols + kWarpSize - 1) / kWarpSize, dim3(kWarpSize, kWarpSize), 0, device.stream()>>>(
            d_weight_BC, d_weight.as<W>(), blocks, cols);
  });
  check_launch("norm_backward");
}

}  // namespace

void norm_forward(Device& device, const NormForward& a) {
  PARKA_REQUIRE(a.x.empty() && a.y.scaling == Scaling::kNone && a.y_t.empty());
  check_extents(a.residual.dim[0], a.residual.dim[1]);
  with_plain_type(a.residual.dtype, [&](auto residual) {
    with_plain_type(a.y.data.dtype, [&](auto y) {
      with_constant(a.kind == NormKind::kLayerNorm, [&](auto layer_norm) {
        launch_forward<decltype(residual), decltype(y), layer_norm.value>(as_cuda(device), a);
      });
    });
  });
}

void norm_recompute(Device& device, const NormRecompute& a) {
  PARKA_REQUIRE(a.x.scaling == Scaling::kNone && a.y.scaling == Scaling::kNone && a.y_t.empty());
  check_extents(a.x.num_rows(), a.x.num_cols());
  with_plain_type(a.x.data.dtype, [&](auto x) {
    with_plain_type(a.y.data.dtype, [&](auto y) {
      using X = decltype(x);
      using Y = decltype(y);
      if (a.kind == NormKind::kLayerNorm) {
        launch_recompute<X, float, Y, true>(as_cuda(device), a);
        return;
      }
      with_plain_type(a.weight.dtype,
                      [&](auto weight) { launch_recompute<X, decltype(weight), Y, false>(as_cuda(device), a); });
    });
  });
}

void norm_backward(Device& device, const NormBackward& a) {
  PARKA_REQUIRE(a.x.scaling == Scaling::kNone && a.d_quantized.empty() && a.d_quantized_t.empty());
  check_extents(a.x.num_rows(), a.x.num_cols());
  with_plain_type(a.x.data.dtype, [&](auto x) {
    with_plain_type(a.d_y.dtype, [&](auto g) {
      using X = decltype(x);
      using G = decltype(g);
      if (a.kind == NormKind::kLayerNorm) {
        launch_backward<X, float, G, true>(as_cuda(device), a);
        return;
      }
      with_plain_type(a.weight.dtype, [&](auto weight) {
        const int blocks = launch_backward<X, decltype(weight), G, false>(as_cuda(device), a);
        add_weight_gradient(as_cuda(device), a.d_weight, blocks);
      });
    });
  });
}

}  // namespace parka::cuda
