#include "kernels/cuda/attention/attention_paths.cuh"
#include "kernels/cuda/attention/attention_tiles.cuh"
#include "kernels/op/workspace.h"

// Three kernels. The first computes the statistics of each row that the others need. In the second a block sums a
// tile of d_k and d_v over all queries; in the third one of d_q over all keys. Both recompute the scores: two
// products more than in one kernel. But nothing is summed across blocks, so equal input gives equal bits. Letters
// and fragments: attention_tiles.cuh.
namespace parka::cuda {
namespace {

constexpr int kThreads = 128;  // of every block here
constexpr int kWarps = kThreads / kWarpSize;

// kTileWidth / 8 lanes for each head of a token.
template <int D>
__global__ void __launch_bounds__(kThreads)
    row_statistics_kernel(const BFloat16* out, const BFloat16* d_out, const float* lse, RowStatistics* statistics,
                          AttentionDims dims) {
  constexpr int kLanes = kTileWidth<D> / 8;
  const int width = head_width<D>(dims);
  const int64_t count = int64_t{dims.B} * dims.S * dims.H;
  const int64_t row = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / kLanes, at = row < count ? row : count - 1;
  const int lane = threadIdx.x % kLanes;
  float x[8], y[8], delta = 0.0f;
  if (D != kPaddedHeadDim || lane * 8 < width) {
    load<8>(out + at * width + lane * 8, x);
    load<8>(d_out + at * width + lane * 8, y);
#pragma unroll
    for (int i = 0; i < 8; ++i) delta = fmaf(x[i], y[i], delta);
  }
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) delta += __shfl_xor_sync(kFullWarp, delta, offset);
  if (lane == 0 && row < count) {
    const int64_t token = row / dims.H;
    const int b = static_cast<int>(token / dims.S), i = static_cast<int>(token % dims.S);
    const int64_t query = dims.query(b, i, static_cast<int>(row % dims.H));
    statistics[query] = {lse[query] * kLog2E, delta};
  }
}

// Sums d_k and d_v of 16 keys by two warps, because heads of 256 would take one warp 256 registers. The first has
// the keys: it computes p = exp(scores) and sums up d_v. The second has the values: it computes d_p, takes p from
// shared memory, and sums up d_k from d_s = p * (d_p - delta). Each has two of the four products.
//
// Warp w and warp w + kPairs share 16 keys; both are on the same quarter of a multiprocessor. Their keys or values
// stay in registers, after they have passed through the stages, where results pass, too. Heads of 256 take 128
// registers for sums, 64 for keys or values, 16 for a tile of scores or d_p. Shared memory: up to 99 KB, which fits
// a multiprocessor of any compute capability from 8.0 on; 8.9 has the least, 100 KB.
template <int D>
struct KeyTiling {
  static constexpr int kPairs = 4, kThreads = 2 * kPairs * kWarpSize;
  static constexpr int kWarpKeys = 16, kKeys = kPairs * kWarpKeys;
  static constexpr int kQueries = std::min(64, 8192 / kTileWidth<D>);  // at a time, double-buffered
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
__device__ void store_fragments(const float (&c)[1][kN][4], float4* place) {
  const int lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    place[n * kWarpSize + lane] = make_float4(c[0][n][0], c[0][n][1], c[0][n][2], c[0][n][3]);
  }
}
template <int kN>
__device__ void load_fragments(float (&c)[1][kN][4], const float4* place) {
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

// The work of a warp: both warps of a pair have the same.
template <typename Tiling>
__device__ Work find_pair_work(const AttentionDims& dims, int section_heads) {
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
  const int width = head_width<D>(dims);
  const BFloat16* const v = k + dims.Hkv * width;
  load_tile_async<D, Tiling::kKeys, Tiling::kThreads>(stages, k, dims.qkv_stride(), key_begin, dims.S, width);
  load_tile_async<D, Tiling::kKeys, Tiling::kThreads>(stages + Tiling::kKeyBytes, v, dims.qkv_stride(), key_begin,
                                                      dims.S, width);
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();
  load_rows<D>(rows, stages + (has_values ? Tiling::kKeyBytes : 0) + warp_row * kRowBytes<D> + lane_offset<D>());
  __syncthreads();
}

// Puts p in place of scores, of a warp's keys (rows) and the queries from query_begin on: 0 for keys that a query
// does not see. `first`: the first keys of the sequence's queries.
template <Mask kMask, int kN>
__device__ __forceinline__ void masked_probabilities_by_key(float (&scores)[1][kN][4], const int32_t* first, int S,
                                                            int query_begin, int key_begin,
                                                            const RowStatistics* statistics, float scale_log2) {
  if (kMask != Mask::kNone && query_begin < key_begin + 16) mask_later_keys<true>(scores, query_begin - key_begin);
  if (kMask == Mask::kDocuments && key_begin < first[min(query_begin + 8 * kN, S) - 1]) {
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
                output.d_qkv + dims.qkv_row(work.b, work.begin, head), dims.qkv_stride(), num_rows,
                head_width<D>(dims));
}

// With documents there is a first_key, and each head is left after the last query that sees a key of the tile.
template <int D, Mask kMask>
__global__ void __launch_bounds__(KeyTiling<D>::kThreads, 1)
    key_value_gradient_kernel(const BFloat16* qkv, const int32_t* first_key, const BFloat16* d_out,
                              const RowStatistics* statistics, GradientOutput<BFloat16> output, AttentionDims dims,
                              int section_heads, float scale) {
  using Tiling = KeyTiling<D>;
  constexpr int kThreads = Tiling::kThreads, kQueries = Tiling::kQueries;
  constexpr bool kDocuments = kMask == Mask::kDocuments, kSeesAll = kMask == Mask::kNone;
  extern __shared__ __align__(1024) unsigned char shared[];

  const auto [b, kv_head, warp_begin, warp_row] = find_pair_work<Tiling>(dims, section_heads);
  const int key_begin = warp_begin - warp_row, pair = warp_row / Tiling::kWarpKeys;
  const int first_query = kSeesAll ? 0 : key_begin, width = head_width<D>(dims);
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
                                           dims.S, width);
    load_tile_async<D, kQueries, kThreads>(tile + Tiling::kQueryBytes, d_out + dims.out_row(b, 0, h),
                                           dims.out_stride(), query_begin, dims.S, width);
    load_statistics_async<kQueries, kThreads>(stage_statistics + stage * kQueries, statistics + dims.query(b, 0, h),
                                              query_begin, dims.S);
    cp_async_commit();
  };
  uint32_t rows[1][D / 16][4];
  load_keys_or_values<Tiling, D>(rows, stages, k, dims, key_begin, warp_row, has_values);

  float sum[1][D / 8][4];  // d_v or d_k
  clear(sum);
  // All queries from first_query on, a multiple of kQueries, of one head after the other, so in a fixed order.
  int h = kv_head * dims.group(), query_begin = first_query, stage = 0;
  const int end_head = h + dims.group();
  load_stage(stage, h, query_begin);
  while (h < end_head) {
    const bool last_of_head = query_begin + kQueries >= dims.S ||
                              (kDocuments && first[query_begin + kQueries] >= key_begin + Tiling::kKeys);
    const int next_head = last_of_head ? h + 1 : h,
              next_begin = last_of_head ? first_query : query_begin + kQueries;
    cp_async_wait<0>();  // this stage is here, and the other warps are done with the other
    __syncthreads();
    if (next_head < end_head) load_stage(1 - stage, next_head, next_begin);
    const bool sees_queries = (kSeesAll ? warp_begin < dims.S : query_begin + kQueries > warp_begin) &&
                              (!kDocuments || first[query_begin] < warp_begin + Tiling::kWarpKeys);
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
        masked_probabilities_by_key<kMask>(c, first, dims.S, query_begin, warp_begin,
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

// A warp owns 32 queries and processes kKeys keys at a time, double-buffered in shared memory. With wide heads d_q
// of 16 queries takes 128 registers already. Those queries stay in registers, too, after they have passed through
// the place of the keys: a block then takes 65 KB of shared memory instead of 97 KB, so that two fit a
// multiprocessor of compute capability 8.0 (164 KB).
template <int D>
struct QueryTiling {
  static constexpr bool kKeepsQueries = D > 128;  // in registers
  static constexpr int kM = kKeepsQueries ? 1 : 2;
  static constexpr int kKeys = 4096 / kTileWidth<D>;  // d_q, scores, d_p and kept queries take 192 or 208 registers
  static constexpr int kWarpQueries = 16 * kM, kQueries = kWarps * kWarpQueries;
  static constexpr int kQueryBytes = kQueries * kRowBytes<D>, kKeyBytes = kKeys * kRowBytes<D>;
  static constexpr int kStageBytes = 2 * kKeyBytes;  // keys and values
  static constexpr int kQueriesAt = kKeepsQueries ? kQueryBytes : 0, kDOutAt = kQueryBytes - kQueriesAt;
  static constexpr int kStagesAt = kKeepsQueries ? kQueryBytes : 2 * kQueryBytes;
  static constexpr int kStatisticsAt = kStagesAt + 2 * kStageBytes;
  static constexpr int kSharedBytes = kStatisticsAt + kQueries * static_cast<int>(sizeof(RowStatistics));
  static_assert(kQueriesAt + kQueryBytes <= kStatisticsAt && kSharedBytes <= kMostSharedBytes);
};

// For queries (rows) and keys: replaces d_p by d_s = p * (d_p - delta).
template <int kM, int kN>
__device__ void score_gradient_by_query(const float (&scores)[kM][kN][4], float (&d_p)[kM][kN][4],
                                        const RowStatistics* statistics, float scale_log2) {
  const int lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const RowStatistics row = statistics[m * 16 + half * 8 + lane / 4];
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int e = 2 * half; e < 2 * half + 2; ++e) {
          const float p = exp2_approximate(fmaf(scores[m][n][e], scale_log2, -row.lse_log2));
          d_p[m][n][e] = p * (d_p[m][n][e] - row.delta);
        }
      }
    }
  }
}

template <int D, Mask kMask>
__global__ void __launch_bounds__(kThreads, 2)
    query_gradient_kernel(const BFloat16* qkv, const int32_t* first_key, const BFloat16* d_out,
                          const RowStatistics* statistics, GradientOutput<BFloat16> output, AttentionDims dims,
                          int section_heads, float scale) {
  using Tiling = QueryTiling<D>;
  constexpr int kM = Tiling::kM, kKeys = Tiling::kKeys;
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

  const uint32_t base = shared_address(shared), stages = base + Tiling::kStagesAt;
  const auto load_stage = [&](int stage, int key_begin) {
    const uint32_t tile = stages + stage * Tiling::kStageBytes;
    load_tile_async<D, kKeys, kThreads>(tile, k, stride, key_begin, dims.S, width);
    load_tile_async<D, kKeys, kThreads>(tile + Tiling::kKeyBytes, v, stride, key_begin, dims.S, width);
    cp_async_commit();
  };
  load_tile_async<D, Tiling::kQueries, kThreads>(base + Tiling::kQueriesAt, qkv + dims.qkv_row(b, 0, h), stride,
                                                 query_begin, dims.S, width);
  load_tile_async<D, Tiling::kQueries, kThreads>(base + Tiling::kDOutAt, d_out + dims.out_row(b, 0, h),
                                                 dims.out_stride(), query_begin, dims.S, width);
  auto* const tile_statistics = reinterpret_cast<RowStatistics*>(shared + Tiling::kStatisticsAt);
  load_statistics_async<Tiling::kQueries, kThreads>(tile_statistics, statistics + dims.query(b, 0, h), query_begin,
                                                    dims.S);
  const uint32_t rows = base + warp_row * kRowBytes<D> + lane_offset<D>();
  [[maybe_unused]] uint32_t q[kM][D / 16][4];
  if constexpr (Tiling::kKeepsQueries) {
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    load_rows<D>(q, rows + Tiling::kQueriesAt);
    __syncthreads();  // all warps have their queries: their place is free for keys and values
  }
  load_stage(0, key_start);

  float d_q[kM][D / 8][4];
  clear(d_q);
  int stage = 0;
  for (int key_begin = key_start; key_begin < key_end; key_begin += kKeys) {
    cp_async_wait<0>();  // this stage is here, and the other warps are done with the other
    __syncthreads();
    if (key_begin + kKeys < key_end) load_stage(1 - stage, key_begin + kKeys);
    const bool sees_keys = (kSeesAll ? warp_begin < dims.S : key_begin < warp_begin + Tiling::kWarpQueries) &&
                           (!kDocuments || first[min(warp_begin, dims.S - 1)] < key_begin + kKeys);
    if (sees_keys) {
      const uint32_t stage_tile = stages + stage * Tiling::kStageBytes;
      const uint32_t right = stage_tile + lane_offset_transposed<D>();
      float scores[kM][kKeys / 8][4], d_s[kM][kKeys / 8][4];
      uint32_t packed[kM][kKeys / 16][4];
      clear(scores);
      if constexpr (Tiling::kKeepsQueries) {
        multiply_transposed<D>(scores, q, {right, 0});
      } else {
        multiply_transposed<D>(scores, {rows, Tiling::kQueriesAt}, {right, 0});
      }
      if (!kSeesAll && key_begin + kKeys > warp_begin + 1) mask_later_keys<false>(scores, warp_begin - key_begin);
      if (kSeesAll && key_begin + kKeys > dims.S) mask_missing_keys(scores, dims.S - key_begin);
      if (kDocuments && key_begin < first[min(warp_begin + Tiling::kWarpQueries, dims.S) - 1]) {
        mask_earlier_keys<false>(scores, first + warp_begin, dims.S - 1 - warp_begin, key_begin);
      }
      clear(d_s);
      multiply_transposed<D>(d_s, {rows, Tiling::kDOutAt}, {right, Tiling::kKeyBytes});
      score_gradient_by_query(scores, d_s, tile_statistics + warp_row, scale * kLog2E);
      pack_rows(d_s, packed);
      multiply<D>(d_q, packed, {stage_tile + lane_offset<D>(), 0});
    }
    stage = 1 - stage;
  }

  scale_by(d_q, scale);
  const Work work = find();
  const int num_rows = dims.S - work.begin;
  if (output.cos_sin != nullptr) rotate_back<D>(d_q, output.cos_sin, work.begin, dims.S);
  if (output.amax != nullptr) raise_to_warp_max(output.amax, max_of_rows(0.0f, d_q, num_rows));
  store_rows<D>(d_q, shared + work.warp_row * kRowBytes<D>,
                output.d_qkv + dims.qkv_row(work.b, work.begin, work.head), stride, num_rows, head_width<D>(dims));
}

template <int D, Mask kMask>
void launch_backward(CudaDevice& device, const AttentionBackward& a) {
  const AttentionDims dims(a);
  const BFloat16 *const qkv = a.qkv.as<BFloat16>(), *const d_out = a.d_out.as<BFloat16>();
  auto* const statistics = static_cast<RowStatistics*>(device.workspace("attention_backward", workspace_of(a)));
  compute_row_statistics(device, a, statistics);

  const auto queue = [&](auto* kernel, unsigned threads, int shared_bytes, int tile_rows, int heads,
                         int64_t bytes_per_head) {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
          "attention_backward");
    launch(device, "attention_backward", kernel, {ceil_div(dims.S, tile_rows) * heads, threads, shared_bytes}, qkv,
           first_keys(a), d_out, statistics, GradientOutput<BFloat16>(a), dims,
           heads_per_section(heads, bytes_per_head), a.scale);
  };
  const int64_t head_bytes = int64_t{2} * dims.S * kRowBytes<D>;  // of two tensors: q and d_out, or k and v
  using Keys = KeyTiling<D>;
  queue(key_value_gradient_kernel<D, kMask>, Keys::kThreads, Keys::kSharedBytes, Keys::kKeys, dims.B * dims.Hkv,
        head_bytes * dims.group());
  queue(query_gradient_kernel<D, kMask>, kThreads, QueryTiling<D>::kSharedBytes, QueryTiling<D>::kQueries,
        dims.B * dims.H, head_bytes / dims.group());
}

}  // namespace

void compute_row_statistics(CudaDevice& device, const AttentionBackward& a, RowStatistics* statistics) {
  const AttentionDims dims(a);
  with_mma_form(a, [&](auto D, auto) {
    const int64_t rows_per_block = kThreads / (kTileWidth<D()> / 8);
    const int64_t blocks = ceil_div(a.qkv.dim[0] * dims.H, rows_per_block);
    launch(device, "attention_backward", row_statistics_kernel<D()>, {blocks, kThreads}, a.out.as<BFloat16>(),
           a.d_out.as<BFloat16>(), a.lse.as<float>(), statistics, dims);
  });
}

void attention_backward_mma(CudaDevice& device, const AttentionBackward& a) {
  with_mma_form(a, [&](auto D, auto mask) { launch_backward<D(), mask()>(device, a); });
}

}  // namespace parka::cuda
