#pragma once
#include <cstdint>
#include <type_traits>

#include <cuda.h>

#include "core/number_formats.h"
#include "kernels/cuda/ptx/mma.cuh"

// PTX for compute capability 9.0: wgmma, products of a warpgroup (4 warps) of operands in shared memory; bulk
// copies (TMA) of whole tiles; mbarriers, which signal their completion; and setmaxnreg, which moves registers.
//
// A tile of C bf16 columns lies in shared memory as C / 64 blocks of rows of 128 bytes. In each row the copy
// permutes the 16-byte chunks (chunk ^ row % 8), the 128-byte swizzle. A tile begins at a multiple of 1024 bytes.
namespace parka::cuda {

// Kernels whose body is compiled only for these GPUs put it between #if and #endif on this.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define PARKA_SM90_CODE 1
#else
#define PARKA_SM90_CODE 0
#endif

constexpr int kBlockRowBytes = 128, kBlockColumns = 64;

// ---- Host: tensor maps for bulk copies ----

// Rows of a [B, S, columns] bf16 tensor, in boxes of `box_rows` rows of a sequence and 64 columns. Copies fill rows
// past the end of a sequence with zeros.
CUtensorMap make_tile_map(const BFloat16* x, int64_t columns, int64_t S, int64_t B, int box_rows);

#if PARKA_SM90_CODE

// ---- mbarriers: barriers in shared memory ----
// An mbarrier completes a phase after `count` arrivals and all expected bytes. Phases alternate in parity; the
// first has parity 0.

__device__ inline void mbarrier_init(uint32_t barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(barrier), "r"(count) : "memory");
}
// Makes initialised barriers visible to bulk copies.
__device__ inline void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
}
__device__ inline void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];\n" ::"r"(barrier) : "memory");
}
// Arrives, and adds to the bytes that the phase waits for.
__device__ inline void mbarrier_expect_tx(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(barrier), "r"(bytes) : "memory");
}
// Arrives once all copies that this thread started with cp_async_* are complete.
__device__ inline void mbarrier_arrive_after_cp_async(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];\n" ::"r"(barrier) : "memory");
}
// Returns once the phase of this parity has completed, or is over: for parity 1 a new barrier's is.
__device__ inline void mbarrier_wait(uint32_t barrier, unsigned parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// ---- Copies ----

// Starts the copy of one box to a block of a tile; its bytes are reported to the barrier.
__device__ inline void copy_box_async(uint32_t target, const CUtensorMap& map, int column, int row, int sequence,
                                      uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], "
      "[%5];\n" ::"r"(target),
      "l"(&map), "r"(column), "r"(row), "r"(sequence), "r"(barrier)
      : "memory");
}

// The same for a tile of D columns and kRows rows, the rows of a box of the map.
template <int D, int kRows>
__device__ inline void copy_tile_async(uint32_t target, const CUtensorMap& map, int column, int row, int sequence,
                                       uint32_t barrier) {
#pragma unroll
  for (int block = 0; block < D / kBlockColumns; ++block) {
    copy_box_async(target + block * kRows * kBlockRowBytes, map, column + block * kBlockColumns, row, sequence,
                   barrier);
  }
}

// Starts the copy of `bytes` contiguous bytes. Their number and the addresses are multiples of 16.
__device__ inline void copy_bytes_async(uint32_t target, const void* source, int bytes, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n" ::"r"(target),
      "l"(source), "r"(bytes), "r"(barrier)
      : "memory");
}
// ---- Registers per thread of this warpgroup: releases or acquires them until it has kCount ----

template <int kCount>
__device__ inline void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(kCount));
}
template <int kCount>
__device__ inline void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(kCount));
}

// ---- wgmma: products of a warpgroup ----
// Accumulators c[0][n][4] have 64 rows, 16 per warp, in the layout of mma_m16n8k16; so has a left operand in
// registers. wgmma is asynchronous: its registers must not be used before wgmma_wait_group. After that,
// fence_operand keeps the compiler from using them earlier.

__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory"); }
__device__ inline void wgmma_commit_group() { asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory"); }
template <int kPending>
__device__ inline void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(kPending) : "memory");
}
template <typename Sum, int kN>
__device__ inline void fence_operand(Sum (&c)[1][kN][4]) {
#pragma unroll
  for (int n = 0; n < kN; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if constexpr (std::is_same_v<Sum, int>) {
        asm volatile("" : "+r"(c[0][n][e])::"memory");
      } else {
        asm volatile("" : "+f"(c[0][n][e])::"memory");
      }
    }
  }
}

// The matrix descriptor of an operand in shared memory. To step between columns or rows, add bytes / 16.
//   kRowsSummed false: the tile's columns are summed over, its rows are the product's rows or columns.
//   kRowsSummed true: the tile's rows are summed over; block_bytes is the distance between its blocks of 64
//   columns.
template <bool kRowsSummed>
__device__ inline uint64_t operand_descriptor(uint32_t address, uint32_t block_bytes) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62, kEightRows = 8 * kBlockRowBytes;
  const uint64_t leading = kRowsSummed ? block_bytes / 16 : 1;
  return kSwizzle128 | (kEightRows / 16) << 32 | leading << 16 | ((address & 0x3ffff) >> 4);
}

#define PARKA_C4(n) "+f"(c[0][n][0]), "+f"(c[0][n][1]), "+f"(c[0][n][2]), "+f"(c[0][n][3])
#define PARKA_C32 \
  PARKA_C4(0), PARKA_C4(1), PARKA_C4(2), PARKA_C4(3), PARKA_C4(4), PARKA_C4(5), PARKA_C4(6), PARKA_C4(7)
#define PARKA_C64                                                                                            \
  PARKA_C32, PARKA_C4(8), PARKA_C4(9), PARKA_C4(10), PARKA_C4(11), PARKA_C4(12), PARKA_C4(13), PARKA_C4(14), \
      PARKA_C4(15)
#define PARKA_R32                                                                                             \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, " \
  "%23, %24, %25, %26, %27, %28, %29, %30, %31"
#define PARKA_R64                                                                                          \
  PARKA_R32                                                                                                \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, " \
  "%52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

// c += A B^T, or c = A B^T, for A [64, 16] and B [8 kN, 16], both with their columns summed over.
template <int kN>
__device__ inline void wgmma_step(float (&c)[1][kN][4], uint64_t a, uint64_t b, bool accumulate) {
  static_assert(kN == 8 || kN == 16);
  if constexpr (kN == 8) {
    asm volatile(
        "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" PARKA_R32
        "}, %32, %33, accumulate, 1, 1, 0, 0;\n}\n"
        : PARKA_C32
        : "l"(a), "l"(b), "r"(int{accumulate}));
  } else {
    asm volatile(
        "{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" PARKA_R64
        "}, %64, %65, accumulate, 1, 1, 0, 0;\n}\n"
        : PARKA_C64
        : "l"(a), "l"(b), "r"(int{accumulate}));
  }
}

// c += A B for A [64, 16] in registers and B [16, 8 kN], with its rows summed over.
template <int kN>
__device__ inline void wgmma_step(float (&c)[1][kN][4], const uint32_t (&a)[4], uint64_t b) {
  static_assert(kN == 8 || kN == 16);
  if constexpr (kN == 8) {
    asm volatile(
        "{\n.reg .pred accumulate;\nsetp.eq.b32 accumulate, 0, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" PARKA_R32
        "}, {%32, %33, %34, %35}, %36, accumulate, 1, 1, 1;\n}\n"
        : PARKA_C32
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
  } else {
    asm volatile(
        "{\n.reg .pred accumulate;\nsetp.eq.b32 accumulate, 0, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" PARKA_R64
        "}, {%64, %65, %66, %67}, %68, accumulate, 1, 1, 1;\n}\n"
        : PARKA_C64
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
  }
}

#undef PARKA_C4
#undef PARKA_C32
#undef PARKA_C64
#undef PARKA_R32
#undef PARKA_R64

// A tile, or some of its rows, from a multiple of 8 on: where it begins and the distance between its blocks.
struct SharedTile {
  uint32_t address;
  uint32_t block_bytes;
  __device__ SharedTile rows(int begin) const { return {address + begin * kBlockRowBytes, block_bytes}; }
};

// Starts c = A B^T for A [64, D] and B [8 kN, D].
template <int D, int kN>
__device__ inline void start_product_transposed(float (&c)[1][kN][4], SharedTile a_tile, SharedTile b_tile) {
  const uint64_t a = operand_descriptor<false>(a_tile.address, 0), b = operand_descriptor<false>(b_tile.address, 0);
#pragma unroll
  for (int k = 0; k < D / 16; ++k) {
    const int within = k % 4 * 32;  // bytes of a row; four steps make a block
    wgmma_step(c, a + (k / 4 * a_tile.block_bytes + within) / 16, b + (k / 4 * b_tile.block_bytes + within) / 16,
               k > 0);
  }
}

// Starts c += A B for the first 16 kSteps columns of A [64, 16 kK] in registers and rows of B [16 kK, 8 kN].
template <int kSteps, int kN, int kK>
__device__ inline void start_product_of_first(float (&c)[1][kN][4], const uint32_t (&a)[1][kK][4],
                                              SharedTile b_tile) {
  static_assert(kSteps <= kK);
  const uint64_t b = operand_descriptor<true>(b_tile.address, b_tile.block_bytes);
#pragma unroll
  for (int k = 0; k < kSteps; ++k) wgmma_step(c, a[0][k], b + k * 16 * kBlockRowBytes / 16);
}

// The same for all of them.
template <int kN, int kK>
__device__ inline void start_product(float (&c)[1][kN][4], const uint32_t (&a)[1][kK][4], SharedTile b_tile) {
  start_product_of_first<kK>(c, a, b_tile);
}

#endif  // PARKA_SM90_CODE

}  // namespace parka::cuda
