#pragma once
#include <cstdint>

#include "kernels/cuda/ptx/sm90.cuh"

// PTX of compute capability 9.0 for the blocks of a cluster, which run at the same time and reach each other's
// shared memory: what lies there at one address in all of them is named by that address and the block's rank. Rank
// and barrier of a cluster are CUDA's own functions (__clusterRelativeBlockRank() and others).
namespace parka::cuda {

#if PARKA_SM90_CODE

// Arrives at the barrier of the block of that rank. It orders memory for this block alone: what this thread wrote
// need not be seen there yet. It suffices to say that wgmma whose end was waited for has read shared memory. A
// release to the cluster would also wait for all memory operations of the thread (MEMBAR.GPU).
__device__ inline void mbarrier_arrive_at(uint32_t barrier, uint32_t rank) {
  asm volatile(
      "{\n"
      ".reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];\n"
      "}\n" ::"r"(barrier),
      "r"(rank)
      : "memory");
}

// Starts the copy of one box of a two-dimensional map to the blocks whose bits are set in `ranks`, to the same
// address in each; its bytes are reported to the barrier of each.
__device__ inline void copy_box_to_blocks_async(uint32_t target, const CUtensorMap& map, int column, int row,
                                                uint32_t barrier, uint16_t ranks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%2, %3}], [%4], %5;\n" ::"r"(target),
      "l"(&map), "r"(column), "r"(row), "r"(barrier), "h"(ranks)
      : "memory");
}

#endif  // PARKA_SM90_CODE

}  // namespace parka::cuda
