#include "kernels/cuda/attention_paths.cuh"
#include "kernels/cuda/check.h"
#include "kernels/cuda/sm90_attention.cuh"
#include "kernels/cuda/workspace.h"

// As in attention_backward.cu one kernel sums up d_k and d_v of tiles of keys over all queries, and one d_q of
// tiles of queries over all keys; nothing is added up across blocks, so equal input gives equal bits. While one
// consumer computes score gradients, the other's products run.
//
// With scratch for them the first kernel leaves its score gradients there, and d_q is one product of five instead
// of three of seven. Both ways they are the same numbers, rounded to bf16 for the products either way. Writing and
// reading them, 2 bytes for each 256 multiplications saved, takes less time than computing them again, and the
// memory is idle otherwise.
namespace parka::cuda {
namespace sm90 {

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

// Of the kernel of d_q: the block's queries and d_out, results on their way out, and places for keys and values.
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

// Of the kernel of d_q from score gradients: results on their way out, and places for keys and for two pairs of
// score gradients, one for each consumer.
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

// Score gradients of the query heads of a pass, in bf16. A pair is 64 queries of a head by two blocks of 64 keys;
// each block is as products want it in shared memory: rows are keys, of 128 bytes whose chunks are permuted.
struct ScoreGradients {
  unsigned char* pairs = nullptr;  // null: they are not kept
  int begin_head = 0;              // of the heads of all sequences
  int64_t head_bytes = 0;

  static constexpr int kBlockBytes = static_cast<int>(kScorePairBytes) / 2;
  __device__ unsigned char* pair(int head, int query_tile, int key_pair) const {
    return pairs + (head - begin_head) * head_bytes + (score_pairs(query_tile) + key_pair) * kScorePairBytes;
  }
  __device__ unsigned char* block(int head, int query_tile, int key_block) const {
    return pair(head, query_tile, key_block / 2) + key_block % 2 * kBlockBytes;
  }
};

// Whether score gradients may be kept: where a tile of queries is as wide as a block of them.
template <int D>
constexpr bool kKeepsScores = D == 128 && KeyLayout<D>::kQueries == kScoreQueries;

}  // namespace sm90

namespace {

using namespace sm90;

#if PARKA_SM90_CODE

// Of the tile that a block works on, and of those that it passes over.
template <typename Layout>
struct Barriers {
  Stages<1> own;
  Stages<Layout::kStages> passing;

  __device__ explicit Barriers(uint32_t at) : own(at), passing(at + Stages<1>::kBytes) {}
  __device__ void init(int passing_producers) const {
    own.init(1);
    passing.init(passing_producers);
    barrier_init_fence();
  }
};

// ---- d_k and d_v ----

// Starts the copy of the statistics of a tile of queries; those from S on become zeros. By a whole warp.
template <int kQueries>
__device__ __forceinline__ void copy_statistics_async(uint32_t target, const RowStatistics* statistics, int begin,
                                                      int S, uint32_t barrier) {
  for (int i = static_cast<int>(threadIdx.x) % kWarpSize; i < kQueries; i += kWarpSize) {
    cp_async_8(target + i * 8, statistics + begin + i, begin + i < S);
  }
  barrier_arrive_after_cp_async(barrier);
}

// The producer's part, by its first warp. A tile's number past the last ends the consumers' work.
template <int D>
__device__ __forceinline__ void copy_key_tiles(const CUtensorMap& qkv_map, const CUtensorMap& qkv_query_map,
                                               const CUtensorMap& d_out_map, const RowStatistics* statistics,
                                               unsigned char* shared, const AttentionDims& dims,
                                               const TileOrder& order, unsigned* num_taken,
                                               const Barriers<KeyLayout<D>>& barriers) {
  using Layout = KeyLayout<D>;
  const bool first = threadIdx.x == 0;
  const uint32_t base = shared_address(shared);
  unsigned slot = 0, number = blockIdx.x;
  for (unsigned count = 0;; ++count) {
    barriers.own.wait_empty(count);
    if (first) *reinterpret_cast<unsigned*>(shared + Layout::kTileNumberAt) = number;
    if (number >= order.count()) break;
    const Tile tile = order.tile<false>(number);
    if (first) {
      const int k_column = (dims.H + tile.head) * D, v_column = k_column + dims.Hkv * D;
      barrier_expect(barriers.own.full, 2 * Layout::kTileBytes);
      copy_tile_async<D, kTileRows>(base, qkv_map, k_column, tile.begin, tile.b, barriers.own.full);
      copy_tile_async<D, kTileRows>(base + Layout::kValuesAt, qkv_map, v_column, tile.begin, tile.b,
                                    barriers.own.full);
    }
    const int begin_head = tile.head * dims.group();
    for (int h = begin_head; h < begin_head + dims.group(); ++h) {
      for (int query_begin = tile.begin; query_begin < dims.S; query_begin += Layout::kQueries, ++slot) {
        const uint32_t place = slot % Layout::kStages, full = barriers.passing.full_at(slot);
        barriers.passing.wait_empty(slot);
        if (first) {
          barrier_expect(full, 2 * Layout::kQueryBytes);
          copy_tile_async<D, Layout::kQueries>(base + Layout::kQueriesAt + place * Layout::kQueryBytes,
                                               qkv_query_map, h * D, query_begin, tile.b, full);
          copy_tile_async<D, Layout::kQueries>(base + Layout::kDOutAt + place * Layout::kQueryBytes, d_out_map,
                                               h * D, query_begin, tile.b, full);
        }
        copy_statistics_async<Layout::kQueries>(base + Layout::kStatisticsAt + place * Layout::kStatisticsBytes,
                                                statistics + dims.query(tile.b, 0, h), query_begin, dims.S, full);
      }
    }
    if (first) number = take_tile(num_taken);
    number = __shfl_sync(kFullWarp, number, 0);
  }
  if (first) barrier_arrive(barriers.own.full);
}

// Of keys (rows) and queries: p in place of scores.
template <int kN>
__device__ __forceinline__ void probabilities_by_key(float (&scores)[1][kN][4], const RowStatistics* statistics,
                                                     float scale_log2) {
  const int lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    const float4 pair = *reinterpret_cast<const float4*>(statistics + n * 8 + lane % 4 * 2);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      scores[0][n][e] = exp2_approximate(fmaf(scores[0][n][e], scale_log2, e % 2 == 0 ? -pair.x : -pair.z));
    }
  }
}

// d_s = p * (d_p - delta) in place of d_p.
template <int kN>
__device__ __forceinline__ void score_gradient_by_key(const float (&p)[1][kN][4], float (&d_p)[1][kN][4],
                                                      const RowStatistics* statistics) {
  const int lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    const float4 pair = *reinterpret_cast<const float4*>(statistics + n * 8 + lane % 4 * 2);
#pragma unroll
    for (int e = 0; e < 4; ++e) d_p[0][n][e] = p[0][n][e] * (d_p[0][n][e] - (e % 2 == 0 ? pair.y : pair.w));
  }
}

// A warp's way of writing its 16 rows of blocks of score gradients: two places in shared memory take turns.
class ScoreWriter {
 public:
  static constexpr int kRowsBytes = 16 * kBlockRowBytes;

  __device__ explicit ScoreWriter(uint32_t places) : places_(places) {}

  __device__ void write(const uint32_t (&d_s)[1][kScoreQueries / 16][4], unsigned char* target) {
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize, row = lane % 16;
    const uint32_t place = places_ + number_++ % 2 * kRowsBytes;
    if (lane == 0) wait_copied_out<1>();
    __syncwarp();
#pragma unroll
    for (int k = 0; k < kScoreQueries / 16; ++k) {
      const int chunk = 2 * k + lane / 16;
      store_matrices(place + row * kBlockRowBytes + (chunk ^ row % 8) * 16, d_s[0][k]);
    }
    copy_fence();
    __syncwarp();
    if (lane == 0) copy_bytes_out_async(target, place, kRowsBytes);
  }
  // Until the places are free for others.
  __device__ void finish() const {
    if (threadIdx.x % kWarpSize == 0) wait_copied_out<0>();
    __syncwarp();
  }

 private:
  uint32_t places_;
  unsigned number_ = 0;
};

// Adds what a tile of queries gives to d_k and d_v of a consumer's 64 keys. `distance`: the first query less this
// warp's first key. `scores`: where this warp's rows of the score gradients go, or null.
template <int D>
__device__ __forceinline__ void add_queries(float (&d_k)[1][D / 8][4], float (&d_v)[1][D / 8][4], SharedTile keys,
                                            SharedTile values, SharedTile queries, SharedTile d_out,
                                            const RowStatistics* statistics, bool masked, int distance,
                                            float scale_log2, ScoreWriter& writer, unsigned char* scores) {
  constexpr int kQueries = KeyLayout<D>::kQueries;
  float p[1][kQueries / 8][4], d_s[1][kQueries / 8][4];
  uint32_t packed_p[1][kQueries / 16][4], packed_d_s[1][kQueries / 16][4];
  products_begin();
  start_product_transposed<D>(p, keys, queries);
  products_commit();
  start_product_transposed<D>(d_s, values, d_out);
  products_commit();
  products_wait<1>();
  keep_until_here(p);
  if (masked) mask_later_keys<true>(p, distance);
  probabilities_by_key(p, statistics, scale_log2);
  const auto start_d_v = [&] {
    pack_rows(p, packed_p);
    products_begin();
    start_product(d_v, packed_p, d_out);
    products_commit();
  };
  // The sooner the better, but p twice and d_p of a wide tile take too many registers.
  constexpr bool kSoon = kQueries == 64;
  if constexpr (kSoon) start_d_v();
  products_wait<kSoon ? 1 : 0>();
  keep_until_here(d_s);
  score_gradient_by_key(p, d_s, statistics);
  if constexpr (!kSoon) start_d_v();
  pack_rows(d_s, packed_d_s);
  if constexpr (kKeepsScores<D>) {
    if (scores != nullptr) writer.write(packed_d_s, scores);
  }
  products_begin();
  start_product(d_k, packed_d_s, queries);
  products_commit();
  products_wait<0>();  // running on into the next step they would take too many registers
  keep_until_here(d_k);
  keep_until_here(d_v);
}

template <int D>
__device__ __forceinline__ void sum_over_queries(const GradientOutput<BFloat16>& output, unsigned char* shared,
                                                 const AttentionDims& dims, const TileOrder& order,
                                                 const Barriers<KeyLayout<D>>& barriers, float scale,
                                                 const ScoreGradients& scores) {
  using Layout = KeyLayout<D>;
  const int consumer = consumer_index();
  const uint32_t base = shared_address(shared);
  const SharedTile keys = SharedTile{base, Layout::kTileBlockBytes}.rows(consumer * kConsumerRows);
  const SharedTile values{keys.address + Layout::kValuesAt, keys.block_bytes};
  const int out_at = Layout::kOutAt + warp_row() * kRowBytes<D>;  // the warp's place for results
  ScoreWriter writer(base + out_at);
  float amax = 0.0f;  // of this thread's rows of all its tiles
  unsigned slot = 0;
  for (unsigned count = 0;; ++count) {
    barriers.own.wait_full(count);
    const unsigned number = tile_number(shared + Layout::kTileNumberAt);
    if (number >= order.count()) break;
    const Tile tile = order.tile<false>(number);
    const int consumer_begin = tile.begin + consumer * kConsumerRows;
    float d_k[1][D / 8][4], d_v[1][D / 8][4];
    clear(d_k);
    clear(d_v);
    // All queries from the first key on, of one head after the other, so in a fixed order.
    for (int h = 0; h < dims.group(); ++h) {
      const int head = tile.b * dims.H + tile.head * dims.group() + h;  // of all sequences
      for (int query_begin = tile.begin; query_begin < dims.S; query_begin += Layout::kQueries, ++slot) {
        const uint32_t place = slot % Layout::kStages;
        barriers.passing.wait_full(slot);
        if (query_begin + Layout::kQueries > consumer_begin) {
          const SharedTile queries{base + Layout::kQueriesAt + place * Layout::kQueryBytes,
                                   Layout::kQueryBlockBytes};
          const SharedTile d_out{queries.address + Layout::kDOutAt - Layout::kQueriesAt, queries.block_bytes};
          const auto* statistics = reinterpret_cast<const RowStatistics*>(shared + Layout::kStatisticsAt +
                                                                          place * Layout::kStatisticsBytes);
          unsigned char* scores_of_warp = nullptr;
          if (kKeepsScores<D> && scores.pairs != nullptr) {
            scores_of_warp = scores.block(head, query_begin / Layout::kQueries, consumer_begin / kConsumerRows) +
                             warp_row() % kConsumerRows * kBlockRowBytes;
          }
          add_queries<D>(d_k, d_v, keys, values, queries, d_out, statistics,
                         query_begin < consumer_begin + kConsumerRows, query_begin - tile.begin - warp_row(),
                         scale * kLog2E, writer, scores_of_warp);
        }
        barriers.passing.release(slot);
      }
    }
    barriers.own.release(0);
    scale_by(d_k, scale);
    const int begin = tile.begin + warp_row(), rows = dims.S - begin;
    if (output.cos_sin != nullptr) turn_back<D>(d_k, output.cos_sin, begin, dims.S);
    if (output.amax != nullptr) amax = max_of_rows(max_of_rows(amax, d_k, rows), d_v, rows);
    if (kKeepsScores<D> && scores.pairs != nullptr) writer.finish();
    unsigned char* const out = shared + out_at;
    BFloat16* const d_k_rows = output.d_qkv + dims.qkv_row(tile.b, begin, dims.H + tile.head);
    store_rows<D>(d_k, out, d_k_rows, dims.qkv_stride(), rows);
    store_rows<D>(d_v, out, d_k_rows + dims.Hkv * D, dims.qkv_stride(), rows);
  }
  if (output.amax != nullptr) raise_to_warp_max(output.amax, amax);
}

// ---- d_q ----

template <int D>
__device__ __forceinline__ void copy_query_tiles(const CUtensorMap& qkv_map, const CUtensorMap& d_out_map,
                                                 unsigned char* shared, const AttentionDims& dims,
                                                 const TileOrder& order, unsigned* num_taken,
                                                 const Barriers<QueryLayout<D>>& barriers) {
  using Layout = QueryLayout<D>;
  const uint32_t base = shared_address(shared);
  unsigned slot = 0, number = blockIdx.x;
  for (unsigned count = 0;; ++count, number = take_tile(num_taken)) {
    barriers.own.wait_empty(count);
    *reinterpret_cast<unsigned*>(shared + Layout::kTileNumberAt) = number;
    if (number >= order.count()) break;
    const Tile tile = order.tile<true>(number);
    const int k_column = (dims.H + tile.head / dims.group()) * D, v_column = k_column + dims.Hkv * D;
    barrier_expect(barriers.own.full, 2 * Layout::kTileBytes);
    copy_tile_async<D, kTileRows>(base, qkv_map, tile.head * D, tile.begin, tile.b, barriers.own.full);
    copy_tile_async<D, kTileRows>(base + Layout::kDOutAt, d_out_map, tile.head * D, tile.begin, tile.b,
                                  barriers.own.full);
    for (int key_begin = tile.begin; key_begin >= 0; key_begin -= Layout::kKeys, ++slot) {
      const uint32_t place = slot % Layout::kStages * Layout::kTileBytes, full = barriers.passing.full_at(slot);
      barriers.passing.wait_empty(slot);
      barrier_expect(full, 2 * Layout::kTileBytes);
      copy_tile_async<D, kTileRows>(base + Layout::kKeysAt + place, qkv_map, k_column, key_begin, tile.b, full);
      copy_tile_async<D, kTileRows>(base + Layout::kValuesAt + place, qkv_map, v_column, key_begin, tile.b, full);
    }
  }
  barrier_arrive(barriers.own.full);
}

// Of queries (rows) and keys: p in place of scores.
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

// What is done with d_q of a warp's queries, which are those of a head from `begin` on: returns the maximum of
// `amax` and what was stored.
template <int D>
__device__ __forceinline__ float store_query_gradient(float (&d_q)[1][D / 8][4],
                                                      const GradientOutput<BFloat16>& output, unsigned char* out,
                                                      const AttentionDims& dims, const Tile& tile, int begin,
                                                      float scale, float amax) {
  scale_by(d_q, scale);
  if (output.cos_sin != nullptr) turn_back<D>(d_q, output.cos_sin, begin, dims.S);
  if (output.amax != nullptr) amax = max_of_rows(amax, d_q, dims.S - begin);
  store_rows<D>(d_q, out, output.d_qkv + dims.qkv_row(tile.b, begin, tile.head), dims.qkv_stride(), dims.S - begin);
  return amax;
}

// Adds what a tile of keys gives to d_q of a consumer's 64 queries.
template <int D>
__device__ __forceinline__ void add_keys(float (&d_q)[1][D / 8][4], SharedTile queries, SharedTile d_out,
                                         SharedTile keys, SharedTile values, const RowStatistics (&statistics)[2],
                                         bool masked, float scale_log2, const Turn& turn) {
  constexpr int kKeys = QueryLayout<D>::kKeys;
  float p[1][kKeys / 8][4], d_s[1][kKeys / 8][4];
  uint32_t packed[1][kKeys / 16][4];
  turn.wait();
  products_begin();
  start_product_transposed<D>(p, queries, keys);
  products_commit();
  start_product_transposed<D>(d_s, d_out, values);
  products_commit();
  turn.pass();
  products_wait<1>();
  keep_until_here(p);
  if (masked) mask_later_keys<false>(p, warp_row());
  probabilities_by_query(p, statistics, scale_log2);
  products_wait<0>();
  keep_until_here(d_s);
  score_gradient_by_query(p, d_s, statistics);
  pack_rows(d_s, packed);
  products_begin();
  start_product(d_q, packed, keys);
  products_commit();
  products_wait<0>();  // running on into the next step it would take too many registers
  keep_until_here(d_q);
}

template <int D>
__device__ __forceinline__ void sum_over_keys(const GradientOutput<BFloat16>& output,
                                              const RowStatistics* statistics, unsigned char* shared,
                                              const AttentionDims& dims, const TileOrder& order,
                                              const Barriers<QueryLayout<D>>& barriers, float scale) {
  using Layout = QueryLayout<D>;
  const int consumer = consumer_index();
  const uint32_t base = shared_address(shared);
  const SharedTile queries = SharedTile{base, Layout::kBlockBytes}.rows(consumer * kConsumerRows);
  const SharedTile d_out{queries.address + Layout::kDOutAt, queries.block_bytes};
  const Turn turn(consumer);
  float amax = 0.0f;  // of this thread's rows of all its tiles
  unsigned slot = 0;
  for (unsigned count = 0;; ++count) {
    barriers.own.wait_full(count);
    const unsigned number = tile_number(shared + Layout::kTileNumberAt);
    if (number >= order.count()) break;
    const Tile tile = order.tile<true>(number);
    const int begin = tile.begin + warp_row();
    RowStatistics rows[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = begin + half * 8 + static_cast<int>(threadIdx.x) % kWarpSize / 4;
      rows[half] = row < dims.S ? statistics[dims.query(tile.b, row, tile.head)] : RowStatistics{0.0f, 0.0f};
    }
    float d_q[1][D / 8][4];
    clear(d_q);
    for (int key_begin = tile.begin; key_begin >= 0; key_begin -= Layout::kKeys, ++slot) {
      const SharedTile keys{base + Layout::kKeysAt + slot % Layout::kStages * Layout::kTileBytes,
                            Layout::kBlockBytes};
      const SharedTile values{keys.address + Layout::kValuesAt - Layout::kKeysAt, keys.block_bytes};
      barriers.passing.wait_full(slot);
      add_keys<D>(d_q, queries, d_out, keys, values, rows, key_begin == tile.begin, scale * kLog2E, turn);
      barriers.passing.release(slot);
    }
    barriers.own.release(0);
    amax = store_query_gradient<D>(d_q, output, shared + Layout::kOutAt + warp_row() * kRowBytes<D>, dims, tile,
                                   begin, scale, amax);
  }
  turn.end();
  if (output.amax != nullptr) raise_to_warp_max(output.amax, amax);
}

// ---- d_q from score gradients ----

template <int D>
__device__ __forceinline__ void copy_score_tiles(const CUtensorMap& qkv_map, const ScoreGradients& scores,
                                                 unsigned char* shared, const AttentionDims& dims,
                                                 const TileOrder& order, unsigned* num_taken,
                                                 const Barriers<ScoreLayout<D>>& barriers) {
  using Layout = ScoreLayout<D>;
  const uint32_t base = shared_address(shared);
  unsigned slot = 0, number = blockIdx.x;
  for (unsigned count = 0;; ++count, number = take_tile(num_taken)) {
    barriers.own.wait_empty(count);
    *reinterpret_cast<unsigned*>(shared + Layout::kTileNumberAt) = number;
    barrier_arrive(barriers.own.full);
    if (number >= order.count()) break;
    const Tile tile = order.tile<true>(number);
    const int k_column = (dims.H + tile.head / dims.group()) * D, head = tile.b * dims.H + tile.head;
    const int query_tile = tile.begin / kConsumerRows, consumers = tile.begin + kConsumerRows < dims.S ? 2 : 1;
    for (int key_begin = tile.begin; key_begin >= 0; key_begin -= Layout::kKeys, ++slot) {
      const uint32_t place = slot % Layout::kStages, full = barriers.passing.full_at(slot);
      barriers.passing.wait_empty(slot);
      barrier_expect(full, Layout::kTileBytes + consumers * Layout::kPairBytes);
      copy_tile_async<D, kTileRows>(base + Layout::kKeysAt + place * Layout::kTileBytes, qkv_map, k_column,
                                    key_begin, tile.b, full);
      for (int consumer = 0; consumer < consumers; ++consumer) {
        copy_bytes_async(base + Layout::kPairsAt + (place * kConsumers + consumer) * Layout::kPairBytes,
                         scores.pair(head, query_tile + consumer, key_begin / Layout::kKeys), Layout::kPairBytes,
                         full);
      }
    }
  }
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
  for (unsigned count = 0;; ++count) {
    barriers.own.wait_full(count);
    const unsigned number = tile_number(shared + Layout::kTileNumberAt);
    barriers.own.release(0);
    if (number >= order.count()) break;
    const Tile tile = order.tile<true>(number);
    const bool has_queries = tile.begin + consumer * kConsumerRows < dims.S;
    float d_q[1][D / 8][4];
    clear(d_q);
    for (int key_begin = tile.begin; key_begin >= 0; key_begin -= Layout::kKeys, ++slot) {
      const uint32_t place = slot % Layout::kStages;
      const SharedTile keys{base + Layout::kKeysAt + place * Layout::kTileBytes, Layout::kTileBlockBytes};
      const SharedTile d_s{base + Layout::kPairsAt + (place * kConsumers + consumer) * Layout::kPairBytes,
                           ScoreGradients::kBlockBytes};
      barriers.passing.wait_full(slot);
      if (has_queries) {
        products_begin();
        // The second block of keys comes after all queries of the first consumer, and nobody has written it.
        if (key_begin == tile.begin && consumer == 0) {
          start_product_of_rows<Layout::kKeys / 2>(d_q, d_s, keys);
        } else {
          start_product_of_rows<Layout::kKeys>(d_q, d_s, keys);
        }
        products_commit();
        products_wait<0>();
        keep_until_here(d_q);
      }
      barriers.passing.release(slot);
    }
    amax = store_query_gradient<D>(d_q, output, shared + Layout::kOutAt + warp_row() * kRowBytes<D>, dims, tile,
                                   tile.begin + warp_row(), scale, amax);
  }
  if (output.amax != nullptr) raise_to_warp_max(output.amax, amax);
}

#endif  // PARKA_SM90_CODE

template <int D>
__global__ void __launch_bounds__(kThreads, 1)
    key_value_gradient_sm90_kernel(const __grid_constant__ CUtensorMap qkv_map,
                                   const __grid_constant__ CUtensorMap qkv_query_map,
                                   const __grid_constant__ CUtensorMap d_out_map, const RowStatistics* statistics,
                                   const __grid_constant__ GradientOutput<BFloat16> output, AttentionDims dims,
                                   float scale, ScoreGradients scores, TileOrder order, unsigned* num_taken) {
#if PARKA_SM90_CODE
  extern __shared__ __align__(1024) unsigned char shared[];
  const Barriers<KeyLayout<D>> barriers(shared_address(shared) + KeyLayout<D>::kBarriersAt);
  if (threadIdx.x == 0) barriers.init(1 + kWarpSize);
  __syncthreads();
  if (threadIdx.x < kWarpgroup) {
    give_registers_back<kProducerRegisters>();
    if (threadIdx.x < kWarpSize) {
      copy_key_tiles<D>(qkv_map, qkv_query_map, d_out_map, statistics, shared, dims, order, num_taken, barriers);
    }
  } else {
    take_registers<kConsumerRegisters>();
    sum_over_queries<D>(output, shared, dims, order, barriers, scale, scores);
  }
#endif
}

template <int D>
__global__ void __launch_bounds__(kThreads, 1)
    query_gradient_sm90_kernel(const __grid_constant__ CUtensorMap qkv_map,
                               const __grid_constant__ CUtensorMap d_out_map, const RowStatistics* statistics,
                               const __grid_constant__ GradientOutput<BFloat16> output, AttentionDims dims,
                               float scale, TileOrder order, unsigned* num_taken) {
#if PARKA_SM90_CODE
  extern __shared__ __align__(1024) unsigned char shared[];
  const Barriers<QueryLayout<D>> barriers(shared_address(shared) + QueryLayout<D>::kBarriersAt);
  if (threadIdx.x == 0) barriers.init(1);
  __syncthreads();
  if (threadIdx.x < kWarpgroup) {
    give_registers_back<kProducerRegisters>();
    if (threadIdx.x == 0) copy_query_tiles<D>(qkv_map, d_out_map, shared, dims, order, num_taken, barriers);
  } else {
    take_registers<kConsumerRegisters>();
    sum_over_keys<D>(output, statistics, shared, dims, order, barriers, scale);
  }
#endif
}

template <int D>
__global__ void __launch_bounds__(kThreads, 1)
    query_gradient_of_scores_sm90_kernel(const __grid_constant__ CUtensorMap qkv_map, ScoreGradients scores,
                                         const __grid_constant__ GradientOutput<BFloat16> output,
                                         AttentionDims dims, float scale, TileOrder order, unsigned* num_taken) {
#if PARKA_SM90_CODE
  extern __shared__ __align__(1024) unsigned char shared[];
  const Barriers<ScoreLayout<D>> barriers(shared_address(shared) + ScoreLayout<D>::kBarriersAt);
  if (threadIdx.x == 0) barriers.init(1);
  __syncthreads();
  if (threadIdx.x < kWarpgroup) {
    give_registers_back<kProducerRegisters>();
    if (threadIdx.x == 0) copy_score_tiles<D>(qkv_map, scores, shared, dims, order, num_taken, barriers);
  } else {
    take_registers<kConsumerRegisters>();
    sum_scores_over_keys<D>(output, shared, dims, order, barriers, scale);
  }
#endif
}

// How many key/value heads the scratch has room for, with their query heads; 0: not enough to be of use.
template <int D>
int64_t heads_of_pass(const AttentionBackward& a, const AttentionDims& dims) {
  if (!kKeepsScores<D> || a.scratch.empty()) return 0;
  const int64_t heads = int64_t{dims.B} * dims.Hkv;
  const int64_t fit = std::min(heads, a.scratch.bytes() / (dims.group() * score_gradient_bytes(dims.S)));
  if (fit == 0 || ceil_div(heads, fit) > kAttentionMaxPasses) return 0;
  return ceil_div(heads, ceil_div(heads, fit));  // passes of one length
}

template <int D>
void launch_backward(CudaDevice& device, const AttentionBackward& a) {
  constexpr const char* kOp = "attention_backward";
  const AttentionDims dims(a);
  const int64_t tokens = a.qkv.dim[0];
  auto* const statistics =
      static_cast<RowStatistics*>(device.workspace(kOp, attention_backward_workspace_bytes(tokens, a.num_heads)));
  auto* num_taken = reinterpret_cast<unsigned*>(statistics + tokens * dims.H);
  compute_row_statistics(device, a, statistics);

  const auto map = [&](const TensorView& x, int box_rows) {
    return make_tile_map(x.as<BFloat16>(), x.dim[1], dims.S, dims.B, box_rows);
  };
  const CUtensorMap qkv_map = map(a.qkv, kTileRows), qkv_query_map = map(a.qkv, KeyLayout<D>::kQueries);
  const CUtensorMap d_out_map = map(a.d_out, KeyLayout<D>::kQueries);
  const GradientOutput<BFloat16> output(a);
  const int blocks = device.num_multiprocessors();
  const int64_t head_bytes = int64_t{2} * dims.S * kRowBytes<D>;  // of two tensors: q and d_out, or k and v
  const TileOrder key_order(dims, dims.Hkv, head_bytes * dims.group(), blocks);
  const TileOrder query_order(dims, dims.H, head_bytes / dims.group(), blocks);
  const auto sum_over_queries_of = [&](const TileOrder& order, const ScoreGradients& scores, unsigned* taken) {
    launch_over_tiles(device, kOp, key_value_gradient_sm90_kernel<D>, KeyLayout<D>::kBytes, order, taken, qkv_map,
                      qkv_query_map, d_out_map, static_cast<const RowStatistics*>(statistics), output, dims,
                      a.scale, scores);
  };
  const int64_t pass_heads = heads_of_pass<D>(a, dims), heads = int64_t{dims.B} * dims.Hkv;
  const int64_t passes = pass_heads == 0 ? 1 : ceil_div(heads, pass_heads);
  check(cudaMemsetAsync(num_taken, 0, static_cast<size_t>(2 * passes) * sizeof(unsigned), device.stream()), kOp);
  if constexpr (kKeepsScores<D>) {
    for (int64_t begin = 0; pass_heads > 0 && begin < heads; begin += pass_heads, num_taken += 2) {
      const auto first = static_cast<unsigned>(begin),
                 count = static_cast<unsigned>(std::min(pass_heads, heads - begin));
      const auto group = static_cast<unsigned>(dims.group());
      const ScoreGradients scores{static_cast<unsigned char*>(a.scratch.data), static_cast<int>(first * group),
                                  score_gradient_bytes(dims.S)};
      sum_over_queries_of(key_order.of_heads(first, count, false), scores, num_taken);
      // The heads that came last first: their score gradients are still in the L2 cache.
      launch_over_tiles(device, kOp, query_gradient_of_scores_sm90_kernel<D>, ScoreLayout<D>::kBytes,
                        query_order.of_heads(first * group, count * group, true), num_taken + 1, qkv_map, scores,
                        output, dims, a.scale);
    }
    if (pass_heads > 0) return;
  }
  sum_over_queries_of(key_order, {}, num_taken);
  launch_over_tiles(device, kOp, query_gradient_sm90_kernel<D>, QueryLayout<D>::kBytes, query_order, num_taken + 1,
                    qkv_map, map(a.d_out, kTileRows), static_cast<const RowStatistics*>(statistics), output, dims,
                    a.scale);
}

}  // namespace

void attention_backward_sm90(CudaDevice& device, const AttentionBackward& a) {
  if (AttentionDims(a).D == 64) {
    launch_backward<64>(device, a);
  } else {
    launch_backward<128>(device, a);
  }
}

}  // namespace parka::cuda
