#pragma once
#include <algorithm>
#include <cstdint>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/ptx/sm90_cluster.cuh"
#include "kernels/cuda/ptx/sm90_float8.cuh"
#include "kernels/ops/gemm/gemm.h"

// Products of E4M3 matrices on compute capability 9.0, a [M, K] and b [N, K], for kernels that make something else
// of them than a matrix in memory.
//
// A kernel is persistent and warp-specialised. Two blocks, a cluster, work side by side on tiles of 128 rows each,
// one below the other, and the same 256 rows of b, 128 of its upper and 128 of its lower half: each copies one of
// those to both. In a block
//   - two consumer warpgroups multiply, 64 rows each, and leave the product's tile in shared memory, in bf16, half
//     of its rows at a time: they hold the others in registers until they are halfway through the next tile, so
//     that shared memory has room for one more step of operands;
//   - a warp of the first warpgroup, the producer, copies tiles of a and b for them to a ring in shared memory;
//   - its other three, the finishers, make of the product what the kernel is for, while consumers are at the next.
namespace parka::cuda::sm90_float8 {

constexpr int kWarpgroup = 128;  // threads
constexpr int kConsumers = 2;    // warpgroups
constexpr int kThreads = (1 + kConsumers) * kWarpgroup;
constexpr int kWarpsOfGroup = kWarpgroup / kWarpSize, kFinisherWarps = kWarpsOfGroup - 1;
constexpr int kFinishers = kFinisherWarps * kWarpSize;
// Registers per thread. Threads start with 168 (65536 over kThreads); 120 + 2 * 192 is three times that.
constexpr int kFinisherRegisters = 120, kConsumerRegisters = 192;

constexpr int kClusterBlocks = 2;
constexpr int kTileRows = 128, kTileCols = 256, kHalfCols = kTileCols / 2;
constexpr int kConsumerRows = kTileRows / kConsumers;
constexpr int kStages = 4;

// Offsets into shared memory.
constexpr int kBytesA = kTileRows * kCodesDepth, kBytesB = kTileCols * kCodesDepth, kStageBytes = kBytesA + kBytesB;
constexpr int kOutAt = kStages * kStageBytes;  // half of the tile: kTileCols / kBlockColumns blocks
constexpr int kHalves = 2, kHalfRows = kTileRows / kHalves;
constexpr int kOutBlockBytes = kHalfRows * kBlockRowBytes;
constexpr int kBarriersAt = kOutAt + kTileCols / kBlockColumns * kOutBlockBytes;
constexpr int kSharedBytes = kBarriersAt + (2 * kStages + 2) * 8;

// The tiles of a product in the order in which clusters take them: cluster c takes those of number c, c +
// clusters... A sweep has as many rows as stay in the L2 cache, and goes over all columns.
struct TileOrder {
  unsigned pairs, across, sweep_pairs;  // pairs of tiles below each other, tiles side by side, pairs of a sweep

  // The order for the product of a [M, K] with b [2 half_cols, K].
  TileOrder(int64_t rows, int64_t half_cols, int64_t depth)
      : pairs(static_cast<unsigned>(ceil_div(rows, kClusterBlocks * kTileRows))),
        across(static_cast<unsigned>(ceil_div(half_cols, kHalfCols))) {
    constexpr int64_t kSweepBytes = int64_t{16} << 20;
    const int64_t fit = kSweepBytes / (kClusterBlocks * kTileRows * depth);
    const unsigned most = static_cast<unsigned>(std::max<int64_t>(fit, 1)), sweeps = (pairs + most - 1) / most;
    sweep_pairs = (pairs + sweeps - 1) / sweeps;
  }
  __host__ __device__ unsigned count() const { return pairs * across; }

  struct Place {
    int row, col;  // the first of the tile's, col in the upper half
  };
  __device__ Place tile(unsigned number, uint32_t rank) const {
    const unsigned sweep = number / (sweep_pairs * across), within = number - sweep * sweep_pairs * across;
    const unsigned here = min(sweep_pairs, pairs - sweep * sweep_pairs);
    const unsigned col = within / here, pair = sweep * sweep_pairs + within % here;
    return {static_cast<int>(pair * kClusterBlocks + rank) * kTileRows, static_cast<int>(col) * kHalfCols};
  }
};

// A product a b^T, as kernels get it: as a __grid_constant__.
struct Product {
  CUtensorMap a_map, b_map;
  const float *scale_a, *scale_b;
  int steps, half_cols;  // K / kCodesDepth, N / 2
  TileOrder order;

  // `a` must be one that suits_float8_tiles().
  explicit Product(const Gemm& a)
      : a_map(make_code_map(a.a.data.data, a.a.num_rows(), a.a.num_cols(), kTileRows)),
        b_map(make_code_map(a.b.data.data, a.b.num_rows(), a.b.num_cols(), kHalfCols)),
        scale_a(a.a.scale.as<float>()),
        scale_b(a.b.scale.as<float>()),
        steps(static_cast<int>(ceil_div(a.a.num_cols(), kCodesDepth))),
        half_cols(static_cast<int>(a.b.num_rows() / 2)),
        order(a.a.num_rows(), a.b.num_rows() / 2, a.a.num_cols()) {
    PARKA_REQUIRE(a.a.num_rows() <= INT32_MAX && a.b.num_rows() <= INT32_MAX && a.b.num_rows() % 2 == 0);
  }
};

// True if the device runs these kernels.
inline bool runs_on(const CudaDevice& device) { return device.has_float8_tiles(); }

// Launches kernel(product, rest...), which calls run_product().
template <typename Kernel, typename... Rest>
void launch_product(CudaDevice& device, const char* op, Kernel* kernel, const Product& product,
                    const Rest&... rest) {
  const int clusters =
      std::min(static_cast<int>(product.order.count()), device.num_multiprocessors() / kClusterBlocks);
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes), op);
  launch(device, op, kernel, {clusters * kClusterBlocks, kThreads, kSharedBytes}, product, rest...);
}

#if PARKA_SM90_CODE

__device__ inline bool is_finisher() { return threadIdx.x / kWarpSize - 1 < kFinisherWarps; }
__device__ inline int finisher_index() { return static_cast<int>(threadIdx.x) - kWarpSize; }

// The barriers of the ring. A place is full when its bytes are there, from both blocks. It is empty when each
// consumer warp of both blocks has arrived: what is copied next goes to both.
struct Ring {
  uint32_t full, empty;

  __device__ explicit Ring(uint32_t shared) : full(shared + kBarriersAt), empty(full + kStages * 8) {}
  __device__ void init() const {
    for (int stage = 0; stage < kStages; ++stage) {
      mbarrier_init(full + stage * 8, 1);
      mbarrier_init(empty + stage * 8, kClusterBlocks * kConsumers * kWarpsOfGroup);
    }
  }
  __device__ static uint32_t place(unsigned slot) { return slot % kStages; }
  __device__ void wait_full(unsigned slot) const { mbarrier_wait(full + place(slot) * 8, slot / kStages % 2); }
  __device__ void wait_empty(unsigned slot) const {
    mbarrier_wait(empty + place(slot) * 8, slot / kStages % 2 ^ 1);
  }
  __device__ void release(unsigned slot) const {
    __syncwarp();
    const unsigned lane = threadIdx.x % kWarpSize;
    if (lane < kClusterBlocks) mbarrier_arrive_at(empty + place(slot) * 8, lane);
  }
};

// The barriers of what consumers leave to the finishers: half a tile, of each 16 rows the first or the last eight.
struct OutTile {
  uint32_t full, empty;

  __device__ explicit OutTile(uint32_t shared) : full(shared + kBarriersAt + 2 * kStages * 8), empty(full + 8) {}
  __device__ void init() const {
    mbarrier_init(full, kConsumers * kWarpsOfGroup);
    mbarrier_init(empty, kFinisherWarps);
  }
  __device__ void wait_full(unsigned count) const { mbarrier_wait(full, count % 2); }
  __device__ void wait_empty(unsigned count) const { mbarrier_wait(empty, count % 2 ^ 1); }
  __device__ static void arrive(uint32_t barrier) {
    __syncwarp();
    if (threadIdx.x % kWarpSize == 0) mbarrier_arrive(barrier);
  }
  // The tile's row that is row `row` of half `half`.
  __device__ static int tile_row(int half, int row) { return row / 8 * 16 + half * 8 + row % 8; }
};

// Calls f(place, n) for the n-th tile of this block.
template <typename F>
__device__ __forceinline__ void for_each_tile(const TileOrder& order, const F& f) {
  const uint32_t rank = __clusterRelativeBlockRank();
  unsigned n = 0;
  for (unsigned number = __clusterIdx().x; number < order.count(); number += __clusterGridDimInClusters().x) {
    f(order.tile(number, rank), n++);
  }
}

// By one thread.
__device__ __forceinline__ void copy_tiles(const Product& product, uint32_t shared, const Ring& ring) {
  constexpr uint16_t kAllBlocks = (1 << kClusterBlocks) - 1;
  const int rank = static_cast<int>(__clusterRelativeBlockRank());
  unsigned slot = 0;
  for_each_tile(product.order, [&](TileOrder::Place place, unsigned) {
    const int b_row = place.col + rank * product.half_cols;
    for (int step = 0; step < product.steps; ++step, ++slot) {
      const uint32_t a = shared + Ring::place(slot) * kStageBytes, full = ring.full + Ring::place(slot) * 8;
      ring.wait_empty(slot);
      mbarrier_expect_tx(full, kStageBytes);
      copy_codes_async(a, product.a_map, step * kCodesDepth, place.row, full);
      copy_box_to_blocks_async(a + kBytesA + rank * kHalfCols * kCodesDepth, product.b_map, step * kCodesDepth,
                               b_row, full, kAllBlocks);
    }
  });
}

// Multiplies sums by one number.
struct Factor {
  float factor;
  template <typename Sum>
  __device__ __forceinline__ float2 operator()(const Sum (&x)[4], int, int half) const {
    return make_float2(__fmul_rn(x[2 * half], factor), __fmul_rn(x[2 * half + 1], factor));
  }
};

// This consumer's part of half a tile: of a warp's 16 rows eight, in the layout of wgmma's accumulators.
struct HalfTile {
  uint32_t word[32];  // two adjacent columns of every eight

  // Holds what scaled(sums, n, half) makes of two sums of `c`.
  template <typename Sum, typename Scaled>
  __device__ __forceinline__ HalfTile(const Sum (&c)[1][32][4], const Scaled& scaled, int half) {
#pragma unroll
    for (int n = 0; n < 32; ++n) {
      const float2 x = scaled(c[0][n], n, half);
      word[n] = pack_bf16(x.x, x.y);
    }
  }
  __device__ __forceinline__ void store(int consumer, uint32_t shared) const {
    const unsigned lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize % kWarpsOfGroup;
    const unsigned row = (consumer * kWarpsOfGroup + warp) * 8 + lane % 8, chunk = lane / 8;
    const uint32_t at = shared + kOutAt + row * kBlockRowBytes;
#pragma unroll
    for (int n = 0; n < 32; n += 4) {
      const uint32_t matrices[4] = {word[n], word[n + 1], word[n + 2], word[n + 3]};
      stmatrix_x4(at + n / 8 * kOutBlockBytes + ((n % 8 + chunk) ^ row % 8) * 16, matrices);
    }
  }
};

// By all threads of a consumer: for_each_scaling(f) calls f for each tile of this block, with what makes numbers
// of its sums, as Factor does. `a` has elements of T, which are codes or bf16; kSummedB: rows of b's tiles are
// summed over.
template <typename T, bool kSummedB, typename ForEachScaling>
__device__ __forceinline__ void multiply_tiles(int consumer, int steps, uint32_t shared, const Ring& ring,
                                               const OutTile& out, const ForEachScaling& for_each_scaling) {
  SumOf<T> c[1][32][4] = {};
  unsigned slot = 0, halves = 0;  // steps read so far; halves left so far
  HalfTile held(c, Factor{1.0f}, 1);
  const auto leave = [&](const HalfTile& half) {
    out.wait_empty(halves++);
    half.store(consumer, shared);
    OutTile::arrive(out.full);
  };
  for_each_scaling([&](const auto& scaled) {
    for (int step = 0; step < steps; ++step, ++slot) {
      const uint32_t a = shared + Ring::place(slot) * kStageBytes;
      ring.wait_full(slot);
      wgmma_fence();
      start_wide_product<T, false, kSummedB>(c, a + consumer * kConsumerRows * kBlockRowBytes, a + kBytesA,
                                             step > 0);
      wgmma_commit_group();
      if (step > 0) {
        wgmma_wait_group<1>();
        ring.release(slot - 1);
      }
      if (step == steps / 2 && halves > 0) leave(held);
    }
    wgmma_wait_group<0>();
    fence_operand(c);
    ring.release(slot - 1);
    leave(HalfTile(c, scaled, 0));
    held = HalfTile(c, scaled, 1);
  });
  if (halves > 0) leave(held);
}

// Adjacent columns of a row of half a tile, from a multiple of 8 on.
template <int kCount>
__device__ __forceinline__ Stored<BFloat16, kCount> read_half(uint32_t shared, int row, int col) {
  Stored<BFloat16, kCount> x;
  const uint32_t at = shared + kOutAt + col / kBlockColumns * kOutBlockBytes + row * kBlockRowBytes;
#pragma unroll
  for (int i = 0; i < kCount / 8; ++i) {
    const uint32_t chunk = (col % kBlockColumns / 8 + i) ^ row % 8;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(x.word[4 * i]), "=r"(x.word[4 * i + 1]), "=r"(x.word[4 * i + 2]), "=r"(x.word[4 * i + 3])
                 : "r"(at + chunk * 16)
                 : "memory");
  }
  return x;
}

// By all finishers: finish(place, half) reads that half of the tile with read_half().
template <typename Finish>
__device__ __forceinline__ void finish_tiles(const OutTile& out, const TileOrder& order, const Finish& finish) {
  for_each_tile(order, [&](TileOrder::Place place, unsigned n) {
    for (int half = 0; half < kHalves; ++half) {
      out.wait_full(kHalves * n + half);
      finish(place, half);
      OutTile::arrive(out.empty);
    }
  });
}

// The roles of a block. `begin` is called by all threads before they part.
template <int kFinisher = kFinisherRegisters, int kConsumer = kConsumerRegisters, typename Begin, typename Copy,
          typename Multiply, typename Finish>
__device__ __forceinline__ void run_roles(const Ring& ring, const OutTile& out, const Begin& begin,
                                          const Copy& copy, const Multiply& multiply, const Finish& finish) {
  if (threadIdx.x == 0) {
    ring.init();
    out.init();
    mbarrier_init_fence();
  }
  begin();
  __cluster_barrier_arrive();
  __cluster_barrier_wait();
  const int group = __shfl_sync(kFullWarp, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
  if (group > 0) {
    setmaxnreg_inc<kConsumer>();
    multiply(group - 1);
  } else {
    setmaxnreg_dec<kFinisher>();
    if (threadIdx.x >= kWarpSize) {
      finish();
    } else if (threadIdx.x == 0) {
      copy();
    }
  }
  __syncwarp();
  __cluster_barrier_arrive();
  __cluster_barrier_wait();  // the other block may still copy to this one, or arrive here
}

// All of a kernel with kThreads threads and kSharedBytes of shared memory, in clusters of kClusterBlocks.
template <typename Finish>
__device__ __forceinline__ void run_product(const Product& product, unsigned char* memory, const Finish& finish) {
  const uint32_t shared = shared_address(memory);
  const Ring ring(shared);
  const OutTile out(shared);
  const auto multiply = [&](int consumer) {
    const float factor = __fmul_rn(*product.scale_a, *product.scale_b);
    multiply_tiles<Float8E4M3, false>(consumer, product.steps, shared, ring, out, [&](const auto& f) {
      for_each_tile(product.order, [&](TileOrder::Place, unsigned) { f(Factor{factor}); });
    });
  };
  run_roles(
      ring, out, [] {}, [&] { copy_tiles(product, shared, ring); }, multiply,
      [&] {
        finish_tiles(out, product.order, [&](TileOrder::Place place, int half) { finish(place, half, shared); });
      });
}

#endif  // PARKA_SM90_CODE

}  // namespace parka::cuda::sm90_float8
