#include "kernels/cuda/gemm/gemm_kernels.h"

#include <algorithm>
#include <type_traits>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/ptx/mma.cuh"

// out [M, N] += factor * a [M, K] b [N, K]^T for small K, its terms.
//
// A block keeps a tile of b, all its terms, in shared memory, and goes down the rows of `out`. A warp takes
// kStripRows rows at a time: their terms of a come straight into registers, then kSpanCols columns of `out` after
// another are loaded, summed up and stored.
//
// The kernel chooses which columns of a product of tensor cores are which of `out`, if b's columns go the same way.
// So a lane, which holds 2 columns of each of 4 products, takes these as 8 neighbours of `out`, and moves 16 bytes.
// Likewise it takes as its terms of two products 8 neighbours in a row of a and b.
namespace parka::cuda {
namespace {

constexpr int kChunk = 8;   // elements of 16 bytes
constexpr int kGroup = 32;  // terms, and columns, of which each of 4 lanes has a chunk
constexpr int kGroupChunks = kGroup / kChunk;
constexpr int kProductRows = 16;  // of one product of tensor cores, of which a lane has lane / 4 and lane / 4 + 8
constexpr int kLaneRows = 2, kLaneRowStep = 8;
constexpr int kStages = 2;
constexpr int kMostGroups = kMostLowRankTerms / kGroup;

using Chunk = Stored<BFloat16, kChunk>;

__device__ inline void store_chunk(BFloat16* p, const Chunk& x) {
  *reinterpret_cast<uint4*>(p) = make_uint4(x.word[0], x.word[1], x.word[2], x.word[3]);
}
constexpr int kSlotStride = kWarpSize * sizeof(Chunk);

struct Update {
  const BFloat16 *a, *b;
  BFloat16* out;
  int rows, cols, depth;
  int64_t a_stride, b_stride, out_stride;  // from row to row
  float factor;
  bool b_transposed;  // b is [depth, cols], not [cols, depth]
  int tile_cols, num_tiles, units_per_tile;
};

// Chunks from one column of b to the next in shared memory: an odd multiple of 64 bytes, so that the 8 lanes that
// read at a time, 4 chunks of two neighbouring columns, read from all banks.
template <int kGroups>
constexpr int kPitch = kGroups % 2 == 0 ? (kGroups + 1) * kGroupChunks : kGroups* kGroupChunks;

// Columns [col_begin, + tile_cols) of b, with zeros where there are none.
template <int kGroups, int kThreads>
__device__ void load_tile(const Update& u, int col_begin, Chunk* tile) {
  constexpr int kChunks = kGroups * kGroupChunks;
  if (!u.b_transposed) {
    for (int i = threadIdx.x; i < u.tile_cols * kChunks; i += kThreads) {
      const int col = i / kChunks, term = i % kChunks * kChunk;
      const bool exists = col_begin + col < u.cols && term < u.depth;
      tile[col * kPitch<kGroups> + term / kChunk] =
          load_stored<kChunk>(u.b + (col_begin + col) * u.b_stride + term, exists);
    }
    return;
  }
  // Pairs of terms, of 8 columns. Neighbouring lanes have neighbouring pairs, which lie side by side in the tile.
  constexpr int kPairs = kGroup / 2;
  for (int i = threadIdx.x; i < u.tile_cols / kChunk * kGroups * kPairs; i += kThreads) {
    const int col = i / kPairs % (u.tile_cols / kChunk) * kChunk;
    const int pair = i / kPairs / (u.tile_cols / kChunk) * kPairs + i % kPairs;
    const bool exists = col_begin + col < u.cols && 2 * pair < u.depth;
    const BFloat16* from = u.b + 2 * pair * u.b_stride + col_begin + col;
    const Chunk first = load_stored<kChunk>(from, exists), second = load_stored<kChunk>(from + u.b_stride, exists);
    auto* words = reinterpret_cast<uint32_t*>(tile + col * kPitch<kGroups>) + pair;
#pragma unroll
    for (int j = 0; j < kChunk; ++j) {
      constexpr int kWordsPerCol = kPitch<kGroups> * (sizeof(Chunk) / sizeof(uint32_t));
      words[j * kWordsPerCol] = __byte_perm(first.word[j / 2], second.word[j / 2], j % 2 == 0 ? 0x5410 : 0x7632);
    }
  }
}

// A warp's work is strips of kProducts products of tensor cores, and in these spans of kParts times kGroup columns.
template <int kProducts_, int kParts_>
struct Strips {
  static constexpr int kProducts = kProducts_, kParts = kParts_;
  static constexpr int kRows = kProducts * kProductRows, kSpanCols = kParts * kGroup;
  static constexpr int kSlots = kProducts * kLaneRows * kParts;  // chunks of a span that a lane has
};

// A span of a strip, from a lane's first chunk on: how many rows and columns of `out` there are from there.
struct Span {
  int row, col, rows, cols;
};

template <typename S, typename F>
__device__ void for_each_row(const F& f) {
#pragma unroll
  for (int product = 0; product < S::kProducts; ++product) {
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) f(product, i, product * kProductRows + i * kLaneRowStep);
  }
}

// Calls f(slot, row, column) for each chunk that a lane has of a part.
template <typename S, typename F>
__device__ void for_each_chunk(int part, const F& f) {
  for_each_row<S>(
      [&](int product, int i, int row) { f((part * S::kProducts + product) * kLaneRows + i, row, part * kGroup); });
}

// Starts the copies of a span of `out` into the lane's own slots, which no other reads.
template <typename S>
__device__ void start_span(const Update& u, const Span& at, uint32_t slots) {
  const BFloat16* out = u.out + at.row * u.out_stride + at.col;
#pragma unroll
  for (int part = 0; part < S::kParts; ++part) {
    for_each_chunk<S>(part, [&](int slot, int row, int col) {
      cp_async_16(slots + slot * kSlotStride, out + row * u.out_stride + col, row < at.rows && col < at.cols);
    });
  }
}

template <int kGroups, typename S>
using Terms = Chunk[kGroups][S::kProducts][kLaneRows];

template <int kGroups, typename S>
__device__ void load_terms(const Update& u, const Span& at, Terms<kGroups, S>& a) {
  const int first = threadIdx.x % kGroupChunks * kChunk;
  const BFloat16* from = u.a + at.row * u.a_stride + first;
  for_each_row<S>([&](int product, int i, int row) {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const bool exists = row < at.rows && group * kGroup + first < u.depth;
      a[group][product][i] = load_stored<kChunk>(from + row * u.a_stride + group * kGroup, exists);
    }
  });
}

// sums = a b over all terms, for kGroup columns. `tile` is at the lane's chunk of the first of them.
template <int kGroups, typename S>
__device__ void multiply(const Terms<kGroups, S>& a, const Chunk* tile,
                         float (&sums)[S::kProducts][kGroupChunks][4]) {
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
#pragma unroll
    for (int j = 0; j < kGroupChunks; ++j) {
      const Chunk b = tile[2 * j * kPitch<kGroups> + group * kGroupChunks];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int low = 2 * half, high = low + 1;
#pragma unroll
        for (int product = 0; product < S::kProducts; ++product) {
          const auto& rows = a[group][product];
          const uint32_t terms[] = {rows[0].word[low], rows[1].word[low], rows[0].word[high], rows[1].word[high]};
          mma_m16n8k16(sums[product][j], terms, b.word[low], b.word[high]);
        }
      }
    }
  }
}

__device__ inline uint32_t add_pair(uint32_t pair, float factor, const float* sums) {
  return pack_bf16(fmaf(factor, sums[0], __uint_as_float(pair << 16)),
                   fmaf(factor, sums[1], __uint_as_float(pair & 0xffff0000u)));
}

// The span's copies must have ended.
template <int kGroups, typename S>
__device__ void update_span(const Update& u, const Span& at, const Terms<kGroups, S>& a, const Chunk* tile,
                            const Chunk* slots) {
  BFloat16* out = u.out + at.row * u.out_stride + at.col;
#pragma unroll
  for (int part = 0; part < S::kParts; ++part) {
    float sums[S::kProducts][kGroupChunks][4] = {};
    multiply<kGroups, S>(a, tile + part * kGroup * kPitch<kGroups>, sums);
    for_each_chunk<S>(part, [&](int slot, int row, int col) {
      Chunk chunk = slots[slot * kWarpSize];
      const int product = slot / kLaneRows % S::kProducts, i = slot % kLaneRows;
#pragma unroll
      for (int j = 0; j < kGroupChunks; ++j) {
        chunk.word[j] = add_pair(chunk.word[j], u.factor, &sums[product][j][2 * i]);
      }
      if (row < at.rows && col < at.cols) store_chunk(out + row * u.out_stride + col, chunk);
    });
  }
}

// A unit is kWarps strips, one below the other, of a tile. Blocks take equal numbers of units one after another,
// those of a tile first. While a warp computes a span the next one is on its way.
template <int kGroups, int kWarps, int kBlocks, typename S>
__global__ void __launch_bounds__(kWarps* kWarpSize, kBlocks) low_rank_update_kernel(const Update u) {
  extern __shared__ Chunk shared[];
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  Chunk* const slots = shared + warp * kStages * S::kSlots * kWarpSize + lane;
  Chunk* const tile = shared + kWarps * kStages * S::kSlots * kWarpSize;
  // A lane multiplies by column lane / 4 of 8: this one of `out` in the first of the products side by side.
  const Chunk* const lane_tile = tile + (lane / 8 * kChunk + lane / 4 % 2) * kPitch<kGroups> + lane % kGroupChunks;
  wait_for_kernel_before();

  const int64_t units = static_cast<int64_t>(u.num_tiles) * u.units_per_tile;
  const int first_unit = static_cast<int>(units * blockIdx.x / gridDim.x);
  const int last_unit = static_cast<int>(units * (blockIdx.x + 1) / gridDim.x);
  const int spans = u.tile_cols / S::kSpanCols, steps = (last_unit - first_unit) * spans;
  const auto span_of = [&](int step) {
    const int unit = first_unit + step / spans;
    const int row = (unit % u.units_per_tile * kWarps + warp) * S::kRows + lane / kGroupChunks;
    const int col =
        unit / u.units_per_tile * u.tile_cols + step % spans * S::kSpanCols + lane % kGroupChunks * kChunk;
    return Span{row, col, u.rows - row, u.cols - col};
  };
  const auto slots_of = [&](int step) { return slots + step % kStages * S::kSlots * kWarpSize; };
  const auto start = [&](int step) {
    if (step < steps) start_span<S>(u, span_of(step), shared_address(slots_of(step)));
    cp_async_commit();
  };
  start(0);
  Terms<kGroups, S> a;
  for (int step = 0; step < steps; ++step) {
    start(step + 1);
    const int unit = first_unit + step / spans, span = step % spans;
    if (step == 0 || (span == 0 && unit % u.units_per_tile == 0)) {
      __syncthreads();
      load_tile<kGroups, kWarps * kWarpSize>(u, unit / u.units_per_tile * u.tile_cols, tile);
      __syncthreads();
    }
    const Span at = span_of(step);
    if (span == 0) load_terms<kGroups, S>(u, at, a);
    cp_async_wait<kStages - 1>();
    update_span<kGroups, S>(u, at, a, lane_tile + span * S::kSpanCols * kPitch<kGroups>, slots_of(step));
  }
}

// With more terms shared memory and tensor cores would be the limit: warps multiply what they read of b by more
// rows, blocks are fewer, and tiles wider, so that a is read less often.
template <int kGroups>
struct Launch {
  static constexpr bool kIsDeep = kGroups > 3;
  using Strip = std::conditional_t<kIsDeep, Strips<2, 2>, Strips<1, 4>>;
  static constexpr int kWarps = 8, kBlocks = kIsDeep ? 1 : 2, kTileCols = kIsDeep ? 256 : 128;
  static constexpr int64_t kSlotBytes = kWarps * kStages * Strip::kSlots * kWarpSize * int64_t{sizeof(Chunk)};
};

template <int kGroups>
void run(const CudaDevice& device, Update u) {
  using L = Launch<kGroups>;
  using Strip = typename L::Strip;
  constexpr int64_t kColBytes = kPitch<kGroups> * int64_t{sizeof(Chunk)};
  void (*kernel)(Update) = low_rank_update_kernel<kGroups, L::kWarps, L::kBlocks, Strip>;
  // GPUs with little shared memory have narrower tiles.
  const auto most_bytes = static_cast<int64_t>(device.properties().sharedMemPerBlockOptin);
  u.tile_cols = L::kTileCols;
  while (L::kSlotBytes + u.tile_cols * kColBytes > most_bytes) u.tile_cols /= 2;
  PARKA_REQUIRE(u.tile_cols % Strip::kSpanCols == 0 && u.tile_cols > 0);
  u.num_tiles = static_cast<int>(ceil_div(u.cols, u.tile_cols));
  u.units_per_tile = static_cast<int>(ceil_div(u.rows, L::kWarps * Strip::kRows));
  const int64_t bytes = L::kSlotBytes + u.tile_cols * kColBytes;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)), "gemm");
  const int64_t units = int64_t{u.num_tiles} * u.units_per_tile;
  PARKA_REQUIRE(units < (int64_t{1} << 28));
  const int64_t blocks = std::min<int64_t>(units, int64_t{L::kBlocks} * device.num_multiprocessors());
  launch_early(device, "gemm", kernel, {blocks, L::kWarps * kWarpSize, bytes}, u);
}

}  // namespace

void low_rank_update(CudaDevice& device, const Gemm& a) {
  const auto [rows, cols, depth] = gemm_shape(a);
  Update u = {};
  u.a = a.a.data.as<BFloat16>();
  u.b = a.b.data.as<BFloat16>();
  u.out = a.out.as<BFloat16>();
  u.rows = static_cast<int>(rows);
  u.cols = static_cast<int>(cols);
  u.depth = static_cast<int>(depth);
  u.a_stride = a.a.data.dim[1];
  u.b_stride = a.b.data.dim[1];
  u.out_stride = a.out.dim[1];
  u.factor = a.factor;
  u.b_transposed = a.b_transposed;
  switch (ceil_div(depth, kGroup)) {
    case 1: run<1>(device, u); return;
    case 2: run<2>(device, u); return;
    case 3: run<3>(device, u); return;
    default: run<kMostGroups>(device, u); return;
  }
}

}  // namespace parka::cuda
