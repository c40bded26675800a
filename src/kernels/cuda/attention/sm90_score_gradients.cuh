#pragma once
#include <cstdint>

#include "kernels/cuda/attention/sm90_attention.cuh"
#include "kernels/op/workspace.h"

// Score gradients, which the kernel of d_k and d_v stores in scratch memory for the kernel of d_q, and the barriers
// of all kernels of attention's backward pass.
namespace parka::cuda::sm90 {

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
    mbarrier_init_fence();
  }
};

// Writes a warp's 16 rows of blocks of score gradients, double-buffered in shared memory.
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

#endif  // PARKA_SM90_CODE

}  // namespace parka::cuda::sm90
