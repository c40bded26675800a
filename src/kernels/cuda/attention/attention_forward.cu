#include "kernels/cuda/attention/attention_paths.cuh"
#include "kernels/cuda/attention/attention_tiles.cuh"

// FlashAttention-2: a block keeps a tile of queries and its output, and passes once over the keys. A warp has rows
// of both, a lane scores[m][n][4] of them. Letters and fragments: attention_tiles.cuh.
namespace parka::cuda {
namespace {

// 32 queries per warp, so that each fragment of keys and values that is read from shared memory serves two
// products. With wide heads the output of 16 queries takes 128 registers already. Those queries stay in registers,
// too, 64 of them, after they have passed through two of the buffers for keys and values.
// Shared memory: 80 KB for heads of 128 and 48 KB for those of 256. Registers leave a multiprocessor two blocks,
// which fit compute capability 8.0 (164 KB) and 9.0 (228 KB), and with heads of 256 also 8.9 (100 KB).
template <int D>
struct ForwardTiling {
  static constexpr bool kKeepsQueries = D > 128;  // in registers
  static constexpr int kThreads = 128, kM = kKeepsQueries ? 1 : 2;
  static constexpr int kWarpQueries = 16 * kM;
  static constexpr int kQueries = kWarpQueries * (kThreads / kWarpSize);
  static constexpr int kKeys = 8192 / kTileWidth<D>;  // scores, output and kept queries take 192 or 208 registers
  static constexpr int kQueryBytes = kQueries * kRowBytes<D>, kTileBytes = kKeys * kRowBytes<D>;
  static constexpr int kQueriesAt = kKeepsQueries ? kTileBytes : 0;
  static constexpr int kTilesAt = kKeepsQueries ? 0 : kQueryBytes;
  static constexpr int kSharedBytes = kTilesAt + 3 * kTileBytes;
  static_assert(kQueriesAt + kQueryBytes <= kSharedBytes && kSharedBytes <= kMostSharedBytes);
};

// Each of a lane's rows has its largest score so far and this lane's sum of exp2(scale_log2 * (score - max)).
template <int kM>
struct RowState {
  float max[kM][2], sum[kM][2];
};

// Replaces scores by exp2(scale_log2 * (score - max)) for the running maximum, and rescales what was summed with
// the previous one. Without documents every row has seen a finite score, because it attends to key 0. With
// them a row's first key may be in a later tile; until then its maximum is kNoScore.
constexpr float kNoScore = -1e30f;  // finite: the difference of two is 0
template <int kM, int kN, int kOutN>
__device__ void online_softmax(float (&scores)[kM][kN][4], RowState<kM>& state, float (&out)[kM][kOutN][4],
                               float scale_log2) {
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float max = state.max[m][half];
#pragma unroll
      for (int n = 0; n < kN; ++n) max = fmaxf(max, fmaxf(scores[m][n][2 * half], scores[m][n][2 * half + 1]));
      max = fmaxf(max, __shfl_xor_sync(kFullWarp, max, 1));
      max = fmaxf(max, __shfl_xor_sync(kFullWarp, max, 2));
      const float correction = exp2_approximate((state.max[m][half] - max) * scale_log2), offset = max * scale_log2;
      float sum = state.sum[m][half] * correction;
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int e = 2 * half; e < 2 * half + 2; ++e) {
          scores[m][n][e] = exp2_approximate(fmaf(scores[m][n][e], scale_log2, -offset));
          sum += scores[m][n][e];
        }
      }
#pragma unroll
      for (int n = 0; n < kOutN; ++n) {
        out[m][n][2 * half] *= correction;
        out[m][n][2 * half + 1] *= correction;
      }
      state.max[m][half] = max;
      state.sum[m][half] = sum;
    }
  }
}

// Divides the rows by their sums and stores the logs of those, of which the first `count` exist.
template <int kM, int kOutN>
__device__ void finish_rows(const RowState<kM>& state, float (&out)[kM][kOutN][4], float scale_log2, float* lse,
                            int count) {
  const int lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = state.sum[m][half];
      sum += __shfl_xor_sync(kFullWarp, sum, 1);
      sum += __shfl_xor_sync(kFullWarp, sum, 2);
      const float inverse = 1.0f / sum;
#pragma unroll
      for (int n = 0; n < kOutN; ++n) {
        out[m][n][2 * half] *= inverse;
        out[m][n][2 * half + 1] *= inverse;
      }
      const int row = m * 16 + half * 8 + lane / 4;
      if (lane % 4 == 0 && row < count) lse[row] = (state.max[m][half] * scale_log2 + log2f(sum)) * kLn2;
    }
  }
}

// Tiles of keys and of values share three buffers in shared memory: while one is in use, the next of each kind is
// being loaded. With documents there is a first_key, and tiles before that of the block's first query are skipped.
template <int D, Mask kMask>
__global__ void __launch_bounds__(ForwardTiling<D>::kThreads, 2)
    attention_forward_kernel(const BFloat16* qkv, const int32_t* first_key, BFloat16* out, float* lse,
                             AttentionDims dims, int section_heads, float scale_log2) {
  using Tiling = ForwardTiling<D>;
  constexpr int kM = Tiling::kM, kKeys = Tiling::kKeys, kThreads = Tiling::kThreads;
  constexpr bool kDocuments = kMask == Mask::kDocuments, kSeesAll = kMask == Mask::kNone;
  extern __shared__ __align__(1024) unsigned char shared[];

  const auto find = [&] {
    return find_work<Tiling::kQueries, Tiling::kWarpQueries, true>(dims, dims.H, section_heads);
  };
  const auto [b, h, warp_begin, warp_row] = find();
  const int query_begin = warp_begin - warp_row, width = head_width<D>(dims);
  const int key_end = kSeesAll ? dims.S : min(query_begin + Tiling::kQueries, dims.S);
  const BFloat16* k = qkv + dims.qkv_row(b, 0, dims.H + h / dims.group());
  const BFloat16* v = k + dims.Hkv * width;
  const int64_t stride = dims.qkv_stride();
  const int32_t* const first = kDocuments ? first_key + int64_t{b} * dims.S : nullptr;
  const int key_start = kDocuments ? first[query_begin] / kKeys * kKeys : 0;

  const uint32_t q_tile = shared_address(shared) + Tiling::kQueriesAt;
  const auto tile_at = [&](unsigned place) {
    return shared_address(shared) + Tiling::kTilesAt + place % 3 * Tiling::kTileBytes;
  };
  load_tile_async<D, Tiling::kQueries, kThreads>(q_tile, qkv + dims.qkv_row(b, 0, h), stride, query_begin, dims.S,
                                                 width);
  load_tile_async<D, kKeys, kThreads>(tile_at(0), k, stride, key_start, dims.S, width);
  cp_async_commit();
  const uint32_t q_rows = q_tile + warp_row * kRowBytes<D> + lane_offset<D>();
  [[maybe_unused]] uint32_t q[kM][D / 16][4];
  if constexpr (Tiling::kKeepsQueries) {
    cp_async_wait<0>();
    __syncthreads();
    load_rows<D>(q, q_rows);
    __syncthreads();  // all warps have their queries: their place is free for values and keys
  }
  load_tile_async<D, kKeys, kThreads>(tile_at(1), v, stride, key_start, dims.S, width);
  cp_async_commit();

  float acc[kM][D / 8][4];
  RowState<kM> state;
  clear(acc);
#pragma unroll
  for (int m = 0; m < kM; ++m) {
    state.max[m][0] = state.max[m][1] = kDocuments ? kNoScore : -INFINITY;
    state.sum[m][0] = state.sum[m][1] = 0.0f;
  }
  unsigned place = 0;
  for (int key_begin = key_start; key_begin < key_end; key_begin += kKeys, place += 2) {
    const int next = key_begin + kKeys;
    const uint32_t k_tile = tile_at(place), v_tile = tile_at(place + 1), free_tile = tile_at(place + 2);
    const bool sees_keys = (kSeesAll ? warp_begin < dims.S : key_begin < warp_begin + Tiling::kWarpQueries) &&
                           (!kDocuments || (warp_begin < dims.S && first[warp_begin] < next));
    uint32_t p[kM][kKeys / 16][4];

    cp_async_wait<1>();  // the keys are here, and the other warps are done with free_tile
    __syncthreads();
    if (next < key_end) load_tile_async<D, kKeys, kThreads>(free_tile, k, stride, next, dims.S, width);
    cp_async_commit();
    if (sees_keys) {
      float scores[kM][kKeys / 8][4];
      clear(scores);
      const Operand keys = {k_tile + lane_offset_transposed<D>(), 0};
      if constexpr (Tiling::kKeepsQueries) {
        multiply_transposed<D>(scores, q, keys);
      } else {
        multiply_transposed<D>(scores, {q_rows, 0}, keys);
      }
      if (!kSeesAll && next > warp_begin + 1) mask_later_keys<false>(scores, warp_begin - key_begin);
      if (kSeesAll && next > dims.S) mask_missing_keys(scores, dims.S - key_begin);
      if (kDocuments && key_begin < first[min(warp_begin + Tiling::kWarpQueries, dims.S) - 1]) {
        mask_earlier_keys<false>(scores, first + warp_begin, dims.S - 1 - warp_begin, key_begin);
      }
      online_softmax(scores, state, acc, scale_log2);
      pack_rows(scores, p);
    }

    cp_async_wait<1>();  // the values are here, and the other warps are done with k_tile
    __syncthreads();
    if (next < key_end) load_tile_async<D, kKeys, kThreads>(k_tile, v, stride, next, dims.S, width);
    cp_async_commit();
    if (sees_keys) multiply<D>(acc, p, {v_tile + lane_offset<D>(), 0});
  }

  const Work work = find();
  const int count = dims.S - work.begin;
  if constexpr (Tiling::kKeepsQueries) __syncthreads();  // the output passes through tiles that others read
  finish_rows(state, acc, scale_log2, lse + dims.query(work.b, work.begin, work.head), count);
  store_rows<D>(acc, shared + work.warp_row * kRowBytes<D>, out + dims.out_row(work.b, work.begin, work.head),
                dims.out_stride(), count, head_width<D>(dims));
}

template <int D, Mask kMask>
void launch_forward(CudaDevice& device, const AttentionForward& a) {
  using Tiling = ForwardTiling<D>;
  const AttentionDims dims(a);
  const int heads = dims.B * dims.H;
  const int64_t blocks = ceil_div(dims.S, Tiling::kQueries) * heads;
  const int64_t bytes_per_head = int64_t{2} * dims.S * kRowBytes<D> / dims.group();  // keys and values
  auto* const kernel = attention_forward_kernel<D, kMask>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Tiling::kSharedBytes),
        "attention_forward");
  launch(device, "attention_forward", kernel, {blocks, Tiling::kThreads, Tiling::kSharedBytes},
         a.qkv.as<BFloat16>(), first_keys(a), a.out.as<BFloat16>(), a.lse.as<float>(), dims,
         heads_per_section(heads, bytes_per_head), a.scale * kLog2E);
}

}  // namespace

void attention_forward_mma(CudaDevice& device, const AttentionForward& a) {
  with_mma_form(a, [&](auto D, auto mask) { launch_forward<D(), mask()>(device, a); });
}

}  // namespace parka::cuda
