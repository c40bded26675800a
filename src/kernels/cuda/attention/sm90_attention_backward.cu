#include "kernels/cuda/attention/attention_paths.cuh"
#include "kernels/cuda/attention/sm90_key_gradient.cuh"
#include "kernels/cuda/attention/sm90_query_gradient.cuh"
#include "kernels/op/workspace.h"

// As in attention_backward.cu, one kernel sums d_k and d_v of tiles of keys over all queries, and one sums d_q of
// tiles of queries over all keys. Nothing is summed across blocks, so equal input gives equal bits. While one
// consumer computes score gradients, the other's products run.
//
// With scratch memory the first kernel stores its score gradients there. Then d_q takes one product, five in all,
// instead of three, seven in all. The numbers are the same, rounded to bf16 for the products. Writing and reading 2
// bytes for 256 multiplications saved takes as long as those at a high clock, and less at a lower one.
namespace parka::cuda {
namespace {

using namespace sm90;

template <int D, bool kFirstKeys>
__global__ void __launch_bounds__(kThreads, 1)
    key_value_gradient_sm90_kernel(const __grid_constant__ CUtensorMap qkv_map,
                                   const __grid_constant__ CUtensorMap qkv_query_map,
                                   const __grid_constant__ CUtensorMap d_out_map, const int32_t* first_key,
                                   const RowStatistics* statistics,
                                   const __grid_constant__ GradientOutput<BFloat16> output, AttentionDims dims,
                                   float scale, ScoreGradients scores, TileOrder order, unsigned* num_taken) {
#if PARKA_SM90_CODE
  extern __shared__ __align__(1024) unsigned char shared[];
  const Barriers<KeyLayout<D>> barriers(shared_address(shared) + KeyLayout<D>::kBarriersAt);
  if (threadIdx.x == 0) barriers.init(1 + kWarpSize);
  __syncthreads();
  if (threadIdx.x < kWarpgroup) {
    setmaxnreg_dec<kProducerRegisters>();
    if (threadIdx.x < kWarpSize) {
      copy_key_tiles<D, kFirstKeys>(qkv_map, qkv_query_map, d_out_map, first_key, statistics, shared, dims, order,
                                    num_taken, barriers);
    }
  } else {
    setmaxnreg_inc<kConsumerRegisters>();
    sum_over_queries<D, kFirstKeys>(output, first_key, shared, dims, order, barriers, scale, scores);
  }
#endif
}

template <int D, bool kFirstKeys>
__global__ void __launch_bounds__(kThreads, 1)
    query_gradient_sm90_kernel(const __grid_constant__ CUtensorMap qkv_map,
                               const __grid_constant__ CUtensorMap d_out_map, const int32_t* first_key,
                               const RowStatistics* statistics,
                               const __grid_constant__ GradientOutput<BFloat16> output, AttentionDims dims,
                               float scale, TileOrder order, unsigned* num_taken) {
#if PARKA_SM90_CODE
  extern __shared__ __align__(1024) unsigned char shared[];
  const Barriers<QueryLayout<D>> barriers(shared_address(shared) + QueryLayout<D>::kBarriersAt);
  if (threadIdx.x == 0) barriers.init(1);
  __syncthreads();
  if (threadIdx.x < kWarpgroup) {
    setmaxnreg_dec<kProducerRegisters>();
    if (threadIdx.x == 0)
      copy_query_tiles<D, kFirstKeys>(qkv_map, d_out_map, first_key, shared, dims, order, num_taken, barriers);
  } else {
    setmaxnreg_inc<kConsumerRegisters>();
    sum_over_keys<D, kFirstKeys>(output, first_key, statistics, shared, dims, order, barriers, scale);
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
    setmaxnreg_dec<kProducerRegisters>();
    if (threadIdx.x == 0) copy_score_tiles<D>(qkv_map, scores, shared, dims, order, num_taken, barriers);
  } else {
    setmaxnreg_inc<kConsumerRegisters>();
    sum_scores_over_keys<D>(output, shared, dims, order, barriers, scale);
  }
#endif
}

// How many key/value heads, with their query heads, fit into the scratch memory; 0: too few to be useful, or rows
// have first keys, with which whole tiles are skipped.
template <int D>
int64_t heads_of_pass(const AttentionBackward& a, const AttentionDims& dims) {
  if (!kKeepsScores<D> || a.scratch.empty() || !a.first_key.empty()) return 0;
  const int64_t heads = int64_t{dims.B} * dims.Hkv;
  const int64_t fit = std::min(heads, a.scratch.bytes() / (dims.group() * score_gradient_bytes(dims.S)));
  if (fit == 0 || ceil_div(heads, fit) > kAttentionMaxPasses) return 0;
  return ceil_div(heads, ceil_div(heads, fit));  // passes of one length
}

template <int D, bool kFirstKeys>
void launch_backward(CudaDevice& device, const AttentionBackward& a) {
  constexpr const char* kOp = "attention_backward";
  const AttentionDims dims(a);
  const int64_t tokens = a.qkv.dim[0];
  auto* const statistics = static_cast<RowStatistics*>(device.workspace(kOp, workspace_of(a)));
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
    launch_over_tiles(device, kOp, key_value_gradient_sm90_kernel<D, kFirstKeys>, KeyLayout<D>::kBytes, order,
                      taken, qkv_map, qkv_query_map, d_out_map, first_keys(a),
                      static_cast<const RowStatistics*>(statistics), output, dims, a.scale, scores);
  };
  const int64_t pass_heads = heads_of_pass<D>(a, dims), heads = int64_t{dims.B} * dims.Hkv;
  const int64_t passes = pass_heads == 0 ? 1 : ceil_div(heads, pass_heads);
  check(cudaMemsetAsync(num_taken, 0, static_cast<size_t>(2 * passes) * sizeof(unsigned), device.stream()), kOp);
  if constexpr (kKeepsScores<D> && !kFirstKeys) {
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
  launch_over_tiles(device, kOp, query_gradient_sm90_kernel<D, kFirstKeys>, QueryLayout<D>::kBytes, query_order,
                    num_taken + 1, qkv_map, map(a.d_out, kTileRows), first_keys(a),
                    static_cast<const RowStatistics*>(statistics), output, dims, a.scale);
}

}  // namespace

void attention_backward_sm90(CudaDevice& device, const AttentionBackward& a) {
  const bool given = !a.first_key.empty();
  if (AttentionDims(a).D == 64) {
    given ? launch_backward<64, true>(device, a) : launch_backward<64, false>(device, a);
  } else {
    given ? launch_backward<128, true>(device, a) : launch_backward<128, false>(device, a);
  }
}

}  // namespace parka::cuda
