#pragma once
#include <cstdint>

#include "kernels/cuda/attention/sm90_attention.cuh"
#include "kernels/op/workspace.h"

// Score gradients, which the kernel of d_k and d_v stores in scratch memory for the kernel of d_q, and the barriers
// of all kernels of attention's backward pass.
namespace parka::cuda::sm90 {

// Score gradients of the query heads of a pass, in bf16. A pair is 64 queries of a head by two blocks of 64 keys.
// Of a block, 16 keys after the other, 16 queries after the other, it has what the lanes of a warp hold, 16 bytes
// of each: a left operand of mma_m16n8k16 whose rows are keys. So the kernel that stores them needs no shared
// memory for it, of whose bandwidth its products take most.
struct ScoreGradients {
  unsigned char* pairs = nullptr;  // null: they are not kept
  int begin_head = 0;              // of the heads of all sequences
  int64_t head_bytes = 0;

  static constexpr int kBlockBytes = static_cast<int>(kScorePairBytes) / 2;
  static constexpr int kFragmentBytes = kWarpSize * 16;  // of 16 keys and 16 queries
  static constexpr int kWarpBytes = kFragmentBytes * (static_cast<int>(kScoreQueries) / 16);  // and 64 queries
  __device__ unsigned char* pair(int head, int query_tile, int key_pair) const {
    return pairs + (head - begin_head) * head_bytes + (score_pairs(query_tile) + key_pair) * kScorePairBytes;
  }
  __device__ unsigned char* block(int head, int query_tile, int key_block) const {
    return pair(head, query_tile, key_block / 2) + key_block % 2 * kBlockBytes;
  }
};

#if PARKA_SM90_CODE

// The places of the tile that a block works on, and of those that it passes over.
template <typename Layout>
struct Barriers {
  Stages<1> own;
  Stages<Layout::kStages> passing;

  __device__ explicit Barriers(uint32_t at) : own(at), passing(at + Stages<1>::kBytes) {}
  __device__ void init(int passing_producers) const {
    own.init(1);
    passing.init(passing_producers);
    mbarrier_init_fence();
  }
};

// Stores a warp's 16 keys of a block of score gradients as they lie in registers.
__device__ __forceinline__ void store_score_gradients(const uint32_t (&d_s)[1][kScoreQueries / 16][4],
                                                      unsigned char* target) {
  target += threadIdx.x % kWarpSize * sizeof(uint4);
#pragma unroll
  for (int k = 0; k < kScoreQueries / 16; ++k) {
    *reinterpret_cast<uint4*>(target + k * ScoreGradients::kFragmentBytes) =
        make_uint4(d_s[0][k][0], d_s[0][k][1], d_s[0][k][2], d_s[0][k][3]);
  }
}

// Loads what a warp stored for 16 keys and 16 queries, as a left operand whose rows are queries.
__device__ __forceinline__ void load_score_gradients(uint32_t (&d_s)[4], const unsigned char* source) {
  const uint4 x = *reinterpret_cast<const uint4*>(source + threadIdx.x % kWarpSize * sizeof(uint4));
  d_s[0] = transpose_matrix(x.x);
  d_s[1] = transpose_matrix(x.z);
  d_s[2] = transpose_matrix(x.y);
  d_s[3] = transpose_matrix(x.w);
}

#endif  // PARKA_SM90_CODE

}  // namespace parka::cuda::sm90
