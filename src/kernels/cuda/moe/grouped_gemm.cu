#include "kernels/ops/moe/grouped_gemm.h"

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/moe/experts.cuh"
#include "kernels/cuda/quantize/fp8.cuh"

// out[r] = a[r] times the matrix of r's expert, or sums over an expert's rows. Operands have rows and a depth,
// which is summed over; sm90_grouped_gemm.cu has the kernels that training uses.
namespace parka::cuda {
namespace {

// ---- Any format, on any GPU, without tensor cores: a block has a tile of 64 x 64, a thread 4 x 4 numbers ----

constexpr int kTile = 64, kDepth = 16, kPart = 4, kAcross = kTile / kPart, kThreads = kAcross * kAcross;
constexpr int kPitch = kTile + kPart;

// Element (row, k) is at row * row_step + k * depth_step.
struct Operand {
  const void* data;
  const float* scale;  // null: plain numbers
  DType dtype;
  int64_t row_step, depth_step;

  Operand(const ScaledView& x, int64_t row_step_, int64_t depth_step_)
      : data(x.data.data),
        scale(x.scaling == Scaling::kNone ? nullptr : x.scale.as<float>()),
        dtype(x.data.dtype),
        row_step(row_step_),
        depth_step(depth_step_) {}

  __device__ float at(int64_t index) const {
    switch (dtype) {
      case DType::kF32: return static_cast<const float*>(data)[index];
      case DType::kBF16: return to_float(static_cast<const BFloat16*>(data)[index]);
      case DType::kE4M3: return decode_e4m3(static_cast<const Float8E4M3*>(data)[index]);
      default: return decode_e5m2(static_cast<const Float8E5M2*>(data)[index]);
    }
  }
  __device__ float scale_of(int n) const { return scale == nullptr ? 1.0f : scale[n]; }
};

// Part of an operand's rows, those before `end`.
struct Rows {
  int64_t first_element;  // where row 0 begins
  int begin, end;
};

__device__ void load_tile(const Operand& x, const Rows& rows, int k_begin, int k_end,
                          float (&tile)[kDepth][kPitch]) {
  const bool along_depth = x.depth_step == 1;  // neighbouring threads read neighbouring elements
  for (int i = static_cast<int>(threadIdx.x); i < kTile * kDepth; i += kThreads) {
    const int row = along_depth ? i / kDepth : i % kTile, depth = along_depth ? i % kDepth : i / kTile;
    const bool exists = rows.begin + row < rows.end && k_begin + depth < k_end;
    const int64_t at = rows.first_element + (rows.begin + row) * x.row_step + (k_begin + depth) * x.depth_step;
    tile[depth][row] = exists ? x.at(at) : 0.0f;
  }
}

// This thread's part of the tile: the sums over k_begin, k_begin + 1... in order.
__device__ void multiply_tile(const Operand& a, const Rows& a_rows, const Operand& b, const Rows& b_rows,
                              int k_begin, int k_end, float (&c)[kPart][kPart]) {
  __shared__ __align__(16) float a_tile[kDepth][kPitch], b_tile[kDepth][kPitch];
  const int a_at = static_cast<int>(threadIdx.x) / kAcross * kPart,
            b_at = static_cast<int>(threadIdx.x) % kAcross * kPart;
  for (int k = k_begin; k < k_end; k += kDepth) {
    load_tile(a, a_rows, k, k_end, a_tile);
    load_tile(b, b_rows, k, k_end, b_tile);
    __syncthreads();
#pragma unroll
    for (int depth = 0; depth < kDepth; ++depth) {
      float x[kPart], y[kPart];
      load(&a_tile[depth][a_at], x);
      load(&b_tile[depth][b_at], y);
#pragma unroll
      for (int i = 0; i < kPart; ++i) {
#pragma unroll
        for (int j = 0; j < kPart; ++j) c[i][j] = fmaf(x[i], y[j], c[i][j]);
      }
    }
    __syncthreads();
  }
}

// Stores what of it is before the ends.
template <typename Out>
__device__ void store_tile(const float (&c)[kPart][kPart], float scale, bool accumulate, int row, int row_end,
                           int col, int col_end, Out* out) {
  row += static_cast<int>(threadIdx.x) / kAcross * kPart;
  col += static_cast<int>(threadIdx.x) % kAcross * kPart;
#pragma unroll
  for (int i = 0; i < kPart; ++i) {
#pragma unroll
    for (int j = 0; j < kPart; ++j) {
      if (row + i >= row_end || col + j >= col_end) continue;
      Out* const target = out + int64_t{row + i} * col_end + col + j;
      const float result = __fmul_rn(c[i][j], scale);
      *target = from_float<Out>(accumulate ? __fadd_rn(result, to_float(*target)) : result);
    }
  }
}

// The expert of this row, in all threads of a block; -1 for none.
__device__ int expert_of(const Experts& experts, int row) {
  __shared__ int found;
  if (threadIdx.x == 0) found = -1;
  __syncthreads();
  for (int e = static_cast<int>(threadIdx.x); e < experts.count; e += kThreads) {
    if (experts.offsets[e] <= row && row < experts.offsets[e + 1]) found = e;
  }
  __syncthreads();
  return found;
}

// b_step: elements from one expert's matrix to the next.
template <typename Out>
__global__ void __launch_bounds__(kThreads)
    grouped_gemm_kernel(const Operand a, const Operand b, int64_t b_step, const Experts experts, int rows, int cols,
                        int depth, Out* out) {
  const int row = static_cast<int>(blockIdx.y) * kTile, col = static_cast<int>(blockIdx.x) * kTile;
  const int expert = expert_of(experts, row);
  const int end = expert < 0 ? 0 : experts.offsets[expert] + experts.counts[expert];
  float c[kPart][kPart] = {}, scale = 1.0f;
  if (row < end) {
    multiply_tile(a, {0, row, end}, b, {expert * b_step, col, cols}, 0, depth, c);
    scale = __fmul_rn(a.scale_of(0), b.scale_of(expert));
  }
  store_tile(c, scale, /*accumulate=*/false, row, rows, col, cols, out);
}

// Block (x, y, e) has a tile of expert e's gradient [cols, depth].
template <typename Out>
__global__ void __launch_bounds__(kThreads)
    grouped_weight_gradient_kernel(const Operand d_y, const Operand x, const Experts experts, int cols, int depth,
                                   Out* out, bool accumulate) {
  const int row = static_cast<int>(blockIdx.y) * kTile, col = static_cast<int>(blockIdx.x) * kTile;
  const int expert = static_cast<int>(blockIdx.z), begin = experts.offsets[expert], count = experts.counts[expert];
  if (count == 0 && accumulate) return;
  float c[kPart][kPart] = {};
  multiply_tile(d_y, {0, row, cols}, x, {0, col, depth}, begin, begin + count, c);
  const float scale = __fmul_rn(d_y.scale_of(0), x.scale_of(0));
  store_tile(c, count == 0 ? 1.0f : scale, accumulate, row, cols, col, depth, out + int64_t{expert} * cols * depth);
}

dim3 tiles_of(int64_t rows, int64_t cols, int64_t experts = 1) {
  const int64_t down = ceil_div(rows, int64_t{kTile});
  PARKA_REQUIRE(down <= 65535 && rows < (int64_t{1} << 30) && cols < (int64_t{1} << 30));
  return dim3(static_cast<unsigned>(ceil_div(cols, int64_t{kTile})), static_cast<unsigned>(down),
              static_cast<unsigned>(experts));
}

}  // namespace

void grouped_gemm(Device& any_device, const GroupedGemm& a) {
  CudaDevice& device = as_cuda(any_device);
  if (fits_sm90(device, a)) {
    run_sm90(device, a);
    return;
  }
  const auto [rows, cols, depth, count] = shape_of(a);
  const Operand left(a.a, depth, 1), right(a.b, a.b_transposed ? 1 : depth, a.b_transposed ? cols : 1);
  with_plain_type(a.out.dtype, [&](auto type) {
    using Out = decltype(type);
    launch(device, "grouped_gemm", grouped_gemm_kernel<Out>, {tiles_of(rows, cols), kThreads}, left, right,
           cols * depth, Experts(a.offsets, a.counts), static_cast<int>(rows), static_cast<int>(cols),
           static_cast<int>(depth), a.out.as<Out>());
  });
}

void grouped_weight_gradient(Device& any_device, const GroupedWeightGradient& a) {
  CudaDevice& device = as_cuda(any_device);
  if (fits_sm90(device, a)) {
    run_sm90(device, a);
    return;
  }
  const auto [rows, cols, depth, count] = shape_of(a);
  const bool coded = a.x.scaling != Scaling::kNone;
  const Operand d_y(a.d_y, coded ? rows : 1, coded ? 1 : cols), x(a.x, coded ? rows : 1, coded ? 1 : depth);
  with_plain_type(a.out.dtype, [&](auto type) {
    using Out = decltype(type);
    launch(device, "grouped_weight_gradient", grouped_weight_gradient_kernel<Out>,
           {tiles_of(cols, depth, count), kThreads}, d_y, x, Experts(a.offsets, a.counts), static_cast<int>(cols),
           static_cast<int>(depth), a.out.as<Out>(), a.accumulate);
  });
}

}  // namespace parka::cuda
