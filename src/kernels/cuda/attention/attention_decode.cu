#include "kernels/ops/attention/attention.h"

#include <cfloat>

#include "kernels/cuda/attention/attention_rows.cuh"
#include "kernels/cuda/quantize/matrix_source.cuh"
#include "kernels/cuda/quantize/quantize_tiles.cuh"
#include "kernels/op/workspace.h"

// Split-KV decoding: a few new rows attend to thousands of keys each. The keys of a row and head, or of its window,
// are divided into pieces of kDecodePieceKeys, one for each warp. A second kernel combines the pieces in order. A
// lane has N elements of a row (attention_rows.cuh).
namespace parka::cuda {
namespace {

constexpr int kWarps = 8, kThreads = kWarps * kWarpSize;  // of every block here
constexpr int kPieceKeys = static_cast<int>(kDecodePieceKeys);

// T rows against a cache of sequences of L tokens; H query heads and Hkv key/value heads of width D.
struct DecodeDims {
  int T, L, H, Hkv, D, window, pieces;

  explicit DecodeDims(const AttentionDecode& a)
      : T(static_cast<int>(a.qkv.dim[0])),
        L(static_cast<int>(a.cache.dim[1])),
        H(static_cast<int>(a.num_heads)),
        Hkv(static_cast<int>(a.num_kv_heads)),
        D(static_cast<int>(a.qkv.dim[1] / (a.num_heads + 2 * a.num_kv_heads))),
        window(static_cast<int>(a.window > 0 ? most_keys(a) : 0)),
        pieces(static_cast<int>(attention_decode_pieces(most_keys(a)))) {}

  // The first key of a row that has `keys` up to its own.
  __device__ int first_key(int keys) const { return window > 0 ? max(keys - window, 0) : 0; }

  __device__ int64_t query(int t, int head) const { return (int64_t{t} * (H + 2 * Hkv) + head) * D; }
  __device__ int64_t kv_stride() const { return int64_t{2} * Hkv * D; }
  // First element of a token's key head; its value head g is head Hkv + g.
  __device__ int64_t cached(int slot, int position, int head) const {
    return (int64_t{slot} * L + position) * kv_stride() + int64_t{head} * D;
  }
  // The place of a piece in the workspace: D values, then the maximum and the sum.
  __device__ int64_t partial(int64_t row_and_head, int piece) const {
    return (row_and_head * pieces + piece) * (D + 2);
  }
};

template <typename T>
__global__ void __launch_bounds__(kThreads)
    append_kernel(const T* qkv, T* cache, const int* slot, const int* position, int width, int kv_width, int L) {
  const int t = static_cast<int>(blockIdx.x);
  const T* from = qkv + int64_t{t} * width + (width - kv_width);
  T* to = cache + (int64_t{slot[t]} * L + position[t]) * kv_width;
  for (int i = static_cast<int>(threadIdx.x); i < kv_width; i += kThreads) to[i] = from[i];
}

template <int N, typename T>
__global__ void __launch_bounds__(kThreads)
    piece_kernel(const T* qkv, const T* cache, const int* slots, const int* positions, float* partials,
                 DecodeDims dims, float scale) {
  const int64_t row_and_head = int64_t{blockIdx.x} * kWarps + threadIdx.y;
  if (row_and_head >= int64_t{dims.T} * dims.H) return;  // a whole warp
  const int t = static_cast<int>(row_and_head / dims.H), head = static_cast<int>(row_and_head % dims.H);
  const int piece = static_cast<int>(blockIdx.y), keys = positions[t] + 1;
  const int first = dims.first_key(keys) + piece * kPieceKeys;
  if (first >= keys) return;
  const int count = min(kPieceKeys, keys - first), kv_head = head / (dims.H / dims.Hkv);
  const T* k = cache + dims.cached(slots[t], first, kv_head);
  const T* v = cache + dims.cached(slots[t], first, dims.Hkv + kv_head);
  float q[N];
  load_row(qkv + dims.query(t, head), dims.D, q);
  RowSoftmax<N> row;
  row.see(q, k, v, dims.kv_stride(), count, dims.D, scale);
  float* partial = partials + dims.partial(row_and_head, piece);
  store_row(partial, dims.D, row.acc);
  if (threadIdx.x == 0) {
    partial[dims.D] = row.max;
    partial[dims.D + 1] = row.sum;
  }
}

// A warp for each row and head.
template <int N, typename T>
__global__ void __launch_bounds__(kThreads)
    combine_kernel(const float* partials, const int* positions, T* out, DecodeDims dims) {
  const int64_t row_and_head = int64_t{blockIdx.x} * kWarps + threadIdx.y;
  if (row_and_head >= int64_t{dims.T} * dims.H) return;
  const int keys = positions[row_and_head / dims.H] + 1, count = keys - dims.first_key(keys);
  float acc[N] = {}, max = -FLT_MAX, sum = 0.0f;
  for (int piece = 0; piece * kPieceKeys < count; ++piece) {
    const float* partial = partials + dims.partial(row_and_head, piece);
    const float piece_max = partial[dims.D], new_max = fmaxf(max, piece_max);
    const float correction = expf(max - new_max), weight = expf(piece_max - new_max);
    float x[N];
    load_row(partial, dims.D, x);
    scale_by(acc, correction);
    add_scaled(acc, weight, x);
    sum = fmaf(sum, correction, weight * partial[dims.D + 1]);
    max = new_max;
  }
#pragma unroll
  for (int n = 0; n < N; ++n) acc[n] /= sum;
  store_row(out + row_and_head * dims.D, dims.D, acc);
}

}  // namespace

void cache_append(Device& device, const CacheAppend& a) {
  with_plain_type(a.qkv.dtype, [&](auto type) {
    using T = decltype(type);
    launch(as_cuda(device), "cache_append", append_kernel<T>, {a.qkv.dim[0], kThreads}, a.qkv.as<T>(),
           a.cache.as<T>(), a.slot.as<int32_t>(), a.position.as<int32_t>(), static_cast<int>(a.qkv.dim[1]),
           static_cast<int>(a.cache.dim[2]), static_cast<int>(a.cache.dim[1]));
  });
}

void attention_decode(Device& device, const AttentionDecode& a) {
  CudaDevice& cuda = as_cuda(device);
  const DecodeDims dims(a);
  check_head_dim(dims.D);
  auto* const partials = static_cast<float*>(cuda.workspace("attention_decode", workspace_of(a)));
  const auto blocks = static_cast<unsigned>(ceil_div(int64_t{dims.T} * dims.H, kWarps));
  const dim3 threads(kWarpSize, kWarps);
  with_plain_type(a.qkv.dtype, [&](auto type) {
    using T = decltype(type);
    with_row_size(dims.D, [&](auto n) {
      const auto* const position = a.position.as<int32_t>();
      launch(cuda, "attention_decode", piece_kernel<n(), T>,
             {dim3(blocks, static_cast<unsigned>(dims.pieces)), threads}, a.qkv.as<T>(), a.cache.as<T>(),
             a.slot.as<int32_t>(), position, partials, dims, a.scale);
      launch(cuda, "attention_decode", combine_kernel<n(), T>, {blocks, threads}, partials, position, a.out.as<T>(),
             dims);
    });
  });
  if (!a.out_amax.empty()) find_out_amax(cuda, "attention_decode", a.out, a.out_amax);
}

}  // namespace parka::cuda
