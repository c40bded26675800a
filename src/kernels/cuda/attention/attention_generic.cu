#include "kernels/cuda/attention/attention_paths.cuh"
#include "kernels/cuda/attention/attention_rows.cuh"
#include "kernels/cuda/attention/rope_pairs.cuh"
#include "kernels/cuda/quantize/fp8.cuh"
#include "kernels/op/workspace.h"

// Attention for any head width and for fp32, with a warp for each row that is written. A lane has N elements of a
// row (attention_rows.cuh). B, S, H, Hkv, D: attention_tiles.cuh.
namespace parka::cuda {
namespace {

constexpr int kWarps = 8, kThreads = kWarps * kWarpSize;  // of every block here

// The first key of row i of sequence b.
__device__ int first_key_of(const int32_t* first_key, const AttentionDims& dims, int b, int i) {
  return first_key == nullptr ? 0 : first_key[int64_t{b} * dims.S + i];
}

// Which row of which head a warp writes; rows of a head are neighbours.
struct Row {
  int b, head, i;
  bool exists;
};

__device__ Row row_of_warp(const AttentionDims& dims, int heads) {
  const int64_t row = int64_t{blockIdx.x} * kWarps + threadIdx.y, head = row / dims.S;
  return {static_cast<int>(head / heads), static_cast<int>(head % heads), static_cast<int>(row % dims.S),
          head < int64_t{dims.B} * heads};
}

template <int N, typename T>
__global__ void __launch_bounds__(kThreads, 1)
    forward_kernel(const T* qkv, const int32_t* first_key, T* out, float* lse, AttentionDims dims, float scale) {
  const Row row = row_of_warp(dims, dims.H);
  if (!row.exists) return;  // a whole warp
  const int kv_head = row.head / dims.group();
  const T* k = qkv + dims.qkv_row(row.b, 0, dims.H + kv_head);
  const T* v = qkv + dims.qkv_row(row.b, 0, dims.H + dims.Hkv + kv_head);
  const int first = first_key_of(first_key, dims, row.b, row.i);
  const int64_t stride = dims.qkv_stride();
  float q[N];
  load_row(qkv + dims.qkv_row(row.b, row.i, row.head), dims.D, q);
  RowSoftmax<N> softmax;
  softmax.see(q, k + first * stride, v + first * stride, stride, dims.key_end(row.i) - first, dims.D, scale);
#pragma unroll
  for (int n = 0; n < N; ++n) softmax.acc[n] /= softmax.sum;
  store_row(out + dims.out_row(row.b, row.i, row.head), dims.D, softmax.acc);
  if (threadIdx.x == 0) lse[dims.query(row.b, row.i, row.head)] = softmax.max + logf(softmax.sum);
}

// Rotates a warp's row back by the angles of its position. The elements of a pair are in different lanes.
template <int N>
__device__ void rotate_back(float (&x)[N], const float* cos_sin_D, int D) {
  __shared__ float shared[kWarps][N * kWarpSize];
  float* const row = shared[threadIdx.y];
#pragma unroll
  for (int n = 0; n < N; ++n) row[n * kWarpSize + threadIdx.x] = x[n];
  __syncwarp();
  const int half = D / 2;
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const int d = n * kWarpSize + static_cast<int>(threadIdx.x), pair = d < half ? d : d - half;
    if (d >= D) continue;
    const float low = row[pair], high = row[pair + half], cos = cos_sin_D[pair], sin = -cos_sin_D[pair + half];
    x[n] = d < half ? rotated_low(low, high, cos, sin) : rotated_high(low, high, cos, sin);
  }
}

// Stores a warp's row of gradients and raises *amax, unless that is null, to the largest of them as T holds it.
template <int N, typename T>
__device__ void store_gradient(T* row, int D, const float (&x)[N], float* amax) {
  store_row(row, D, x);
  if (amax == nullptr) return;
  float largest = 0.0f;  // elements past the end of the row are zero
#pragma unroll
  for (int n = 0; n < N; ++n) largest = max_magnitude(largest, x[n]);
  largest = warp_max(largest);
  if (threadIdx.x == 0) raise_to(amax, to_float(from_float<T>(largest)));  // rounding keeps the order
}

// Writes delta, too, for key_value_gradient_kernel.
template <int N, typename T>
__global__ void __launch_bounds__(kThreads, 1)
    query_gradient_kernel(const T* qkv, const int32_t* first_key, const T* out, const T* d_out, const float* lse,
                          float* delta, GradientOutput<T> output, AttentionDims dims, float scale) {
  const Row row = row_of_warp(dims, dims.H);
  if (!row.exists) return;
  const int kv_head = row.head / dims.group();
  const T* k = qkv + dims.qkv_row(row.b, 0, dims.H + kv_head);
  const T* v = qkv + dims.qkv_row(row.b, 0, dims.H + dims.Hkv + kv_head);
  const int64_t query = dims.query(row.b, row.i, row.head), at = dims.out_row(row.b, row.i, row.head);
  float q[N], d_o[N], x[N], d_q[N] = {};
  load_row(qkv + dims.qkv_row(row.b, row.i, row.head), dims.D, q);
  load_row(d_out + at, dims.D, d_o);
  load_row(out + at, dims.D, x);
  const float row_delta = dot(d_o, x), row_lse = lse[query];
  if (threadIdx.x == 0) delta[query] = row_delta;
  for (int j = first_key_of(first_key, dims, row.b, row.i); j < dims.key_end(row.i); ++j) {
    load_row(v + j * dims.qkv_stride(), dims.D, x);
    const float d_p = dot(d_o, x);
    load_row(k + j * dims.qkv_stride(), dims.D, x);
    const float p = expf(scale * dot(q, x) - row_lse);
    add_scaled(d_q, p * (d_p - row_delta), x);
  }
  scale_by(d_q, scale);
  if (output.cos_sin != nullptr) rotate_back(d_q, output.cos_sin + int64_t{row.i} * dims.D, dims.D);
  store_gradient(output.d_qkv + dims.qkv_row(row.b, row.i, row.head), dims.D, d_q, output.amax);
}

// The query heads of a key/value head in turn, each from the key's own row to its document's end; or all rows.
template <int N, typename T>
__global__ void __launch_bounds__(kThreads, 1)
    key_value_gradient_kernel(const T* qkv, const int32_t* first_key, const T* d_out, const float* lse,
                              const float* delta, GradientOutput<T> output, AttentionDims dims, float scale) {
  const Row row = row_of_warp(dims, dims.Hkv);
  if (!row.exists) return;
  const int64_t k_at = dims.qkv_row(row.b, row.i, dims.H + row.head);
  const int64_t v_at = dims.qkv_row(row.b, row.i, dims.H + dims.Hkv + row.head);
  float k[N], v[N], d_k[N] = {}, d_v[N] = {};
  load_row(qkv + k_at, dims.D, k);
  load_row(qkv + v_at, dims.D, v);
  for (int h = row.head * dims.group(); h < (row.head + 1) * dims.group(); ++h) {
    for (int i = dims.causal ? row.i : 0; i < dims.S && first_key_of(first_key, dims, row.b, i) <= row.i; ++i) {
      const int64_t query = dims.query(row.b, i, h);
      float q[N], d_o[N];
      load_row(qkv + dims.qkv_row(row.b, i, h), dims.D, q);
      load_row(d_out + dims.out_row(row.b, i, h), dims.D, d_o);
      const float p = expf(scale * dot(q, k) - lse[query]);
      add_scaled(d_v, p, d_o);
      add_scaled(d_k, p * (dot(d_o, v) - delta[query]), q);
    }
  }
  scale_by(d_k, scale);
  if (output.cos_sin != nullptr) rotate_back(d_k, output.cos_sin + int64_t{row.i} * dims.D, dims.D);
  store_gradient(output.d_qkv + k_at, dims.D, d_k, output.amax);
  store_gradient(output.d_qkv + v_at, dims.D, d_v, output.amax);
}

int64_t num_blocks(const AttentionDims& dims, int heads) {
  return ceil_div(int64_t{dims.B} * heads * dims.S, kWarps);
}

}  // namespace

void attention_forward_generic(CudaDevice& device, const AttentionForward& a) {
  const AttentionDims dims(a);
  with_plain_type(a.qkv.dtype, [&](auto type) {
    using T = decltype(type);
    with_row_size(dims.D, [&](auto n) {
      launch(device, "attention_forward", forward_kernel<n(), T>,
             {num_blocks(dims, dims.H), dim3(kWarpSize, kWarps)}, a.qkv.as<T>(), first_keys(a), a.out.as<T>(),
             a.lse.as<float>(), dims, a.scale);
    });
  });
}

void attention_backward_generic(CudaDevice& device, const AttentionBackward& a) {
  const AttentionDims dims(a);
  auto* const delta = static_cast<float*>(device.workspace("attention_backward", workspace_of(a)));
  const dim3 threads(kWarpSize, kWarps);
  with_plain_type(a.qkv.dtype, [&](auto type) {
    using T = decltype(type);
    with_row_size(dims.D, [&](auto n) {
      launch(device, "attention_backward", query_gradient_kernel<n(), T>, {num_blocks(dims, dims.H), threads},
             a.qkv.as<T>(), first_keys(a), a.out.as<T>(), a.d_out.as<T>(), a.lse.as<float>(), delta,
             GradientOutput<T>(a), dims, a.scale);
      launch(device, "attention_backward", key_value_gradient_kernel<n(), T>, {num_blocks(dims, dims.Hkv), threads},
             a.qkv.as<T>(), first_keys(a), a.d_out.as<T>(), a.lse.as<float>(), delta, GradientOutput<T>(a), dims,
             a.scale);
    });
  });
}

}  // namespace parka::cuda
