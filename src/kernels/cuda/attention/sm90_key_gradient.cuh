#pragma once
#include <cstdint>

#include "kernels/cuda/attention/sm90_score_gradients.cuh"

// The parts of the kernel that sums up d_k and d_v of tiles of keys over all queries. A warp has 16 keys: d_k and
// d_v are [1][D / 8][4], and scores p and their gradients d_s, a column for each query, [1][kQueries / 8][4].
namespace parka::cuda::sm90 {

// Offsets into shared memory of the kernel of d_k and d_v: the block's keys and values, results on their way out,
// and places for queries, d_out and their statistics.
template <int D>
struct KeyLayout {
  static constexpr int kQueries = D == 64 ? 128 : 64, kStages = 4;
  static constexpr int kTileBytes = kTileRows * kRowBytes<D>, kTileBlockBytes = kTileRows * kBlockRowBytes;
  static constexpr int kQueryBytes = kQueries * kRowBytes<D>, kQueryBlockBytes = kQueries * kBlockRowBytes;
  static constexpr int kValuesAt = kTileBytes, kOutAt = 2 * kTileBytes, kQueriesAt = 3 * kTileBytes;
  static constexpr int kDOutAt = kQueriesAt + kStages * kQueryBytes;
  static constexpr int kStatisticsAt = kDOutAt + kStages * kQueryBytes;
  static constexpr int kStatisticsBytes = kQueries * static_cast<int>(sizeof(RowStatistics));
  static constexpr int kBarriersAt = kStatisticsAt + kStages * kStatisticsBytes;
  static constexpr int kTileNumberAt = kBarriersAt + 16 + kStages * 16;
  static constexpr int kBytes = kTileNumberAt + 16;
};

// True if the consumers take turns at starting products, and statistics are grouped. Narrow heads, and consumers of
// which one skips more tiles than the other, take longer so.
template <int D, bool kFirstKeys>
constexpr bool kTakesTurns = D == 128 && !kFirstKeys;

// True if score gradients may be kept: where a tile of queries is as wide as a block of them.
template <int D>
constexpr bool kKeepsScores = D == 128 && KeyLayout<D>::kQueries == kScoreQueries;

#if PARKA_SM90_CODE

// Statistics of a tile of queries in shared memory: first all log-sum-exps, then all deltas. Where scores are a
// warp's accumulators with columns for queries, a lane has two neighbours of every eight columns; those of two
// times eight lie side by side, so that it loads four with one instruction.
template <int kQueries>
struct GroupedStatistics {
  const float* place;

  // One statistic of this lane's columns.
  struct Columns {
    float4 of_sixteen[kQueries / 16];

    __device__ __forceinline__ explicit Columns(const float* values) {
#pragma unroll
      for (int i = 0; i < kQueries / 16; ++i) {
        of_sixteen[i] = *reinterpret_cast<const float4*>(values + i * 16 + threadIdx.x % 4 * 4);
      }
    }
    // Calls f(n, e, x) for the accumulators [0][n][e] of this lane with the x of their columns.
    template <typename F>
    __device__ __forceinline__ void for_each(const F& f) const {
#pragma unroll
      for (int i = 0; i < kQueries / 16; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          f(2 * i, e, e % 2 == 0 ? of_sixteen[i].x : of_sixteen[i].y);
          f(2 * i + 1, e, e % 2 == 0 ? of_sixteen[i].z : of_sixteen[i].w);
        }
      }
    }
  };

  __device__ explicit GroupedStatistics(const unsigned char* place)
      : place(reinterpret_cast<const float*>(place)) {}
  __device__ Columns lse_log2() const { return Columns(place); }
  __device__ Columns delta() const { return Columns(place + kQueries); }

  // The place of a query's float.
  __device__ static int index(int query) {
    return query / 16 * 16 + query % 8 / 2 * 4 + query % 16 / 8 * 2 + query % 2;
  }
};

// Log-sum-exps and deltas of a tile of queries: grouped ones in registers, others where they lie.
template <int kQueries>
__device__ __forceinline__ auto load_lse(const GroupedStatistics<kQueries>& statistics) {
  return statistics.lse_log2();
}
template <int kQueries>
__device__ __forceinline__ auto load_delta(const GroupedStatistics<kQueries>& statistics) {
  return statistics.delta();
}
__device__ __forceinline__ const RowStatistics* load_lse(const RowStatistics* statistics) { return statistics; }
__device__ __forceinline__ const RowStatistics* load_delta(const RowStatistics* statistics) { return statistics; }

// The functions of this name for statistics of one query after the other, and for grouped ones.
using cuda::probabilities_by_key;
using cuda::score_gradient_by_key;
template <int kN>
__device__ __forceinline__ void probabilities_by_key(float (&scores)[1][kN][4],
                                                     const typename GroupedStatistics<8 * kN>::Columns& lse,
                                                     float scale_log2) {
  lse.for_each([&](int n, int e, float lse_log2) {
    scores[0][n][e] = exp2_approximate(fmaf(scores[0][n][e], scale_log2, -lse_log2));
  });
}
template <int kN>
__device__ __forceinline__ void score_gradient_by_key(const float (&p)[1][kN][4], float (&d_p)[1][kN][4],
                                                      const typename GroupedStatistics<8 * kN>::Columns& deltas) {
  deltas.for_each([&](int n, int e, float delta) { d_p[0][n][e] = p[0][n][e] * (d_p[0][n][e] - delta); });
}

// Both kinds by their place in shared memory.
template <bool kGrouped, int kQueries>
__device__ __forceinline__ auto statistics_at(const unsigned char* place) {
  if constexpr (kGrouped) {
    return GroupedStatistics<kQueries>(place);
  } else {
    return reinterpret_cast<const RowStatistics*>(place);
  }
}

// Starts the copy of the statistics of a tile of queries; those from S on become zeros. By a whole warp.
template <int kQueries, bool kGrouped>
__device__ __forceinline__ void copy_statistics_async(uint32_t target, const RowStatistics* statistics, int begin,
                                                      int S, uint32_t barrier) {
  for (int i = static_cast<int>(threadIdx.x) % kWarpSize; i < kQueries; i += kWarpSize) {
    const RowStatistics* source = statistics + begin + i;
    if constexpr (kGrouped) {
      const uint32_t place = target + GroupedStatistics<kQueries>::index(i) * 4;
      cp_async_4(place, &source->lse_log2, begin + i < S);
      cp_async_4(place + kQueries * 4, &source->delta, begin + i < S);
    } else {
      cp_async_8(target + i * 8, source, begin + i < S);
    }
  }
  mbarrier_arrive_after_cp_async(barrier);
}

// The producer's part, by its first warp.
template <int D, bool kFirstKeys>
__device__ __forceinline__ void copy_key_tiles(const CUtensorMap& qkv_map, const CUtensorMap& qkv_query_map,
                                               const CUtensorMap& d_out_map, const int32_t* first_key,
                                               const RowStatistics* statistics, unsigned char* shared,
                                               const AttentionDims& dims, const TileOrder& order,
                                               unsigned* num_taken, const Barriers<KeyLayout<D>>& barriers) {
  using Layout = KeyLayout<D>;
  const bool first = threadIdx.x == 0;
  const uint32_t base = shared_address(shared);
  unsigned slot = 0;
  take_tiles<false, kWarpSize>(order, num_taken, barriers.own, shared + Layout::kTileNumberAt, [&](Tile tile) {
    if (first) {
      const int k_column = (dims.H + tile.head) * D, v_column = k_column + dims.Hkv * D;
      mbarrier_expect_tx(barriers.own.full, 2 * Layout::kTileBytes);
      copy_tile_async<D, kTileRows>(base, qkv_map, k_column, tile.begin, tile.b, barriers.own.full);
      copy_tile_async<D, kTileRows>(base + Layout::kValuesAt, qkv_map, v_column, tile.begin, tile.b,
                                    barriers.own.full);
    }
    const int begin_head = tile.head * dims.group();
    const FirstKeys<kFirstKeys> first_keys(first_key, dims, tile.b);
    const auto sees_keys = [&](int query_begin) {
      return query_begin < dims.S && first_keys.sees(query_begin, tile.begin + kTileRows);
    };
    for (int h = begin_head; h < begin_head + dims.group(); ++h) {
      for (int query_begin = tile.begin; sees_keys(query_begin); query_begin += Layout::kQueries, ++slot) {
        const uint32_t place = slot % Layout::kStages, full = barriers.passing.full_at(slot);
        barriers.passing.wait_empty(slot);
        if (first) {
          mbarrier_expect_tx(full, 2 * Layout::kQueryBytes);
          copy_tile_async<D, Layout::kQueries>(base + Layout::kQueriesAt + place * Layout::kQueryBytes,
                                               qkv_query_map, h * D, query_begin, tile.b, full);
          copy_tile_async<D, Layout::kQueries>(base + Layout::kDOutAt + place * Layout::kQueryBytes, d_out_map,
                                               h * D, query_begin, tile.b, full);
        }
        copy_statistics_async<Layout::kQueries, kTakesTurns<D, kFirstKeys>>(
            base + Layout::kStatisticsAt + place * Layout::kStatisticsBytes, statistics + dims.query(tile.b, 0, h),
            query_begin, dims.S, full);
      }
    }
  });
}

// Adds what a tile of queries gives to d_k and d_v of a consumer's 64 keys. `distance`: the first query less this
// warp's first key; `mask_earlier` hides keys before the first of each query. `scores`: where this warp's rows of
// the score gradients go, or null.
template <int D, typename Statistics, typename MaskEarlier, bool kTurns>
__device__ __forceinline__ void add_queries(float (&d_k)[1][D / 8][4], float (&d_v)[1][D / 8][4], SharedTile keys,
                                            SharedTile values, SharedTile queries, SharedTile d_out,
                                            const Statistics& statistics, bool masked, int distance,
                                            const MaskEarlier& mask_earlier, float scale_log2,
                                            unsigned char* scores, const PingPongBarrier<kTurns>& ping_pong) {
  constexpr int kQueries = KeyLayout<D>::kQueries;
  float p[1][kQueries / 8][4], d_s[1][kQueries / 8][4];
  uint32_t packed_p[1][kQueries / 16][4], packed_d_s[1][kQueries / 16][4];
  ping_pong.wait();
  wgmma_fence();
  start_product_transposed<D>(p, keys, queries);
  wgmma_commit_group();
  start_product_transposed<D>(d_s, values, d_out);
  wgmma_commit_group();
  ping_pong.pass();
  // Statistics are loaded while the products run: later takes longer, perhaps behind the other's stores.
  const auto lse = load_lse(statistics);
  wgmma_wait_group<1>();
  fence_operand(p);
  if (masked) mask_later_keys<true>(p, distance);
  mask_earlier(p);
  probabilities_by_key(p, lse, scale_log2);
  const auto delta = load_delta(statistics);
  const auto start_d_v = [&] {
    pack_rows(p, packed_p);
    wgmma_fence();
    start_product(d_v, packed_p, d_out);
    wgmma_commit_group();
  };
  // The sooner the better, but p twice and d_p of a wide tile take too many registers.
  constexpr bool kSoon = kQueries == 64;
  if constexpr (kSoon) start_d_v();
  wgmma_wait_group<kSoon ? 1 : 0>();
  fence_operand(d_s);
  score_gradient_by_key(p, d_s, delta);
  if constexpr (!kSoon) start_d_v();
  pack_rows(d_s, packed_d_s);
  wgmma_fence();
  start_product(d_k, packed_d_s, queries);
  wgmma_commit_group();
  if constexpr (kKeepsScores<D>) {
    if (scores != nullptr) store_score_gradients(packed_d_s, scores);
  }
  wgmma_wait_group<0>();  // running on into the next step they would take too many registers
  fence_operand(d_k);
  fence_operand(d_v);
}

template <int D, bool kFirstKeys>
__device__ __forceinline__ void sum_over_queries(const GradientOutput<BFloat16>& output, const int32_t* first_key,
                                                 unsigned char* shared, const AttentionDims& dims,
                                                 const TileOrder& order, const Barriers<KeyLayout<D>>& barriers,
                                                 float scale, const ScoreGradients& scores) {
  using Layout = KeyLayout<D>;
  constexpr bool kWritesScores = kKeepsScores<D> && !kFirstKeys, kTurns = kTakesTurns<D, kFirstKeys>;
  const int consumer = consumer_index();
  const uint32_t base = shared_address(shared);
  const SharedTile keys = SharedTile{base, Layout::kTileBlockBytes}.rows(consumer * kConsumerRows);
  const SharedTile values{keys.address + Layout::kValuesAt, keys.block_bytes};
  const int out_at = Layout::kOutAt + warp_row() * kRowBytes<D>;  // the warp's place for results
  const PingPongBarrier<kTurns> ping_pong(consumer);
  float amax = 0.0f;  // of this thread's rows of all its tiles
  unsigned slot = 0;
  for_each_taken_tile<false>(order, barriers.own, shared + Layout::kTileNumberAt, [&](Tile tile) {
    const int consumer_begin = tile.begin + consumer * kConsumerRows;
    float d_k[1][D / 8][4], d_v[1][D / 8][4];
    clear(d_k);
    clear(d_v);
    const FirstKeys<kFirstKeys> first_keys(first_key, dims, tile.b);
    const auto sees_keys = [&](int query_begin) {
      return query_begin < dims.S && first_keys.sees(query_begin, tile.begin + kTileRows);
    };
    // All queries from the first key on that see any, of one head after the other, so in a fixed order.
    for (int h = 0; h < dims.group(); ++h) {
      const int head = tile.b * dims.H + tile.head * dims.group() + h;  // of all sequences
      for (int query_begin = tile.begin; sees_keys(query_begin); query_begin += Layout::kQueries, ++slot) {
        const uint32_t place = slot % Layout::kStages;
        barriers.passing.wait_full(slot);
        if (query_begin + Layout::kQueries > consumer_begin &&
            first_keys.sees(query_begin, consumer_begin + kConsumerRows)) {
          const SharedTile queries{base + Layout::kQueriesAt + place * Layout::kQueryBytes,
                                   Layout::kQueryBlockBytes};
          const SharedTile d_out{queries.address + Layout::kDOutAt - Layout::kQueriesAt, queries.block_bytes};
          const auto statistics = statistics_at<kTurns, Layout::kQueries>(shared + Layout::kStatisticsAt +
                                                                          place * Layout::kStatisticsBytes);
          unsigned char* scores_of_warp = nullptr;
          if (kWritesScores && scores.pairs != nullptr) {
            scores_of_warp = scores.block(head, query_begin / Layout::kQueries, consumer_begin / kConsumerRows) +
                             warp_row() % kConsumerRows / kWarpRows * ScoreGradients::kWarpBytes;
          }
          const auto mask_earlier = [&](float(&p)[1][Layout::kQueries / 8][4]) {
            first_keys.template mask<true>(p, query_begin, Layout::kQueries, tile.begin + warp_row());
          };
          add_queries<D>(d_k, d_v, keys, values, queries, d_out, statistics,
                         query_begin < consumer_begin + kConsumerRows, query_begin - tile.begin - warp_row(),
                         mask_earlier, scale * kLog2E, scores_of_warp, ping_pong);
        } else {  // both consumers take as many turns
          ping_pong.wait();
          ping_pong.pass();
        }
        barriers.passing.release(slot);
      }
    }
    barriers.own.release(0);
    scale_by(d_k, scale);
    const int begin = tile.begin + warp_row(), rows = dims.S - begin;
    if (output.cos_sin != nullptr) rotate_back<D>(d_k, output.cos_sin, begin, dims.S);
    if (output.amax != nullptr) amax = max_of_rows(max_of_rows(amax, d_k, rows), d_v, rows);
    unsigned char* const out = shared + out_at;
    BFloat16* const d_k_rows = output.d_qkv + dims.qkv_row(tile.b, begin, dims.H + tile.head);
    store_rows<D>(d_k, out, d_k_rows, dims.qkv_stride(), rows);
    store_rows<D>(d_v, out, d_k_rows + dims.Hkv * D, dims.qkv_stride(), rows);
  });
  ping_pong.end();
  if (output.amax != nullptr) raise_to_warp_max(output.amax, amax);
}

#endif  // PARKA_SM90_CODE

}  // namespace parka::cuda::sm90
