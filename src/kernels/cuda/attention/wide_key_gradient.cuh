#pragma once
#include <cstdint>

#include "kernels/cuda/attention/attention_tiles.cuh"

// d_k and d_v of wide heads, on tensor cores. Of 16 keys both together would take a warp 256 registers, so two
// warps share them. The first has the keys: it computes p = exp(scores) and sums up d_v. The second has the values:
// it computes d_p, takes p from the first through shared memory, and sums up d_k from d_s = p * (d_p - delta). Each
// computes two of the four products.
namespace parka::cuda {

// Warp w and warp w + kPairs share 16 keys; both are on the same quarter of a multiprocessor. Their keys or values
// stay in registers, after they have passed through the stages, where results pass, too. 128 registers hold sums,
// 64 the keys or values, 16 a tile of scores or d_p. Shared memory: 73 KB, which fits a multiprocessor of any
// compute capability from 8.0 on; 8.9 has the least, 100 KB.
template <int D>
struct WideKeyTiling {
  static constexpr int kPairs = 4, kThreads = 2 * kPairs * kWarpSize;
  static constexpr int kWarpKeys = 16, kKeys = kPairs * kWarpKeys;
  static constexpr int kQueries = 8192 / D;  // at a time, double-buffered
  static constexpr int kKeyBytes = kKeys * kRowBytes<D>, kQueryBytes = kQueries * kRowBytes<D>;
  static constexpr int kStageBytes = 2 * kQueryBytes;  // queries and d_out
  static constexpr int kProbabilitiesAt = 2 * kStageBytes;
  static constexpr int kPairProbabilityBytes = kWarpKeys * kQueries * static_cast<int>(sizeof(float));
  static constexpr int kStatisticsAt = kProbabilitiesAt + kPairs * kPairProbabilityBytes;
  static constexpr int kSharedBytes = kStatisticsAt + 2 * kQueries * static_cast<int>(sizeof(RowStatistics));
  static_assert(2 * kKeyBytes <= kProbabilitiesAt && kSharedBytes <= kMostSharedBytes);
};

// A fragment c[0][n] of each lane in shared memory, 16 bytes from that of the next lane.
template <int kN>
__device__ inline void store_fragments(const float (&c)[1][kN][4], float4* place) {
  const int lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    place[n * kWarpSize + lane] = make_float4(c[0][n][0], c[0][n][1], c[0][n][2], c[0][n][3]);
  }
}
template <int kN>
__device__ inline void load_fragments(float (&c)[1][kN][4], const float4* place) {
  const int lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    const float4 fragment = place[n * kWarpSize + lane];
    c[0][n][0] = fragment.x;
    c[0][n][1] = fragment.y;
    c[0][n][2] = fragment.z;
    c[0][n][3] = fragment.w;
  }
}

// What a warp works on: of both warps of a pair the same.
template <typename Tiling>
__device__ inline Work find_pair_work(const AttentionDims& dims, int section_heads) {
  Work work = find_work<Tiling::kKeys, Tiling::kWarpKeys, false>(dims, dims.Hkv, section_heads);
  if (work.warp_row >= Tiling::kKeys) {
    work.warp_row -= Tiling::kKeys;
    work.begin -= Tiling::kKeys;
  }
  return work;
}

// A warp's keys or values, in registers. They pass through the stages, which are free again afterwards.
template <typename Tiling, int D>
__device__ __forceinline__ void load_keys_or_values(uint32_t (&rows)[1][D / 16][4], uint32_t stages,
                                                    const BFloat16* k, const AttentionDims& dims, int key_begin,
                                                    int warp_row, bool has_values) {
  const BFloat16* const v = k + dims.Hkv * D;
  load_tile_async<D, Tiling::kKeys, Tiling::kThreads>(stages, k, dims.qkv_stride(), key_begin, dims.S);
  load_tile_async<D, Tiling::kKeys, Tiling::kThreads>(stages + Tiling::kKeyBytes, v, dims.qkv_stride(), key_begin,
                                                      dims.S);
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();
  load_rows<D>(rows, stages + (has_values ? Tiling::kKeyBytes : 0) + warp_row * kRowBytes<D> + lane_offset<D>());
  __syncthreads();
}

// Of a warp's keys (rows) and the queries from query_begin on: p in place of scores, 0 for keys that a query does
// not see. `first`: the first keys of the sequence's queries.
template <bool kDocuments, int kN>
__device__ __forceinline__ void masked_probabilities_by_key(float (&scores)[1][kN][4], const int32_t* first, int S,
                                                            int query_begin, int key_begin,
                                                            const RowStatistics* statistics, float scale_log2) {
  if (query_begin < key_begin + 16) mask_later_keys<true>(scores, query_begin - key_begin);
  if (kDocuments && key_begin < first[min(query_begin + 8 * kN, S) - 1]) {
    mask_earlier_keys<true>(scores, first + query_begin, S - 1 - query_begin, key_begin);
  }
  probabilities_by_key(scores, statistics, scale_log2);
}

// Finishes a warp's rows of d_v or, if it has values, of d_k, and stores them by way of `stages`.
template <typename Tiling, int D>
__device__ __forceinline__ void store_key_or_value_gradients(float (&sum)[1][D / 8][4], unsigned char* stages,
                                                             const GradientOutput<BFloat16>& output,
                                                             const AttentionDims& dims, const Work& work,
                                                             bool has_values, float scale) {
  const int num_rows = dims.S - work.begin;
  if (has_values) {
    scale_by(sum, scale);
    if (output.cos_sin != nullptr) rotate_back<D>(sum, output.cos_sin, work.begin, dims.S);
  }
  if (output.amax != nullptr) raise_to_warp_max(output.amax, max_of_rows(0.0f, sum, num_rows));
  const int head = dims.H + (has_values ? 0 : dims.Hkv) + work.head;
  store_rows<D>(sum, stages + (has_values ? 0 : Tiling::kKeyBytes) + work.warp_row * kRowBytes<D>,
                output.d_qkv + dims.qkv_row(work.b, work.begin, head), dims.qkv_stride(), num_rows);
}

// kDocuments: there is a first_key, and each head is left after the last query that sees a key of the tile.
template <int D, bool kDocuments>
__global__ void __launch_bounds__(WideKeyTiling<D>::kThreads, 1)
    wide_key_value_gradient_kernel(const BFloat16* qkv, const int32_t* first_key, const BFloat16* d_out,
                                   const RowStatistics* statistics, GradientOutput<BFloat16> output,
                                   AttentionDims dims, int section_heads, float scale) {
  using Tiling = WideKeyTiling<D>;
  constexpr int kThreads = Tiling::kThreads, kQueries = Tiling::kQueries;
  extern __shared__ __align__(1024) unsigned char shared[];

  const auto [b, kv_head, warp_begin, warp_row] = find_pair_work<Tiling>(dims, section_heads);
  const int key_begin = warp_begin - warp_row, pair = warp_row / Tiling::kWarpKeys;
  const bool has_values = threadIdx.x >= kThreads / 2;
  const int32_t* const first = kDocuments ? first_key + int64_t{b} * dims.S : nullptr;
  const BFloat16* k = qkv + dims.qkv_row(b, 0, dims.H + kv_head);

  const uint32_t stages = shared_address(shared);
  auto* const probabilities =
      reinterpret_cast<float4*>(shared + Tiling::kProbabilitiesAt + pair * Tiling::kPairProbabilityBytes);
  auto* const stage_statistics = reinterpret_cast<RowStatistics*>(shared + Tiling::kStatisticsAt);
  const auto load_stage = [&](int stage, int h, int query_begin) {
    const uint32_t tile = stages + stage * Tiling::kStageBytes;
    load_tile_async<D, kQueries, kThreads>(tile, qkv + dims.qkv_row(b, 0, h), dims.qkv_stride(), query_begin,
                                           dims.S);
    load_tile_async<D, kQueries, kThreads>(tile + Tiling::kQueryBytes, d_out + dims.out_row(b, 0, h),
                                           dims.out_stride(), query_begin, dims.S);
    load_statistics_async<kQueries, kThreads>(stage_statistics + stage * kQueries, statistics + dims.query(b, 0, h),
                                              query_begin, dims.S);
    cp_async_commit();
  };
  uint32_t rows[1][D / 16][4];
  load_keys_or_values<Tiling, D>(rows, stages, k, dims, key_begin, warp_row, has_values);

  float sum[1][D / 8][4];  // d_v or d_k
  clear(sum);
  // All queries from key_begin on, a multiple of kQueries, of one head after the other, so in a fixed order.
  int h = kv_head * dims.group(), query_begin = key_begin, stage = 0;
  const int end_head = h + dims.group();
  load_stage(stage, h, query_begin);
  while (h < end_head) {
    const bool last_of_head = query_begin + kQueries >= dims.S ||
                              (kDocuments && first[query_begin + kQueries] >= key_begin + Tiling::kKeys);
    const int next_head = last_of_head ? h + 1 : h, next_begin = last_of_head ? key_begin : query_begin + kQueries;
    cp_async_wait<0>();  // this stage is here, and the other warps are done with the other
    __syncthreads();
    if (next_head < end_head) load_stage(1 - stage, next_head, next_begin);
    const bool sees_queries =
        query_begin + kQueries > warp_begin && (!kDocuments || first[query_begin] < warp_begin + Tiling::kWarpKeys);
    if (sees_queries) {
      const uint32_t q_tile = stages + stage * Tiling::kStageBytes, d_out_tile = q_tile + Tiling::kQueryBytes;
      float c[1][kQueries / 8][4];  // scores, then p; or d_p, then d_s
      clear(c);
      multiply_transposed<D>(c, rows, {(has_values ? d_out_tile : q_tile) + lane_offset_transposed<D>(), 0});
      if (has_values) {
        float p[1][kQueries / 8][4];
        named_barrier_sync(1 + pair, 2 * kWarpSize);  // p is here
        load_fragments(p, probabilities);
        score_gradient_by_key(p, c, stage_statistics + stage * kQueries);
      } else {
        masked_probabilities_by_key<kDocuments>(c, first, dims.S, query_begin, warp_begin,
                                                stage_statistics + stage * kQueries, scale * kLog2E);
        store_fragments(c, probabilities);  // the other warp is done with those of the previous stage
        named_barrier_arrive(1 + pair, 2 * kWarpSize);
      }
      uint32_t packed[1][kQueries / 16][4];
      pack_rows(c, packed);
      multiply<D>(sum, packed, {(has_values ? q_tile : d_out_tile) + lane_offset<D>(), 0});
    }
    h = next_head;
    query_begin = next_begin;
    stage = 1 - stage;
  }

  __syncthreads();  // results pass through the stages, which other warps have read
  store_key_or_value_gradients<Tiling, D>(sum, shared, output, dims, find_pair_work<Tiling>(dims, section_heads),
                                          has_values, scale);
}

}  // namespace parka::cuda
