#pragma once
#include <algorithm>
#include <cstdint>

#include "kernels/cuda/attention/attention_paths.cuh"
#include "kernels/cuda/attention/attention_tiles.cuh"
#include "kernels/cuda/ptx/sm90.cuh"

// The attention kernels for compute capability 9.0 are persistent and warp-specialised: one block per
// multiprocessor takes tiles of 128 rows, the next one whenever it is done. A block has a producer warpgroup, which
// copies tiles to shared memory, and two consumer warpgroups. Each consumer owns 64 rows of the tile and iterates
// over the other tiles.
//
// wgmma leaves each warp 16 of those rows: accumulators are c[1][n][4] of attention_tiles.cuh, with one m.
namespace parka::cuda::sm90 {

constexpr int kWarpgroup = 128;  // threads
constexpr int kConsumers = 2;    // warpgroups
constexpr int kThreads = kWarpgroup * (1 + kConsumers);
constexpr int kConsumerWarps = kConsumers * kWarpgroup / kWarpSize;
constexpr int kConsumerRows = 64, kTileRows = kConsumers * kConsumerRows;
constexpr int kWarpRows = 16;
// Registers per thread. Threads start with 168 (65536 over kThreads); 40 + 2 * 232 is three times that.
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;

struct Tile {
  int b, head, begin;  // sequence, head of it, first row
};

// Tiles in the order in which blocks take them. A section of heads is small enough for the data that its tiles
// reuse to stay in the L2 cache; within a section, tiles with the most work come first.
struct TileOrder {
  unsigned begin_head, num_heads, heads_per_sequence, num_tiles, section_heads;  // tiles of a head
  bool last_head_first = false;

  // The order of all heads of all sequences. `bytes_per_head`: the bytes of a head's tiles.
  TileOrder(const AttentionDims& dims, int heads, int64_t bytes_per_head, int blocks)
      : begin_head(0),
        num_heads(dims.B * heads),
        heads_per_sequence(heads),
        num_tiles((dims.S + kTileRows - 1) / kTileRows),
        section_heads(std::max<unsigned>(heads_per_section(dims.B * heads, bytes_per_head),
                                         (blocks + num_tiles - 1) / num_tiles)) {}

  // The order of `count` of the heads from `begin` on, forward or backward.
  TileOrder of_heads(unsigned begin, unsigned count, bool backwards) const {
    TileOrder order = *this;
    order.begin_head = begin;
    order.num_heads = count;
    order.last_head_first = backwards;
    return order;
  }

  __host__ __device__ unsigned count() const { return num_heads * num_tiles; }

  template <bool kLastIsLongest>
  __device__ Tile tile(unsigned number) const {
    const unsigned section_tiles = section_heads * num_tiles;
    const unsigned first_head = number / section_tiles * section_heads, within = number % section_tiles;
    const unsigned heads = min(section_heads, num_heads - first_head);
    const unsigned nth_head = first_head + within % heads, rank = within / heads;
    const unsigned head = begin_head + (last_head_first ? num_heads - 1 - nth_head : nth_head);
    return {static_cast<int>(head / heads_per_sequence), static_cast<int>(head % heads_per_sequence),
            static_cast<int>(kLastIsLongest ? num_tiles - 1 - rank : rank) * kTileRows};
  }
};

#if PARKA_SM90_CODE

// The barriers of a ring of kStages buffers in shared memory; `slot` counts the buffers filled so far. Copies
// arrive at `full`, and each warp of a consumer arrives at `empty` when it is done with a buffer.
template <int kStages>
struct Stages {
  uint32_t full, empty;  // of place 0; eight bytes on for the next

  static constexpr int kBytes = 2 * kStages * 8;
  __device__ explicit Stages(uint32_t at) : full(at), empty(at + kStages * 8) {}
  // By one thread. `producers`: how many arrivals fill a place.
  __device__ void init(int producers) const {
    for (int stage = 0; stage < kStages; ++stage) {
      mbarrier_init(full + stage * 8, producers);
      mbarrier_init(empty + stage * 8, kConsumerWarps);
    }
  }
  __device__ static uint32_t place(unsigned slot) { return slot % kStages; }
  __device__ uint32_t full_at(unsigned slot) const { return full + place(slot) * 8; }
  __device__ void wait_full(unsigned slot) const { mbarrier_wait(full_at(slot), slot / kStages % 2); }
  __device__ void wait_empty(unsigned slot) const {
    mbarrier_wait(empty + place(slot) * 8, slot / kStages % 2 ^ 1);
  }
  __device__ void release(unsigned slot) const {
    __syncwarp();  // an arrival covers only the reads of its own thread, and here one arrives for the whole warp
    if (threadIdx.x % kWarpSize == 0) mbarrier_arrive(empty + place(slot) * 8);
  }
};

// Ping-pong scheduling of the two consumers: they take turns at starting products, so that the products of one run
// while the other computes its softmax. Without kTurns it does nothing.
template <bool kTurns = true>
class PingPongBarrier {
 public:
  __device__ explicit PingPongBarrier(int consumer) : consumer_(consumer) {
    if (consumer_ == 1) pass();
  }
  __device__ void wait() const {
    if constexpr (kTurns) named_barrier_sync(1 + consumer_, 2 * kWarpgroup);
  }
  __device__ void pass() const {
    if constexpr (kTurns) named_barrier_arrive(2 - consumer_, 2 * kWarpgroup);
  }
  __device__ void end() const {
    if (consumer_ == 0) wait();
  }

 private:
  int consumer_;
};

// In a consumer: which one, and the first of the 16 rows of the tile that this warp owns.
__device__ inline int consumer_index() {
  return __shfl_sync(kFullWarp, static_cast<int>(threadIdx.x) / kWarpgroup, 0) - 1;
}
__device__ inline int warp_row() {
  return __shfl_sync(kFullWarp, static_cast<int>(threadIdx.x - kWarpgroup) / kWarpSize, 0) * 16;
}

// For the producer's first thread or, with kLanes = kWarpSize, its first warp. Calls `copy` for each tile that the
// block takes, after storing the tile's number at `number_at` for the consumers. A number past the last tile ends
// their work. `copy` arrives at `own.full` once.
template <bool kLastIsLongest, int kLanes, typename Copy>
__device__ __forceinline__ void take_tiles(const TileOrder& order, unsigned* num_taken, const Stages<1>& own,
                                           unsigned char* number_at, const Copy& copy) {
  const bool first = threadIdx.x == 0;
  unsigned number = blockIdx.x;
  for (unsigned count = 0;; ++count) {
    own.wait_empty(count);
    if (first) *reinterpret_cast<unsigned*>(number_at) = number;
    if (number >= order.count()) break;
    copy(order.tile<kLastIsLongest>(number));
    if (first) number = gridDim.x + atomicAdd(num_taken, 1);
    if constexpr (kLanes == kWarpSize) number = __shfl_sync(kFullWarp, number, 0);
  }
  if (first) mbarrier_arrive(own.full);
}

// For a consumer: calls `work` for each tile that the block takes, once it is loaded. `work` releases `own`.
template <bool kLastIsLongest, typename Work>
__device__ __forceinline__ void for_each_taken_tile(const TileOrder& order, const Stages<1>& own,
                                                    const unsigned char* number_at, const Work& work) {
  for (unsigned count = 0;; ++count) {
    own.wait_full(count);
    unsigned number = 0;  // read by the lane that later arrives for the warp
    if (threadIdx.x % kWarpSize == 0) number = *reinterpret_cast<const volatile unsigned*>(number_at);
    number = __shfl_sync(kFullWarp, number, 0);
    if (number >= order.count()) break;
    work(order.tile<kLastIsLongest>(number));
  }
}

#endif  // PARKA_SM90_CODE

// One sequence of AttentionForward::first_key; nothing where rows see all earlier keys.
template <bool kGiven>
struct FirstKeys {
  const int32_t* of_row;
  int S;

  __device__ FirstKeys(const int32_t* first_key, const AttentionDims& dims, int b)
      : of_row(kGiven ? first_key + int64_t{b} * dims.S : nullptr), S(dims.S) {}

  // The first tile of keys that a tile of queries from `begin` on sees.
  __device__ int first_tile(int begin) const { return kGiven ? of_row[begin] / kTileRows * kTileRows : 0; }
  // The first key that all queries of that tile see.
  __device__ int first_seen_by_all(int begin) const { return kGiven ? of_row[min(begin + kTileRows, S) - 1] : 0; }
  // True if any query from `begin` on, which is there, sees a key before `key_end`.
  __device__ bool sees(int begin, int key_end) const { return !kGiven || of_row[begin] < key_end; }
  // Hides scores before the first key of each query: of queries, the last `queries` later, and keys from these on.
  template <bool kRowsAreKeys, int kN>
  __device__ void mask(float (&scores)[1][kN][4], int query_begin, int queries, int key_begin) const {
    if (!kGiven || key_begin >= of_row[min(query_begin + queries, S) - 1]) return;
    mask_earlier_keys<kRowsAreKeys>(scores, of_row + query_begin, S - 1 - query_begin, key_begin);
  }
};

// Launches a kernel whose blocks take tiles. Its arguments end with the order and the count of tiles taken, 0.
template <typename Kernel, typename... Args>
void launch_over_tiles(CudaDevice& device, const char* op, Kernel* kernel, int shared_bytes, const TileOrder& order,
                       unsigned* num_taken, const Args&... args) {
  const unsigned blocks = std::min<unsigned>(order.count(), device.num_multiprocessors());
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes), op);
  launch(device, op, kernel, {blocks, kThreads, shared_bytes}, args..., order, num_taken);
}

}  // namespace parka::cuda::sm90
