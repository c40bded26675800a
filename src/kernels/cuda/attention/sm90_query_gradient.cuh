#pragma once
#include <cstdint>

#include "kernels/cuda/attention/sm90_score_gradients.cuh"

// The parts of the kernels that sum up d_q of tiles of queries over all keys: one computes score gradients, the
// other reads those that were kept. A warp has 16 queries: d_q is [1][D / 8][4], scores have a column for each key.
namespace parka::cuda::sm90 {

// The kernel of d_q has its block's queries and d_out, results on their way out, and places for keys and values.
template <int D>
struct QueryLayout {
  static constexpr int kKeys = 128, kStages = 2;
  static constexpr int kTileBytes = kTileRows * kRowBytes<D>, kBlockBytes = kTileRows * kBlockRowBytes;
  static constexpr int kDOutAt = kTileBytes, kOutAt = 2 * kTileBytes, kKeysAt = 3 * kTileBytes;
  static constexpr int kValuesAt = kKeysAt + kStages * kTileBytes;
  static constexpr int kBarriersAt = kValuesAt + kStages * kTileBytes;
  static constexpr int kTileNumberAt = kBarriersAt + 16 + kStages * 16;
  static constexpr int kBytes = kTileNumberAt + 16;
};

// The kernel of d_q from score gradients has results on their way out, and keys and two pairs of score gradients.
template <int D>
struct ScoreLayout {
  static constexpr int kKeys = kTileRows, kStages = 3;
  static constexpr int kPairBytes = static_cast<int>(kScorePairBytes);
  static constexpr int kTileBytes = kTileRows * kRowBytes<D>, kTileBlockBytes = kTileRows * kBlockRowBytes;
  static constexpr int kOutAt = 0, kKeysAt = kTileBytes, kPairsAt = kKeysAt + kStages * kTileBytes;
  static constexpr int kBarriersAt = kPairsAt + kStages * kConsumers * kPairBytes;
  static constexpr int kTileNumberAt = kBarriersAt + 16 + kStages * 16;
  static constexpr int kBytes = kTileNumberAt + 16;
};

#if PARKA_SM90_CODE

template <int D, bool kFirstKeys>
__device__ __forceinline__ void copy_query_tiles(const CUtensorMap& qkv_map, const CUtensorMap& d_out_map,
                                                 const int32_t* first_key, unsigned char* shared,
                                                 const AttentionDims& dims, const TileOrder& order,
                                                 unsigned* num_taken, const Barriers<QueryLayout<D>>& barriers) {
  using Layout = QueryLayout<D>;
  const uint32_t base = shared_address(shared);
  unsigned slot = 0;
  take_tiles<true, 1>(order, num_taken, barriers.own, shared + Layout::kTileNumberAt, [&](Tile tile) {
    const int k_column = (dims.H + tile.head / dims.group()) * D, v_column = k_column + dims.Hkv * D;
    mbarrier_expect_tx(barriers.own.full, 2 * Layout::kTileBytes);
    copy_tile_async<D, kTileRows>(base, qkv_map, tile.head * D, tile.begin, tile.b, barriers.own.full);
    copy_tile_async<D, kTileRows>(base + Layout::kDOutAt, d_out_map, tile.head * D, tile.begin, tile.b,
                                  barriers.own.full);
    const int last_begin = FirstKeys<kFirstKeys>(first_key, dims, tile.b).first_tile(tile.begin);
    for (int key_begin = tile.begin; key_begin >= last_begin; key_begin -= Layout::kKeys, ++slot) {
      const uint32_t place = slot % Layout::kStages * Layout::kTileBytes, full = barriers.passing.full_at(slot);
      barriers.passing.wait_empty(slot);
      mbarrier_expect_tx(full, 2 * Layout::kTileBytes);
      copy_tile_async<D, kTileRows>(base + Layout::kKeysAt + place, qkv_map, k_column, key_begin, tile.b, full);
      copy_tile_async<D, kTileRows>(base + Layout::kValuesAt + place, qkv_map, v_column, key_begin, tile.b, full);
    }
  });
}

// Puts p in place of scores, of queries (rows) and keys.
template <int kN>
__device__ __forceinline__ void probabilities_by_query(float (&scores)[1][kN][4],
                                                       const RowStatistics (&statistics)[2], float scale_log2) {
#pragma unroll
  for (int n = 0; n < kN; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      scores[0][n][e] = exp2_approximate(fmaf(scores[0][n][e], scale_log2, -statistics[e / 2].lse_log2));
    }
  }
}

// d_s = p * (d_p - delta) in place of d_p.
template <int kN>
__device__ __forceinline__ void score_gradient_by_query(const float (&p)[1][kN][4], float (&d_p)[1][kN][4],
                                                        const RowStatistics (&statistics)[2]) {
#pragma unroll
  for (int n = 0; n < kN; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) d_p[0][n][e] = p[0][n][e] * (d_p[0][n][e] - statistics[e / 2].delta);
  }
}

// A warp's queries, of a head from `begin` on, have their d_q stored here: returns the maximum of `amax` and it.
template <int D>
__device__ __forceinline__ float store_query_gradient(float (&d_q)[1][D / 8][4],
                                                      const GradientOutput<BFloat16>& output, unsigned char* out,
                                                      const AttentionDims& dims, const Tile& tile, int begin,
                                                      float scale, float amax) {
  scale_by(d_q, scale);
  if (output.cos_sin != nullptr) rotate_back<D>(d_q, output.cos_sin, begin, dims.S);
  if (output.amax != nullptr) amax = max_of_rows(amax, d_q, dims.S - begin);
  store_rows<D>(d_q, out, output.d_qkv + dims.qkv_row(tile.b, begin, tile.head), dims.qkv_stride(), dims.S - begin);
  return amax;
}

// Adds a tile of keys to d_q of a consumer's 64 queries. `mask_earlier` hides keys before each query's first.
template <int D, typename MaskEarlier>
__device__ __forceinline__ void add_keys(float (&d_q)[1][D / 8][4], SharedTile queries, SharedTile d_out,
                                         SharedTile keys, SharedTile values, const RowStatistics (&statistics)[2],
                                         bool masked, const MaskEarlier& mask_earlier, float scale_log2,
                                         const PingPongBarrier<>& ping_pong) {
  constexpr int kKeys = QueryLayout<D>::kKeys;
  float p[1][kKeys / 8][4], d_s[1][kKeys / 8][4];
  uint32_t packed[1][kKeys / 16][4];
  ping_pong.wait();
  wgmma_fence();
  start_product_transposed<D>(p, queries, keys);
  wgmma_commit_group();
  start_product_transposed<D>(d_s, d_out, values);
  wgmma_commit_group();
  ping_pong.pass();
  wgmma_wait_group<1>();
  fence_operand(p);
  if (masked) mask_later_keys<false>(p, warp_row());
  mask_earlier(p);
  probabilities_by_query(p, statistics, scale_log2);
  wgmma_wait_group<0>();
  fence_operand(d_s);
  score_gradient_by_query(p, d_s, statistics);
  pack_rows(d_s, packed);
  wgmma_fence();
  start_product(d_q, packed, keys);
  wgmma_commit_group();
  wgmma_wait_group<0>();  // running on into the next step it would take too many registers
  fence_operand(d_q);
}

template <int D, bool kFirstKeys>
__device__ __forceinline__ void sum_over_keys(const GradientOutput<BFloat16>& output, const int32_t* first_key,
                                              const RowStatistics* statistics, unsigned char* shared,
                                              const AttentionDims& dims, const TileOrder& order,
                                              const Barriers<QueryLayout<D>>& barriers, float scale) {
  using Layout = QueryLayout<D>;
  const int consumer = consumer_index();
  const uint32_t base = shared_address(shared);
  const SharedTile queries = SharedTile{base, Layout::kBlockBytes}.rows(consumer * kConsumerRows);
  const SharedTile d_out{queries.address + Layout::kDOutAt, queries.block_bytes};
  const PingPongBarrier<> ping_pong(consumer);
  float amax = 0.0f;  // of this thread's rows of all its tiles
  unsigned slot = 0;
  for_each_taken_tile<true>(order, barriers.own, shared + Layout::kTileNumberAt, [&](Tile tile) {
    const int begin = tile.begin + warp_row();
    RowStatistics rows[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = begin + half * 8 + static_cast<int>(threadIdx.x) % kWarpSize / 4;
      rows[half] = row < dims.S ? statistics[dims.query(tile.b, row, tile.head)] : RowStatistics{0.0f, 0.0f};
    }
    float d_q[1][D / 8][4];
    clear(d_q);
    const FirstKeys<kFirstKeys> first_keys(first_key, dims, tile.b);
    const int last_begin = first_keys.first_tile(tile.begin);
    for (int key_begin = tile.begin; key_begin >= last_begin; key_begin -= Layout::kKeys, ++slot) {
      const SharedTile keys{base + Layout::kKeysAt + slot % Layout::kStages * Layout::kTileBytes,
                            Layout::kBlockBytes};
      const SharedTile values{keys.address + Layout::kValuesAt - Layout::kKeysAt, keys.block_bytes};
      barriers.passing.wait_full(slot);
      const auto mask_earlier = [&](float(&p)[1][Layout::kKeys / 8][4]) {
        first_keys.template mask<false>(p, begin, kWarpRows, key_begin);
      };
      add_keys<D>(d_q, queries, d_out, keys, values, rows, key_begin == tile.begin, mask_earlier, scale * kLog2E,
                  ping_pong);
      barriers.passing.release(slot);
    }
    barriers.own.release(0);
    amax = store_query_gradient<D>(d_q, output, shared + Layout::kOutAt + warp_row() * kRowBytes<D>, dims, tile,
                                   begin, scale, amax);
  });
  ping_pong.end();
  if (output.amax != nullptr) raise_to_warp_max(output.amax, amax);
}

// ---- From score gradients ----

template <int D>
__device__ __forceinline__ void copy_score_tiles(const CUtensorMap& qkv_map, const ScoreGradients& scores,
                                                 unsigned char* shared, const AttentionDims& dims,
                                                 const TileOrder& order, unsigned* num_taken,
                                                 const Barriers<ScoreLayout<D>>& barriers) {
  using Layout = ScoreLayout<D>;
  const uint32_t base = shared_address(shared);
  const int group = dims.group();  // a division, once and not for each tile
  unsigned slot = 0;
  take_tiles<true, 1>(order, num_taken, barriers.own, shared + Layout::kTileNumberAt, [&](Tile tile) {
    mbarrier_arrive(barriers.own.full);
    const int k_column = (dims.H + tile.head / group) * D, head = tile.b * dims.H + tile.head;
    const int query_tile = tile.begin / kConsumerRows, consumers = tile.begin + kConsumerRows < dims.S ? 2 : 1;
    for (int key_begin = tile.begin; key_begin >= 0; key_begin -= Layout::kKeys, ++slot) {
      const uint32_t place = slot % Layout::kStages, full = barriers.passing.full_at(slot);
      barriers.passing.wait_empty(slot);
      mbarrier_expect_tx(full, Layout::kTileBytes + consumers * Layout::kPairBytes);
      copy_tile_async<D, kTileRows>(base + Layout::kKeysAt + place * Layout::kTileBytes, qkv_map, k_column,
                                    key_begin, tile.b, full);
      for (int consumer = 0; consumer < consumers; ++consumer) {
        copy_bytes_async(base + Layout::kPairsAt + (place * kConsumers + consumer) * Layout::kPairBytes,
                         scores.pair(head, query_tile + consumer, key_begin / Layout::kKeys), Layout::kPairBytes,
                         full);
      }
    }
  });
}

template <int D>
__device__ __forceinline__ void sum_scores_over_keys(const GradientOutput<BFloat16>& output, unsigned char* shared,
                                                     const AttentionDims& dims, const TileOrder& order,
                                                     const Barriers<ScoreLayout<D>>& barriers, float scale) {
  using Layout = ScoreLayout<D>;
  const int consumer = consumer_index();
  const uint32_t base = shared_address(shared);
  float amax = 0.0f;  // of this thread's rows of all its tiles
  unsigned slot = 0;
  for_each_taken_tile<true>(order, barriers.own, shared + Layout::kTileNumberAt, [&](Tile tile) {
    barriers.own.release(0);
    const bool has_queries = tile.begin + consumer * kConsumerRows < dims.S;
    float d_q[1][D / 8][4];
    clear(d_q);
    for (int key_begin = tile.begin; key_begin >= 0; key_begin -= Layout::kKeys, ++slot) {
      const uint32_t place = slot % Layout::kStages;
      const SharedTile keys{base + Layout::kKeysAt + place * Layout::kTileBytes, Layout::kTileBlockBytes};
      const unsigned char* pair = shared + Layout::kPairsAt + (place * kConsumers + consumer) * Layout::kPairBytes +
                                  warp_row() % kConsumerRows / kWarpRows * ScoreGradients::kFragmentBytes;
      barriers.passing.wait_full(slot);
      if (has_queries) {
        uint32_t d_s[1][Layout::kKeys / 16][4];
#pragma unroll
        for (int k = 0; k < Layout::kKeys / 16; ++k) {
          load_score_gradients(d_s[0][k], pair + k * ScoreGradients::kWarpBytes);
        }
        wgmma_fence();
        // The second block of keys comes after all queries of the first consumer, and nobody has written it.
        if (key_begin == tile.begin && consumer == 0) {
          start_product_of_first<Layout::kKeys / 32>(d_q, d_s, keys);
        } else {
          start_product(d_q, d_s, keys);
        }
        wgmma_commit_group();
        wgmma_wait_group<0>();
        fence_operand(d_q);
      }
      barriers.passing.release(slot);
    }
    amax = store_query_gradient<D>(d_q, output, shared + Layout::kOutAt + warp_row() * kRowBytes<D>, dims, tile,
                                   tile.begin + warp_row(), scale, amax);
  });
  if (output.amax != nullptr) raise_to_warp_max(output.amax, amax);
}

#endif  // PARKA_SM90_CODE

}  // namespace parka::cuda::sm90
