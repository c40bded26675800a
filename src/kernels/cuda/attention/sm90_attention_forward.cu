#include <type_traits>

#include "kernels/cuda/attention/attention_paths.cuh"
#include "kernels/cuda/attention/sm90_attention.cuh"
#include "kernels/op/workspace.h"

// FlashAttention-3: a block takes a tile of queries and iterates over the keys before them. Its consumers take
// turns at starting products (ping-pong), so that those of one run while the other computes its exponentials. Each
// consumer starts the scores of a tile together with the product of probabilities and values of the previous tile.
namespace parka::cuda {
namespace sm90 {

constexpr int kForwardStages = 2;

// Offsets into shared memory.
template <int D>
struct ForwardLayout {
  static constexpr int kKeys = 128, kStages = kForwardStages;
  static constexpr int kTileBytes = kTileRows * kRowBytes<D>;  // of queries, keys, values or results
  static constexpr int kBlockBytes = kTileRows * kBlockRowBytes;
  static constexpr int kKeysAt = kTileBytes, kValuesAt = kKeysAt + kStages * kTileBytes;
  static constexpr int kOutAt = kValuesAt + kStages * kTileBytes;
  static constexpr int kBarriersAt = kOutAt + kTileBytes;
  static constexpr int kTileNumberAt = kBarriersAt + 16 + kStages * 32;
  static constexpr int kBytes = kTileNumberAt + 16;
  static_assert(kKeys == kTileRows);
};

}  // namespace sm90

namespace {

using namespace sm90;

#if PARKA_SM90_CODE

struct ForwardBarriers {
  Stages<kForwardStages> keys, values;
  Stages<1> queries;

  __device__ explicit ForwardBarriers(uint32_t at)
      : keys(at), values(at + Stages<kForwardStages>::kBytes), queries(at + 2 * Stages<kForwardStages>::kBytes) {}
  __device__ void init() const {
    keys.init(1);
    values.init(1);
    queries.init(1);
    mbarrier_init_fence();
  }
};

// The producer's part. Consumers learn the number of their tile together with its queries.
template <int D, bool kFirstKeys>
__device__ __forceinline__ void copy_tiles(const CUtensorMap& qkv_map, const int32_t* first_key,
                                           unsigned char* shared, const AttentionDims& dims, const TileOrder& order,
                                           unsigned* num_taken, const ForwardBarriers& barriers) {
  using Layout = ForwardLayout<D>;
  const uint32_t tiles = shared_address(shared);
  unsigned slot = 0;
  take_tiles<true, 1>(order, num_taken, barriers.queries, shared + Layout::kTileNumberAt, [&](Tile tile) {
    const int k_column = (dims.H + tile.head / dims.group()) * D, v_column = k_column + dims.Hkv * D;
    mbarrier_expect_tx(barriers.queries.full, Layout::kTileBytes);
    copy_tile_async<D, kTileRows>(tiles, qkv_map, tile.head * D, tile.begin, tile.b, barriers.queries.full);
    const int last_begin = FirstKeys<kFirstKeys>(first_key, dims, tile.b).first_tile(tile.begin);
    int key_begin = tile.begin;
    do {  // the first tile is there, so that its copy does not wait for last_begin
      const uint32_t place = slot % Layout::kStages * Layout::kTileBytes;
      const uint32_t keys_full = barriers.keys.full_at(slot), values_full = barriers.values.full_at(slot);
      barriers.keys.wait_empty(slot);
      mbarrier_expect_tx(keys_full, Layout::kTileBytes);
      copy_tile_async<D, Layout::kKeys>(tiles + Layout::kKeysAt + place, qkv_map, k_column, key_begin, tile.b,
                                        keys_full);
      barriers.values.wait_empty(slot);
      mbarrier_expect_tx(values_full, Layout::kTileBytes);
      copy_tile_async<D, Layout::kKeys>(tiles + Layout::kValuesAt + place, qkv_map, v_column, key_begin, tile.b,
                                        values_full);
      key_begin -= Layout::kKeys;
      ++slot;
    } while (key_begin >= last_begin);
  });
}

// For each of a lane's two rows: the largest score so far, before scaling; this lane's part of the sum of
// exp2(scale_log2 * (score - max)); and the factor that rescales results for an earlier maximum.
struct RowState {
  float max[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f}, correction[2];
};

// Turns scores into exp2(scale_log2 * (score - max)). Each row has seen a finite score: its query's own key.
template <int kN>
__device__ __forceinline__ void update_softmax(float (&scores)[1][kN][4], RowState& state, float scale_log2) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float max = state.max[half];
#pragma unroll
    for (int n = 0; n < kN; ++n) max = fmaxf(max, fmaxf(scores[0][n][2 * half], scores[0][n][2 * half + 1]));
    max = fmaxf(max, __shfl_xor_sync(kFullWarp, max, 1));
    max = fmaxf(max, __shfl_xor_sync(kFullWarp, max, 2));
    state.correction[half] = exp2_approximate((state.max[half] - max) * scale_log2);
    state.max[half] = max;
    const float offset = max * scale_log2;
    float sum = state.sum[half] * state.correction[half];
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int e = 2 * half; e < 2 * half + 2; ++e) {
        scores[0][n][e] = exp2_approximate(fmaf(scores[0][n][e], scale_log2, -offset));
        sum += scores[0][n][e];
      }
    }
    state.sum[half] = sum;
  }
}

template <int kN>
__device__ __forceinline__ void scale_rows(float (&c)[1][kN][4], const float (&factor)[2]) {
#pragma unroll
  for (int n = 0; n < kN; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) c[0][n][e] *= factor[e / 2];
  }
}

// Divides the rows by their sums and stores the logs of those, of which the first `count` exist.
template <int kN>
__device__ __forceinline__ void finish_rows(RowState& state, float (&out)[1][kN][4], float scale_log2, float* lse,
                                            int count) {
  const int lane = threadIdx.x % kWarpSize;
  float inverse[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float sum = state.sum[half];
    sum += __shfl_xor_sync(kFullWarp, sum, 1);
    sum += __shfl_xor_sync(kFullWarp, sum, 2);
    inverse[half] = 1.0f / sum;
    const int row = half * 8 + lane / 4;
    if (lane % 4 == 0 && row < count) lse[row] = (state.max[half] * scale_log2 + log2f(sum)) * kLn2;
  }
  scale_rows(out, inverse);
}

// The first keys of a lane's two rows and of the last row of its warp's, loaded while the scores are computed.
template <bool kGiven>
struct LaneFirstKeys {
  int of_row[2], of_last;

  __device__ LaneFirstKeys(const FirstKeys<kGiven>& keys, int warp_begin) {
    if constexpr (kGiven) {
      const int row = warp_begin + static_cast<int>(threadIdx.x) % kWarpSize / 4;
      of_row[0] = keys.of_row[min(row, keys.S - 1)];
      of_row[1] = keys.of_row[min(row + 8, keys.S - 1)];
      of_last = keys.of_row[min(warp_begin + kWarpRows, keys.S) - 1];
    }
  }

  // Hides what comes before them, of scores of keys from `key_begin` on.
  template <int kN>
  __device__ void mask(float (&scores)[1][kN][4], int key_begin) const {
    if constexpr (kGiven) {
      if (key_begin >= of_last) return;
      const int key = key_begin + static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (key + n * 8 + e % 2 < of_row[e / 2]) scores[0][n][e] = -INFINITY;
        }
      }
    }
  }
};

// The results of one tile of queries, in a consumer. `slot` counts tiles of keys.
template <int D, bool kFirstKeys>
__device__ __forceinline__ void attend(float (&out)[1][D / 8][4], RowState& state, int consumer, int tile_begin,
                                       const FirstKeys<kFirstKeys>& first_keys, uint32_t shared,
                                       const ForwardBarriers& barriers, const PingPongBarrier<>& ping_pong,
                                       unsigned& slot, float scale_log2) {
  using Layout = ForwardLayout<D>;
  const SharedTile queries = SharedTile{shared, Layout::kBlockBytes}.rows(consumer * kConsumerRows);
  const auto keys = [&](unsigned at) {
    return SharedTile{shared + Layout::kKeysAt + at % Layout::kStages * Layout::kTileBytes, Layout::kBlockBytes};
  };
  const auto values = [&](unsigned at) {
    return SharedTile{shared + Layout::kValuesAt + at % Layout::kStages * Layout::kTileBytes, Layout::kBlockBytes};
  };
  const int last_begin = first_keys.first_tile(tile_begin), seen_from = first_keys.first_seen_by_all(tile_begin);
  const LaneFirstKeys<kFirstKeys> lane_keys(first_keys, tile_begin + warp_row());
  uint32_t p[1][Layout::kKeys / 16][4];
  {
    float scores[1][Layout::kKeys / 8][4];
    barriers.keys.wait_full(slot);
    ping_pong.wait();
    wgmma_fence();
    start_product_transposed<D>(scores, queries, keys(slot));
    wgmma_commit_group();
    ping_pong.pass();
    wgmma_wait_group<0>();
    fence_operand(scores);
    barriers.keys.release(slot);
    mask_later_keys<false>(scores, warp_row());
    lane_keys.mask(scores, tile_begin);
    update_softmax(scores, state, scale_log2);
    pack_rows(scores, p);
  }
  int key_begin = tile_begin - Layout::kKeys;
  const auto next_tile = [&](auto hides_earlier_keys) {
    float scores[1][Layout::kKeys / 8][4];
    barriers.keys.wait_full(slot + 1);
    ping_pong.wait();
    wgmma_fence();
    start_product_transposed<D>(scores, queries, keys(slot + 1));
    wgmma_commit_group();
    barriers.values.wait_full(slot);
    wgmma_fence();
    start_product(out, p, values(slot));
    wgmma_commit_group();
    ping_pong.pass();
    wgmma_wait_group<1>();
    fence_operand(scores);
    barriers.keys.release(slot + 1);
    if constexpr (hides_earlier_keys.value) lane_keys.mask(scores, key_begin);
    update_softmax(scores, state, scale_log2);
    wgmma_wait_group<0>();
    fence_operand(out);
    barriers.values.release(slot);
    scale_rows(out, state.correction);
    pack_rows(scores, p);
    key_begin -= Layout::kKeys;
    ++slot;
  };
  // In a loop of its own what all queries see needs no look at their first keys.
  while (key_begin >= seen_from) next_tile(std::false_type());
  if constexpr (kFirstKeys) {
    while (key_begin >= last_begin) next_tile(std::true_type());
  }
  barriers.queries.release(0);
  barriers.values.wait_full(slot);
  wgmma_fence();
  start_product(out, p, values(slot));
  wgmma_commit_group();
  wgmma_wait_group<0>();
  fence_operand(out);
  barriers.values.release(slot);
  ++slot;
}

template <int D, bool kFirstKeys>
__device__ __forceinline__ void consume_tiles(const int32_t* first_key, BFloat16* out, float* lse, float* out_amax,
                                              unsigned char* shared, const AttentionDims& dims,
                                              const TileOrder& order, const ForwardBarriers& barriers,
                                              float scale_log2) {
  using Layout = ForwardLayout<D>;
  const int consumer = consumer_index();
  const PingPongBarrier<> ping_pong(consumer);
  unsigned slot = 0;
  for_each_taken_tile<true>(order, barriers.queries, shared + Layout::kTileNumberAt, [&](Tile tile) {
    float acc[1][D / 8][4];
    clear(acc);
    RowState state;
    attend<D>(acc, state, consumer, tile.begin, FirstKeys<kFirstKeys>(first_key, dims, tile.b),
              shared_address(shared), barriers, ping_pong, slot, scale_log2);
    const int begin = tile.begin + warp_row(), rows = dims.S - begin;
    finish_rows(state, acc, scale_log2, lse + dims.query(tile.b, begin, tile.head), rows);
    if (out_amax != nullptr) raise_to_warp_max(out_amax, max_of_rows(0.0f, acc, rows));
    store_rows<D>(acc, shared + Layout::kOutAt + warp_row() * kRowBytes<D>,
                  out + dims.out_row(tile.b, begin, tile.head), dims.out_stride(), rows);
  });
  ping_pong.end();
}

#endif  // PARKA_SM90_CODE

template <int D, bool kFirstKeys>
__global__ void __launch_bounds__(kThreads, 1)
    attention_forward_sm90_kernel(const __grid_constant__ CUtensorMap qkv_map, const int32_t* first_key,
                                  BFloat16* out, float* lse, float* out_amax, AttentionDims dims, float scale_log2,
                                  TileOrder order, unsigned* num_taken) {
#if PARKA_SM90_CODE
  extern __shared__ __align__(1024) unsigned char shared[];
  const ForwardBarriers barriers(shared_address(shared) + ForwardLayout<D>::kBarriersAt);
  if (threadIdx.x == 0) barriers.init();
  __syncthreads();
  if (threadIdx.x < kWarpgroup) {
    setmaxnreg_dec<kProducerRegisters>();
    if (threadIdx.x == 0) copy_tiles<D, kFirstKeys>(qkv_map, first_key, shared, dims, order, num_taken, barriers);
  } else {
    setmaxnreg_inc<kConsumerRegisters>();
    consume_tiles<D, kFirstKeys>(first_key, out, lse, out_amax, shared, dims, order, barriers, scale_log2);
  }
#endif
}

template <int D, bool kFirstKeys>
void launch_forward(CudaDevice& device, const AttentionForward& a) {
  constexpr const char* kOp = "attention_forward";
  const AttentionDims dims(a);
  const int64_t head_bytes = int64_t{2} * dims.S * kRowBytes<D> / dims.group();  // keys and values
  const TileOrder order(dims, dims.H, head_bytes, device.num_multiprocessors());
  float* const out_amax = a.out_amax.empty() ? nullptr : a.out_amax.as<float>();
  if (out_amax != nullptr) check(cudaMemsetAsync(out_amax, 0, sizeof(float), device.stream()), kOp);
  auto* const num_taken = static_cast<unsigned*>(device.workspace(kOp, workspace_of(a)));
  check(cudaMemsetAsync(num_taken, 0, sizeof(unsigned), device.stream()), kOp);
  launch_over_tiles(device, kOp, attention_forward_sm90_kernel<D, kFirstKeys>, ForwardLayout<D>::kBytes, order,
                    num_taken, make_tile_map(a.qkv.as<BFloat16>(), dims.qkv_stride(), dims.S, dims.B, kTileRows),
                    first_keys(a), a.out.as<BFloat16>(), a.lse.as<float>(), out_amax, dims, a.scale * kLog2E);
}

}  // namespace

void attention_forward_sm90(CudaDevice& device, const AttentionForward& a) {
  const bool given = !a.first_key.empty();
  if (AttentionDims(a).D == 64) {
    given ? launch_forward<64, true>(device, a) : launch_forward<64, false>(device, a);
  } else {
    given ? launch_forward<128, true>(device, a) : launch_forward<128, false>(device, a);
  }
}

}  // namespace parka::cuda
