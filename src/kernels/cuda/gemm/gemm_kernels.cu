#include "kernels/cuda/gemm/gemm_kernels.h"

#include <algorithm>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/quantize/fp8.cuh"

// What goes beside cuBLASLt: a [M, K] times b [N, K] for GPUs without FP8 units, a thread for each of M N elements;
// layouts of scales; and operands to time products with.
namespace parka::cuda {
namespace {

// ---- Products without tensor cores ----

constexpr int kMultiplyThreads = 256;

// An fp8 matrix [rows, K].
struct Float8Operand {
  const uint8_t* codes;
  __nv_fp8_interpretation_t kind;
  const void* scale;  // fp32, or bf16
  bool bf16_scale;
  bool one_scale;  // kTensor: multiplies the sum, not the codes
  int rows;
  int group_rows, group_cols;  // of the piece that has one scale
  int scale_cols;              // scales per row of the scale tensor
};

__device__ inline float scale_at(const Float8Operand& x, int64_t index) {
  return x.bf16_scale ? decode_bf16(static_cast<const BFloat16*>(x.scale)[index])
                      : static_cast<const float*>(x.scale)[index];
}

__device__ inline float value_at(const Float8Operand& x, int row, int k, int depth) {
  const uint8_t code = x.codes[static_cast<int64_t>(row) * depth + k];
  const float value = __half2float(__half(__nv_cvt_fp8_to_halfraw(code, x.kind)));
  if (x.one_scale) return value;
  return value * scale_at(x, static_cast<int64_t>(row / x.group_rows) * x.scale_cols + k / x.group_cols);
}

// out[m,n] = (accumulate ? out[m,n] : 0) + scale * sum_k a[m,k] b[n,k], k ascending, one element for each thread.
template <typename Out>
__global__ void __launch_bounds__(kMultiplyThreads)
    multiply_float8_kernel(Float8Operand a, Float8Operand b, int depth, Out* out, bool accumulate) {
  const int64_t at = int64_t{blockIdx.x} * kMultiplyThreads + threadIdx.x;
  if (at >= int64_t{a.rows} * b.rows) return;
  const int m = static_cast<int>(at / b.rows), n = static_cast<int>(at % b.rows);
  float sum = 0.0f;
  for (int k = 0; k < depth; ++k) sum = fmaf(value_at(a, m, k, depth), value_at(b, n, k, depth), sum);
  const float scale = __fmul_rn(a.one_scale ? scale_at(a, 0) : 1.0f, b.one_scale ? scale_at(b, 0) : 1.0f);
  const float result = __fmul_rn(sum, scale);
  out[at] = from_float<Out>(accumulate ? __fadd_rn(result, to_float(out[at])) : result);
}

Float8Operand operand_of(const ScaledView& x) {
  Float8Operand o = {};
  o.codes = static_cast<const uint8_t*>(x.data.data);
  o.kind = x.data.dtype == DType::kE4M3 ? __NV_E4M3 : __NV_E5M2;
  o.scale = x.scale.data;
  o.bf16_scale = x.scale.dtype == DType::kBF16;
  o.one_scale = x.scaling == Scaling::kTensor;
  o.rows = static_cast<int>(x.num_rows());
  o.group_rows = x.scaling == Scaling::kBlock ? static_cast<int>(x.group) : 1;
  o.group_cols = o.one_scale ? 1 : static_cast<int>(x.group);
  o.scale_cols = static_cast<int>(scale_shape(x.scaling, x.group, x.num_rows(), x.num_cols())[1]);
  return o;
}

// ---- Layout of scales ----

constexpr int kScaleTile = 32;
constexpr int kScaleTileRows = 8;  // of threads

// Block (i, 0) does tile i of a, block (i, 1) that of b.
__global__ void __launch_bounds__(kScaleTile* kScaleTileRows) lay_out_scales_kernel(ScaleLayout a, ScaleLayout b) {
  __shared__ float tile[kScaleTile][kScaleTile + 1];
  const ScaleLayout x = blockIdx.y == 0 ? a : b;
  // The padding of rows that are not transposed is written too.
  const int cols = x.transposed ? x.cols : x.to_stride;
  const int tiles_per_row = (cols + kScaleTile - 1) / kScaleTile;
  const int tile_row = blockIdx.x / tiles_per_row, tile_col = blockIdx.x - tile_row * tiles_per_row;
  const int row_begin = tile_row * kScaleTile, col_begin = tile_col * kScaleTile;
  if (x.from == nullptr || row_begin >= x.rows) return;
  const int col = col_begin + threadIdx.x;
  for (int i = threadIdx.y; i < kScaleTile; i += kScaleTileRows) {
    const int row = row_begin + i;
    const float scale = row < x.rows && col < x.cols ? x.from[static_cast<int64_t>(row) * x.cols + col] : 0.0f;
    if (x.transposed) {
      tile[i][threadIdx.x] = scale;
    } else if (row < x.rows && col < cols) {
      x.to[static_cast<int64_t>(row) * x.to_stride + col] = scale;
    }
  }
  if (!x.transposed) return;
  __syncthreads();
  const int row = row_begin + threadIdx.x;
  for (int i = threadIdx.y; i < kScaleTile; i += kScaleTileRows) {
    if (row < x.rows && col_begin + i < cols) {
      x.to[static_cast<int64_t>(col_begin + i) * x.to_stride + row] = tile[threadIdx.x][i];
    }
  }
}

int64_t num_tiles(const ScaleLayout& x) {
  if (x.from == nullptr) return 0;
  return ceil_div(x.rows, kScaleTile) * ceil_div(x.transposed ? x.cols : x.to_stride, kScaleTile);
}

// ---- Random operands ----

constexpr int kFillThreads = 256;
constexpr int kFillVector = 4;

// 32 well mixed bits.
__device__ inline uint32_t mix(uint32_t x) {
  x = (x ^ x >> 16) * 0x7feb352du;
  x = (x ^ x >> 15) * 0x846ca68bu;
  return x ^ x >> 16;
}

// About normally distributed: the sum of four bytes, from its mean, in units of its standard deviation.
__device__ inline float random_normal(uint32_t bits) {
  constexpr float kMean = 510.0f, kDeviation = 147.8f;
  const uint32_t pairs = (bits & 0x00ff00ffu) + (bits >> 8 & 0x00ff00ffu);
  return (static_cast<float>((pairs & 0xffffu) + (pairs >> 16)) - kMean) * (1.0f / kDeviation);
}

template <typename T>
__device__ inline void store_random(T* x, int64_t begin, int64_t count, const float (&values)[kFillVector]) {
  if constexpr (kIsFloat8<T>) {
    // Four deviations reach almost the largest code, as quantized tensors do.
    constexpr float kScale = kFloat8Traits<T>.max / 4.0f;
    const uint32_t codes =
        encode_float8x4<T>(values[0] * kScale, values[1] * kScale, values[2] * kScale, values[3] * kScale);
    auto* bytes = reinterpret_cast<uint8_t*>(x + begin);
    for (int i = 0; i < count; ++i) bytes[i] = static_cast<uint8_t>(codes >> 8 * i);
  } else {
    for (int i = 0; i < count; ++i) x[begin + i] = from_float<T>(values[i]);
  }
}

template <typename T>
__global__ void __launch_bounds__(kFillThreads) fill_random_kernel(T* x, int64_t numel, uint32_t seed) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kFillThreads * kFillVector;
  for (int64_t i = (static_cast<int64_t>(blockIdx.x) * kFillThreads + threadIdx.x) * kFillVector; i < numel;
       i += stride) {
    float values[kFillVector];
#pragma unroll
    for (int j = 0; j < kFillVector; ++j) {
      values[j] = random_normal(mix(static_cast<uint32_t>(i) + static_cast<uint32_t>(j) + mix(seed)));
    }
    const int64_t left = numel - i;
    store_random(x, i, left < kFillVector ? left : kFillVector, values);
  }
}

}  // namespace

void multiply_float8(CudaDevice& device, const Gemm& a) {
  const int64_t rows = a.out.dim[0], cols = a.out.dim[1], depth = a.a.data.dim[1];
  PARKA_REQUIRE(std::max({rows, cols, depth}) < (int64_t{1} << 30));
  with_plain_type(a.out.dtype, [&](auto type) {
    using Out = decltype(type);
    launch(device, "gemm", multiply_float8_kernel<Out>, {ceil_div(rows * cols, kMultiplyThreads), kMultiplyThreads},
           operand_of(a.a), operand_of(a.b), static_cast<int>(depth), a.out.as<Out>(), a.accumulate);
  });
}

void lay_out_scales(CudaDevice& device, const ScaleLayout& a, const ScaleLayout& b) {
  const int64_t tiles = std::max(num_tiles(a), num_tiles(b));
  if (tiles == 0) return;
  constexpr unsigned kOperands = 2;
  launch(device, "gemm", lay_out_scales_kernel,
         {dim3(static_cast<unsigned>(tiles), kOperands), dim3(kScaleTile, kScaleTileRows)}, a, b);
}

void fill_random(CudaDevice& device, const TensorView& x, uint32_t seed) {
  constexpr int kBlocksPerMultiprocessor = 8;
  const int64_t blocks = std::clamp<int64_t>(ceil_div(x.numel(), kFillThreads * kFillVector), 1,
                                             kBlocksPerMultiprocessor * device.num_multiprocessors());
  const auto fill = [&](auto type) {
    using T = decltype(type);
    launch(device, "tune", fill_random_kernel<T>, {blocks, kFillThreads}, x.as<T>(), x.numel(), seed);
  };
  size_of(x.dtype) == 1 ? with_float8_type(x.dtype, fill) : with_plain_type(x.dtype, fill);
}

}  // namespace parka::cuda
