#include <algorithm>
#include <cstdint>

#include "kernels/cuda/attention/attention_paths.cuh"
#include "kernels/cuda/attention/attention_rows.cuh"
#include "kernels/op/workspace.h"

// Totals over rows and heads of attention, for telemetry: each block leaves its own, and one kernel adds them up in
// order. A warp has a row of a head.
namespace parka::cuda {
namespace {

constexpr int kWarps = 8, kThreads = kWarps * kWarpSize;

// The sums of some rows and heads, in a fixed order; see AttentionTotals.
struct AttentionSums {
  double sum_squares, squares, delta_squares, score_squares;
  float largest_score;
  uint32_t not_finite;

  __device__ void add(const AttentionSums& other) {
    sum_squares += other.sum_squares;
    squares += other.squares;
    delta_squares += other.delta_squares;
    score_squares += other.score_squares;
    largest_score = fmaxf(largest_score, other.largest_score);
    not_finite += other.not_finite;
  }
  __device__ void add_row(float sum, float magnitude, float squares_of_delta, float score, float largest) {
    if (!isfinite(sum) || !isfinite(magnitude) || !isfinite(score)) {
      ++not_finite;
      return;
    }
    sum_squares = fma(static_cast<double>(sum), static_cast<double>(sum), sum_squares);
    squares = fma(static_cast<double>(magnitude), static_cast<double>(magnitude), squares);
    delta_squares += squares_of_delta;
    score_squares = fma(static_cast<double>(score), static_cast<double>(score), score_squares);
    largest_score = fmaxf(largest_score, largest);
  }
};

// Blocks leave these to the kernel that adds them up, in the workspace.
constexpr int64_t kMaxBlocks = kStatisticsBlocks;
static_assert(kMaxBlocks * sizeof(AttentionSums) == kAttentionStatisticsWorkspaceBytes);

template <typename T>
struct Attended {
  const T *qkv, *out, *d_out;
  const float* lse;
  const int32_t* first_key;  // null: 0
  AttentionDims dims;
  float scale;

  // Row i of sequence b and query head h, by a warp; every lane adds the same.
  template <int N>
  __device__ void add_row(int b, int i, int h, AttentionSums& sums) const {
    const int kv_head = h / dims.group();
    const T* const k = qkv + dims.qkv_row(b, 0, dims.H + kv_head);
    const T* const v = qkv + dims.qkv_row(b, 0, dims.H + dims.Hkv + kv_head);
    float q[N], d_o[N], x[N];
    load_row(qkv + dims.qkv_row(b, i, h), dims.D, q);
    load_row(d_out + dims.out_row(b, i, h), dims.D, d_o);
    load_row(out + dims.out_row(b, i, h), dims.D, x);
    const float delta = dot(d_o, x), row_lse = lse[dims.query(b, i, h)];
    float of_delta[N];
#pragma unroll
    for (int n = 0; n < N; ++n) of_delta[n] = d_o[n] * x[n];
    const float squares_of_delta = dot(of_delta, of_delta);
    float sum = 0.0f, magnitude = 0.0f, mean_score = 0.0f, largest = 0.0f;
    for (int j = first_key == nullptr ? 0 : first_key[int64_t{b} * dims.S + i]; j < dims.key_end(i); ++j) {
      load_row(k + j * dims.qkv_stride(), dims.D, x);
      const float score = scale * dot(q, x), p = expf(score - row_lse);
      load_row(v + j * dims.qkv_stride(), dims.D, x);
      const float d_s = p * (dot(d_o, x) - delta);
      sum += d_s;
      magnitude += fabsf(d_s);
      mean_score = fmaf(p, score, mean_score);
      largest = fmaxf(largest, fabsf(score));
    }
    sums.add_row(sum, magnitude, squares_of_delta, mean_score, largest);
  }
};

// A warp for each row of a head; the warps of all blocks take turns.
template <int N, typename T>
__global__ void __launch_bounds__(kThreads) partial_kernel(const Attended<T> a, int rows, AttentionSums* partial) {
  AttentionSums sums = {};
  const int64_t items = int64_t{rows} * a.dims.H, step = int64_t{gridDim.x} * kWarps;
  for (int64_t item = int64_t{blockIdx.x} * kWarps + threadIdx.y; item < items; item += step) {
    const int row = static_cast<int>(item / a.dims.H), head = static_cast<int>(item % a.dims.H);
    a.template add_row<N>(row / a.dims.S, row % a.dims.S, head, sums);
  }
  __shared__ AttentionSums of_warp[kWarps];
  if (threadIdx.x == 0) of_warp[threadIdx.y] = sums;
  __syncthreads();
  if (threadIdx.x != 0 || threadIdx.y != 0) return;
  for (int warp = 1; warp < kWarps; ++warp) sums.add(of_warp[warp]);
  partial[blockIdx.x] = sums;
}

// One thread.
__global__ void total_kernel(const AttentionSums* partial, int num_partial, float rows, float* out) {
  AttentionSums sums = {};
  for (int i = 0; i < num_partial; ++i) sums.add(partial[i]);
  *reinterpret_cast<AttentionTotals*>(out) = {
      .rows = rows - static_cast<float>(sums.not_finite),
      .not_finite = static_cast<float>(sums.not_finite),
      .sum_norm = static_cast<float>(sqrt(sums.sum_squares)),
      .norm = static_cast<float>(sqrt(sums.squares)),
      .delta_norm = static_cast<float>(sqrt(sums.delta_squares)),
      .score_norm = static_cast<float>(sqrt(sums.score_squares)),
      .largest_score = sums.largest_score,
  };
}

}  // namespace

void attention_statistics(Device& any_device, const AttentionStatistics& a) {
  CudaDevice& device = as_cuda(any_device);
  const AttentionDims dims(a);
  auto* const partial = static_cast<AttentionSums*>(device.workspace("attention_statistics", workspace_of(a)));
  const int64_t items = a.rows * a.num_heads;
  PARKA_REQUIRE(items <= UINT32_MAX);
  const int64_t num_blocks = std::clamp<int64_t>(ceil_div(items, kWarps), 1, kMaxBlocks);
  with_plain_type(a.qkv.dtype, [&](auto type) {
    using T = decltype(type);
    const Attended<T> attended{.qkv = a.qkv.as<T>(),
                               .out = a.out.as<T>(),
                               .d_out = a.d_out.as<T>(),
                               .lse = a.lse.as<float>(),
                               .first_key = first_keys(a),
                               .dims = dims,
                               .scale = a.scale};
    with_row_size(dims.D, [&](auto n) {
      launch(device, "attention_statistics", partial_kernel<n(), T>, {num_blocks, dim3(kWarpSize, kWarps)},
             attended, static_cast<int>(a.rows), partial);
    });
  });
  launch(device, "attention_statistics", total_kernel, {1, 1}, partial, static_cast<int>(num_blocks),
         static_cast<float>(items), a.totals.as<float>());
}

}  // namespace parka::cuda
