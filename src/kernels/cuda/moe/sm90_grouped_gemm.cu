#include <algorithm>
#include <initializer_list>
#include <type_traits>

#include "kernels/cuda/gemm/sm90_float8_tiles.cuh"
#include "kernels/cuda/moe/experts.cuh"
#include "kernels/cuda/ptx/mma.cuh"
#include "kernels/ops/moe/routing.h"

// Products of each expert's rows a [R, K] with its matrix b [N, K], and weight gradients, which sum over its rows.
//
// Kernels are built as sm90_float8_tiles.cuh describes: persistent clusters of two blocks, each with a producer,
// three warps of finishers and two consumer warpgroups. Tiles are found on the device, from the rows in use. Both
// blocks of a cluster go through the same tiles and steps, so that either may copy to both.
namespace parka::cuda {
namespace {

using namespace sm90_float8;

// What a step of the summed axis takes of an operand of T: 128 bytes of each row.
template <typename T>
constexpr int kTerms = kBlockRowBytes / sizeof(T);

template <typename T>
CUtensorMap make_rows_map(const ScaledView& x, int box_rows) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    return make_number_map(x.data.as<T>(), x.num_rows(), x.num_cols(), box_rows);
  } else {
    return make_code_map(x.data.data, x.num_rows(), x.num_cols(), box_rows);
  }
}

const float* scale_of(const ScaledView& x) { return x.scaling == Scaling::kNone ? nullptr : x.scale.as<float>(); }

bool are_multiples(int64_t unit, std::initializer_list<int64_t> extents) {
  return std::all_of(extents.begin(), extents.end(), [&](int64_t x) { return x % unit == 0 && x <= INT32_MAX; });
}

// Calls f with the element type of the left operand where there are kernels for both: codes, or numbers in bf16.
bool fits_formats(const ScaledView& a, const ScaledView& b) {
  return b.data.dtype == DType::kE4M3 || (a.data.dtype == DType::kBF16 && b.data.dtype == DType::kBF16);
}
template <typename F>
void with_operands(DType dtype, const F& f) {
  switch (dtype) {
    case DType::kE4M3: f(Float8E4M3{}); return;
    case DType::kE5M2: f(Float8E5M2{}); return;
    default: f(BFloat16{}); return;
  }
}

template <typename Kernel, typename Product>
void launch_persistent(CudaDevice& device, const char* op, Kernel* kernel, const Product& product,
                       int shared_bytes) {
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes), op);
  const int blocks = device.num_multiprocessors() / kClusterBlocks * kClusterBlocks;
  launch(device, op, kernel, {blocks, kThreads, shared_bytes}, product);
}

#if PARKA_SM90_CODE

constexpr int kSummedBytes = kBlockColumns * kBlockRowBytes;  // 64 columns of 64 rows that are summed over
constexpr uint16_t kAllBlocks = (1 << kClusterBlocks) - 1;

// Starts a copy of a box to this block, or to both.
__device__ __forceinline__ void copy_box(bool to_both, uint32_t target, const CUtensorMap& map, int column, int row,
                                         uint32_t barrier) {
  if (to_both) {
    copy_box_to_blocks_async(target, map, column, row, barrier, kAllBlocks);
  } else {
    copy_codes_async(target, map, column, row, barrier);
  }
}

__device__ __forceinline__ float product_of_scales(const float* a, const float* b, int n) {
  return a == nullptr ? 1.0f : __fmul_rn(__ldg(a), __ldg(b + n));
}

__device__ __forceinline__ void store_16(void* target, uint32_t x0, uint32_t x1, uint32_t x2, uint32_t x3) {
  *static_cast<uint4*>(target) = make_uint4(x0, x1, x2, x3);
}

#endif  // PARKA_SM90_CODE

// ---- Rows times matrices: tiles of 128 rows and 256 columns, bf16 ----

// Shared memory is that of sm90_float8_tiles.cuh, and the number of each expert's first tile.
constexpr int kFirstAt = kSharedBytes, kRowsSharedBytes = kFirstAt + (kMostExperts + 1) * 4;
static_assert(kRowsSharedBytes <= 227 * 1024 && kTileRows == kExpertRows);

struct RowsProduct {
  CUtensorMap a_map, b_map;
  const float *scale_a, *scale_b;  // null: plain numbers
  Experts experts;
  BFloat16* out;
  int rows, cols, steps;
  int b_rows;  // of one expert
  int across;  // tiles side by side
};

template <typename T, bool kSummedB>
RowsProduct make_product(const GroupedGemm& a) {
  const auto [rows, cols, depth, experts] = shape_of(a);
  return {make_rows_map<T>(a.a, kTileRows),
          std::is_same_v<T, BFloat16> ? make_rows_map<BFloat16>(a.b, kSummedB ? kBlockColumns : kHalfCols)
                                      : make_rows_map<Float8E4M3>(a.b, kHalfCols),
          scale_of(a.a),
          scale_of(a.b),
          Experts(a.offsets, a.counts),
          a.out.as<BFloat16>(),
          static_cast<int>(rows),
          static_cast<int>(cols),
          static_cast<int>(ceil_div(depth, kTerms<T>)),
          static_cast<int>(kSummedB ? depth : cols),
          static_cast<int>(ceil_div(cols, kTileCols))};
}

#if PARKA_SM90_CODE

// The clusters' tiles of an expert: pairs of tiles below each other, which share b; and where a last row of tiles
// has none below it, pairs side by side.
__device__ __forceinline__ int num_tiles(int count, int across) {
  const int down = (count + kTileRows - 1) / kTileRows;
  return down / 2 * across + down % 2 * ((across + 1) / 2);
}

// By one warp: first[e] = the clusters' tiles of experts before e.
__device__ __forceinline__ void find_first_tiles(const RowsProduct& p, int* first) {
  constexpr int kEach = kMostExperts / kWarpSize;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize, own = lane * kEach;
  int tiles[kEach], sum = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    tiles[i] = own + i < p.experts.count ? num_tiles(__ldg(p.experts.counts + own + i), p.across) : 0;
    sum += tiles[i];
  }
  int through = sum;
#pragma unroll
  for (int offset = 1; offset < kWarpSize; offset *= 2) {
    const int before = __shfl_up_sync(kFullWarp, through, offset);
    if (lane >= offset) through += before;
  }
  int begin = through - sum;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    if (own + i <= p.experts.count) first[own + i] = begin;
    begin += tiles[i];
  }
  if (lane == kWarpSize - 1 && p.experts.count == kMostExperts) first[kMostExperts] = begin;
}

struct RowsTile {
  int expert, row, end, col;  // the tile's first row and column, and the end of its expert's rows
  bool shares_b;
};

// Calls f(tile, n) for the n-th tile of this block.
template <typename F>
__device__ __forceinline__ void for_each_rows_tile(const RowsProduct& p, const int* first, const F& f) {
  const int rank = static_cast<int>(__clusterRelativeBlockRank()), total = first[p.experts.count];
  unsigned n = 0;
  int expert = 0;
  for (int number = static_cast<int>(__clusterIdx().x); number < total;
       number += static_cast<int>(__clusterGridDimInClusters().x)) {
    while (number >= first[expert + 1]) ++expert;
    const int begin = __ldg(p.experts.offsets + expert), count = __ldg(p.experts.counts + expert);
    const int pairs = (count + kTileRows - 1) / kTileRows / 2, within = number - first[expert];
    const int alone = within - pairs * p.across;  // not negative: in the last row of tiles, the alone-th pair
    RowsTile tile{expert, begin, begin + count, 0, alone < 0};
    if (alone < 0) {
      tile.row += (within % pairs * 2 + rank) * kTileRows;
      tile.col = within / pairs * kTileCols;
    } else {
      tile.row += 2 * pairs * kTileRows;
      tile.col = (2 * alone + rank) * kTileCols;
    }
    f(tile, n++);
  }
}

// By one thread.
template <typename T, bool kSummedB>
__device__ __forceinline__ void copy_rows_tiles(const RowsProduct& p, const int* first, uint32_t shared,
                                                const Ring& ring) {
  const int rank = static_cast<int>(__clusterRelativeBlockRank());
  unsigned slot = 0;
  for_each_rows_tile(p, first, [&](const RowsTile& tile, unsigned) {
    const int b_row = tile.expert * p.b_rows;
    for (int step = 0; step < p.steps; ++step, ++slot) {
      const uint32_t a = shared + Ring::place(slot) * kStageBytes, full = ring.full + Ring::place(slot) * 8;
      ring.wait_empty(slot);
      mbarrier_expect_tx(full, kStageBytes);
      copy_codes_async(a, p.a_map, step * kTerms<T>, tile.row, full);
      for (int half = 0; half < 2; ++half) {
        if (tile.shares_b && half != rank) continue;  // the other block copies it
        const uint32_t b = a + kBytesA + half * (kBytesB / 2);
        const int col = tile.col + half * kHalfCols;
        if constexpr (kSummedB) {
          for (int block = 0; block < kHalfCols / kBlockColumns; ++block) {
            copy_box(tile.shares_b, b + block * kSummedBytes, p.b_map, col + block * kBlockColumns,
                     b_row + step * kBlockColumns, full);
          }
        } else {
          copy_box(tile.shares_b, b, p.b_map, step * kTerms<T>, b_row + col, full);
        }
      }
    }
  });
}

// By all finishers. Rows of no expert become zeros.
__device__ __forceinline__ void finish_rows_tiles(const RowsProduct& p, const int* first, uint32_t shared,
                                                  const OutTile& out) {
  constexpr int kWidth = 8;
  const int warp = finisher_index() / kWarpSize, lane = finisher_index() % kWarpSize;
  const int64_t used = int64_t{__ldg(p.experts.offsets + p.experts.count)} * p.cols, all = int64_t{p.rows} * p.cols;
  for (int64_t at = used + (int64_t{blockIdx.x} * kFinishers + finisher_index()) * kWidth; at < all;
       at += int64_t{gridDim.x} * kFinishers * kWidth) {
    store_16(p.out + at, 0, 0, 0, 0);
  }
  for_each_rows_tile(p, first, [&](const RowsTile& tile, unsigned n) {
    const int col = tile.col + lane * kWidth;
    for (int half = 0; half < kHalves; ++half) {
      out.wait_full(kHalves * n + half);
#pragma unroll 4
      for (int row = warp; row < kHalfRows; row += kFinisherWarps) {
        const Stored<BFloat16, kWidth> x = read_half<kWidth>(shared, row, lane * kWidth);
        const int to = tile.row + OutTile::tile_row(half, row);
        if (col >= p.cols) continue;
        BFloat16* const target = p.out + int64_t{to} * p.cols + col;
        const bool exists = to < tile.end;
        store_16(target, exists ? x.word[0] : 0, exists ? x.word[1] : 0, exists ? x.word[2] : 0,
                 exists ? x.word[3] : 0);
      }
      OutTile::arrive(out.empty);
    }
  });
}

#endif  // PARKA_SM90_CODE

template <typename T, bool kSummedB>
__global__ void __launch_bounds__(kThreads, 1) __cluster_dims__(kClusterBlocks, 1, 1)
    grouped_rows_kernel(const __grid_constant__ RowsProduct product) {
#if PARKA_SM90_CODE
  extern __shared__ __align__(1024) unsigned char memory[];
  const uint32_t shared = shared_address(memory);
  const Ring ring(shared);
  const OutTile out(shared);
  int* const first = reinterpret_cast<int*>(memory + kFirstAt);
  run_roles(
      ring, out,
      [&] {
        if (threadIdx.x / kWarpSize == 1) find_first_tiles(product, first);
      },
      [&] { copy_rows_tiles<T, kSummedB>(product, first, shared, ring); },
      [&](int consumer) {
        multiply_tiles<T, kSummedB>(consumer, product.steps, shared, ring, out, [&](const auto& f) {
          for_each_rows_tile(product, first, [&](const RowsTile& tile, unsigned) {
            f(Factor{product_of_scales(product.scale_a, product.scale_b, tile.expert)});
          });
        });
      },
      [&] { finish_rows_tiles(product, first, shared, out); });
#endif
}

// ---- Weight gradients: tiles of 256 rows and 128 columns, summed in fp32 ----
//
// Sums of codes over 128 rows are added up in fp32. A consumer has 128 rows of a tile, the registers for their
// sums, and those of half of them for what tensor cores sum. Two blocks have tiles side by side, and share d_y.
// An output in bf16 is a step of the ring after those of its tile, one for each half of the consumers' rows: the
// producer copies there what the output held, consumers add it and copy from there. Clusters take tiles of the
// experts with most rows first, and so each about as many rows.

constexpr int kSquare = 128;
constexpr int kBytesX = kSquare * kBlockRowBytes, kBytesDY = kConsumers * kBytesX;
constexpr int kParts = 2, kPartRows = kSquare / kParts;
constexpr int kPartBytes = kPartRows * kBlockRowBytes;  // of 64 rows, or of 64 columns that are summed over rows
constexpr int kBoxRows = 16;                            // of the output, a warp's of a part
constexpr int kOutParts = kSquare / kBlockColumns;      // of a part's columns, each with rows of kBlockRowBytes
constexpr int kConsumerOutBytes = kOutParts * kPartBytes;
static_assert(kBytesDY + kBytesX == kStageBytes && kConsumers * kConsumerOutBytes <= kStageBytes);
// In the place of the other kernels' output: the rows of each expert, and the experts in order.
constexpr int kCountsAt = kOutAt, kOrderAt = kCountsAt + kMostExperts * 4;
static_assert(kOrderAt + kMostExperts * 4 <= kBarriersAt);

template <typename Out>
struct GradientProduct {
  CUtensorMap d_y_map, x_map;
  CUtensorMap out_map;               // of an output in bf16
  const float *scale_d_y, *scale_x;  // null: plain numbers
  Experts experts;
  Out* out;
  int rows, cols;    // of an expert's gradient: N, K
  int down, across;  // tiles below each other of an expert, and pairs side by side
  bool accumulate;
};

template <typename T, typename Out>
GradientProduct<Out> make_product(const GroupedWeightGradient& a) {
  const auto [rows, cols, depth, experts] = shape_of(a);
  constexpr int kOperandRows = std::is_same_v<T, BFloat16> ? kBlockColumns : kSquare;
  GradientProduct<Out> product = {make_rows_map<T>(a.d_y, kOperandRows),
                                  make_rows_map<T>(a.x, kOperandRows),
                                  {},
                                  scale_of(a.d_y),
                                  scale_of(a.x),
                                  Experts(a.offsets, a.counts),
                                  a.out.as<Out>(),
                                  static_cast<int>(cols),
                                  static_cast<int>(depth),
                                  static_cast<int>(ceil_div(cols, kConsumers * kSquare)),
                                  static_cast<int>(ceil_div(depth, kClusterBlocks * kSquare)),
                                  a.accumulate};
  if constexpr (std::is_same_v<Out, BFloat16>) {
    product.out_map = make_number_map(a.out.as<Out>(), experts * cols, depth, kBoxRows);
  }
  return product;
}

#if PARKA_SM90_CODE

// Registers per thread: 40 + 2 * 232 is three times 168.
constexpr int kGradientFinisherRegisters = 40, kGradientConsumerRegisters = 232;

// By all threads: order[i] = the expert that has the i-th most rows, among equals the first.
__device__ __forceinline__ void order_experts(const Experts& experts, int* counts, int* order) {
  for (int e = static_cast<int>(threadIdx.x); e < experts.count; e += kThreads)
    counts[e] = __ldg(experts.counts + e);
  __syncthreads();
  for (int e = static_cast<int>(threadIdx.x); e < experts.count; e += kThreads) {
    const int own = counts[e];
    int before = 0;
    for (int other = 0; other < experts.count; ++other) {
      before += counts[other] > own || (counts[other] == own && other < e) ? 1 : 0;
    }
    order[before] = e;
  }
}

struct GradientTile {
  int expert, row, col;  // in the expert's gradient
  int begin, steps;      // of its rows that are summed over
};

// Calls f(tile) for each tile of this block.
template <typename T, typename Out, typename F>
__device__ __forceinline__ void for_each_gradient_tile(const GradientProduct<Out>& p, const int* order,
                                                       const F& f) {
  const int rank = static_cast<int>(__clusterRelativeBlockRank()), each = p.down * p.across;
  for (int number = static_cast<int>(__clusterIdx().x); number < p.experts.count * each;
       number += static_cast<int>(__clusterGridDimInClusters().x)) {
    const int expert = order[number / each], within = number % each;
    const int begin = __ldg(p.experts.offsets + expert), count = __ldg(p.experts.counts + expert);
    f(GradientTile{expert, within % p.down * kConsumers * kSquare,
                   (within / p.down * kClusterBlocks + rank) * kSquare, begin,
                   (count + kTerms<T> - 1) / kTerms<T>});
  }
}

// Rows of the output that a warp of a consumer has in a part of a tile: the first of 16, and their place in a step.
__device__ __forceinline__ int out_row(int consumer, int part, int warp) {
  return consumer * kSquare + part * kPartRows + warp * kBoxRows;
}
__device__ __forceinline__ int out_place(int consumer, int warp, int columns) {
  return consumer * kConsumerOutBytes + columns * kPartBytes + warp * kBoxRows * kBlockRowBytes;
}

// By one thread.
template <typename T, typename Out>
__device__ __forceinline__ void copy_gradient_tiles(const GradientProduct<Out>& p, const int* order,
                                                    uint32_t shared, const Ring& ring) {
  const int rank = static_cast<int>(__clusterRelativeBlockRank());
  unsigned slot = 0;
  for_each_gradient_tile<T>(p, order, [&](const GradientTile& tile) {
    if (tile.steps == 0) return;
    for (int step = 0; step < tile.steps; ++step, ++slot) {
      const uint32_t place = Ring::place(slot), full = ring.full + place * 8;
      const uint32_t d_y = shared + place * kStageBytes + rank * kBytesX;  // what this block copies, to both
      const uint32_t x = shared + place * kStageBytes + kBytesDY;
      const int term = tile.begin + step * kTerms<T>, d_y_row = tile.row + rank * kSquare;
      ring.wait_empty(slot);
      mbarrier_expect_tx(full, kStageBytes);
      if constexpr (std::is_same_v<T, BFloat16>) {
        for (int part = 0; part < kParts; ++part) {
          const int at = part * kPartBytes, col = part * kBlockColumns;
          copy_box_to_blocks_async(d_y + at, p.d_y_map, d_y_row + col, term, full, kAllBlocks);
          copy_codes_async(x + at, p.x_map, tile.col + col, term, full);
        }
      } else {
        copy_box_to_blocks_async(d_y, p.d_y_map, term, d_y_row, full, kAllBlocks);
        copy_codes_async(x, p.x_map, term, tile.col, full);
      }
    }
    if constexpr (std::is_same_v<Out, BFloat16>) {
      for (int part = 0; part < kParts; ++part, ++slot) {
        const uint32_t place = Ring::place(slot), full = ring.full + place * 8;
        ring.wait_empty(slot);
        mbarrier_expect_tx(full, p.accumulate ? kConsumers * kConsumerOutBytes : 0);
        if (!p.accumulate) continue;
        for (int at = 0; at < kConsumers * kWarpsOfGroup * kOutParts; ++at) {
          const int columns = at % kOutParts, warp = at / kOutParts % kWarpsOfGroup,
                    consumer = at / kOutParts / kWarpsOfGroup;
          copy_codes_async(shared + place * kStageBytes + out_place(consumer, warp, columns), p.out_map,
                           tile.col + columns * kBlockColumns,
                           tile.expert * p.rows + tile.row + out_row(consumer, part, warp), full);
        }
      }
    }
  });
}

// Of each of a consumer's parts 64 rows and 128 columns, in the layout of wgmma's accumulators.
using Sums = float[kParts][1][16][4];

template <typename F>
__device__ __forceinline__ void for_each_sum(const F& f) {
#pragma unroll
  for (int n = 0; n < 16; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) f(n, i);
  }
}

// sums = those of a tile; slot: steps read so far.
template <typename T>
__device__ __forceinline__ void sum_tile(Sums& sums, int consumer, int steps, uint32_t shared, const Ring& ring,
                                         unsigned& slot) {
  constexpr bool kPlain = std::is_same_v<T, BFloat16>;
  const auto start = [&](float(&c)[1][16][4], int part, bool accumulate) {
    const uint32_t d_y = shared + Ring::place(slot) * kStageBytes;
    start_wide_product<T, kPlain, kPlain>(c, d_y + (consumer * kParts + part) * kPartBytes, d_y + kBytesDY,
                                          accumulate);
  };
  if constexpr (kPlain) {
    for (int step = 0; step < steps; ++step, ++slot) {
      ring.wait_full(slot);
      wgmma_fence();
#pragma unroll
      for (int part = 0; part < kParts; ++part) start(sums[part], part, step > 0);
      wgmma_commit_group();
      if (step > 0) {
        wgmma_wait_group<1>();
        ring.release(slot - 1);
      }
    }
    wgmma_wait_group<0>();
#pragma unroll
    for (int part = 0; part < kParts; ++part) fence_operand(sums[part]);
    ring.release(slot - 1);
  } else {
    float c[1][16][4];
#pragma unroll
    for (int part = 0; part < kParts; ++part) for_each_sum([&](int n, int i) { sums[part][0][n][i] = 0.0f; });
    for (int step = 0; step < steps; ++step, ++slot) {
      ring.wait_full(slot);
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        wgmma_fence();
        start(c, part, false);
        wgmma_commit_group();
        wgmma_wait_group<0>();
        fence_operand(c);
        if (part == kParts - 1) ring.release(slot);
        for_each_sum([&](int n, int i) { sums[part][0][n][i] = __fadd_rn(sums[part][0][n][i], c[0][n][i]); });
      }
    }
  }
}

__device__ __forceinline__ float low_of(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_of(uint32_t pair) { return __uint_as_float(pair & 0xffff0000); }

// By all threads of a consumer: the sums of a tile, times `factor`, through two steps of the ring.
__device__ __forceinline__ void leave_sums(const Sums& sums, const GradientProduct<BFloat16>& p,
                                           const GradientTile& tile, int consumer, float factor, uint32_t shared,
                                           const Ring& ring, unsigned& slot) {
  const unsigned lane = threadIdx.x % kWarpSize;
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize % kWarpsOfGroup;
#pragma unroll
  for (int part = 0; part < kParts; ++part, ++slot) {
    const uint32_t step = shared + Ring::place(slot) * kStageBytes;
    ring.wait_full(slot);
#pragma unroll
    for (int n = 0; n < 16; n += 2) {
      // Rows 0 to 7, then 8 to 15 of 8 columns, and the same of the next 8.
      const uint32_t row = lane % 16, chunk = n % 8 + lane / 16;
      const uint32_t at = step + out_place(consumer, warp, n / 8) + row * kBlockRowBytes + (chunk ^ row % 8) * 16;
      uint32_t held[4] = {}, left[4];
      if (p.accumulate) ldmatrix_x4(held, at);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float(&sum)[4] = sums[part][0][n + i / 2];
        float low = __fmul_rn(sum[i % 2 * 2], factor), high = __fmul_rn(sum[i % 2 * 2 + 1], factor);
        if (p.accumulate) low = __fadd_rn(low, low_of(held[i])), high = __fadd_rn(high, high_of(held[i]));
        left[i] = pack_bf16(low, high);
      }
      stmatrix_x4(at, left);
    }
    fence_before_copies();
    __syncwarp();
    if (lane == 0) {
      const int row = tile.row + out_row(consumer, part, warp);
      for (int columns = 0; columns < kOutParts && row < p.rows; ++columns) {
        copy_box_out_async(p.out_map, tile.col + columns * kBlockColumns, tile.expert * p.rows + row,
                           step + out_place(consumer, warp, columns));
      }
      commit_copies_out();
    }
  }
  if (lane == 0) wait_copies_out<1>();
  ring.release(slot - 2);
  if (lane == 0) wait_copies_out<0>();
  ring.release(slot - 1);
}

// The same to memory.
__device__ __forceinline__ void leave_sums(const Sums& sums, const GradientProduct<float>& p,
                                           const GradientTile& tile, int consumer, float factor, uint32_t,
                                           const Ring&, unsigned&) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize % kWarpsOfGroup;
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
#pragma unroll
    for (int below = 0; below < 2; ++below) {
      const int row = tile.row + out_row(consumer, part, warp) + below * 8 + lane / 4;
      float* const target = p.out + (int64_t{tile.expert} * p.rows + row) * p.cols;
#pragma unroll
      for (int n = 0; n < 16; ++n) {
        const int col = tile.col + n * 8 + lane % 4 * 2;
        if (row >= p.rows || col >= p.cols) continue;
        const float(&sum)[4] = sums[part][0][n];
        float2* const to = reinterpret_cast<float2*>(target + col);
        float2 x = make_float2(__fmul_rn(sum[2 * below], factor), __fmul_rn(sum[2 * below + 1], factor));
        if (p.accumulate) x = make_float2(__fadd_rn(x.x, to->x), __fadd_rn(x.y, to->y));
        *to = x;
      }
    }
  }
}

// By all finishers: zeros in tiles of experts without rows.
template <typename T, typename Out>
__device__ __forceinline__ void clear_idle_tiles(const GradientProduct<Out>& p, const int* order) {
  constexpr int kWidth = 16 / sizeof(Out), kAcross = kSquare / kWidth;
  for_each_gradient_tile<T>(p, order, [&](const GradientTile& tile) {
    if (tile.steps > 0) return;
    Out* const target = p.out + int64_t{tile.expert} * p.rows * p.cols;
    for (int i = finisher_index(); i < kConsumers * kSquare * kAcross; i += kFinishers) {
      const int row = tile.row + i / kAcross, col = tile.col + i % kAcross * kWidth;
      if (row < p.rows && col < p.cols) store_16(target + int64_t{row} * p.cols + col, 0, 0, 0, 0);
    }
  });
}

// By all threads of a consumer.
template <typename T, typename Out>
__device__ __forceinline__ void multiply_gradient_tiles(int consumer, const GradientProduct<Out>& p,
                                                        const int* order, uint32_t shared, const Ring& ring) {
  const float factor = product_of_scales(p.scale_d_y, p.scale_x, 0);
  Sums sums = {};
  unsigned slot = 0;  // steps read so far
  for_each_gradient_tile<T>(p, order, [&](const GradientTile& tile) {
    if (tile.steps == 0) return;
    sum_tile<T>(sums, consumer, tile.steps, shared, ring, slot);
    leave_sums(sums, p, tile, consumer, factor, shared, ring, slot);
  });
}

#endif  // PARKA_SM90_CODE

template <typename T, typename Out>
__global__ void __launch_bounds__(kThreads, 1) __cluster_dims__(kClusterBlocks, 1, 1)
    grouped_gradient_kernel(const __grid_constant__ GradientProduct<Out> product) {
#if PARKA_SM90_CODE
  extern __shared__ __align__(1024) unsigned char memory[];
  const uint32_t shared = shared_address(memory);
  const Ring ring(shared);
  int* const order = reinterpret_cast<int*>(memory + kOrderAt);
  run_roles<kGradientFinisherRegisters, kGradientConsumerRegisters>(
      ring, OutTile(shared),
      [&] { order_experts(product.experts, reinterpret_cast<int*>(memory + kCountsAt), order); },
      [&] { copy_gradient_tiles<T>(product, order, shared, ring); },
      [&](int consumer) { multiply_gradient_tiles<T>(consumer, product, order, shared, ring); },
      [&] {
        if (!product.accumulate) clear_idle_tiles<T>(product, order);
      });
#endif
}

}  // namespace

bool fits_sm90(const CudaDevice& device, const GroupedGemm& a) {
  const auto [rows, cols, depth, experts] = shape_of(a);
  const bool fast = a.a.scaling == Scaling::kNone || a.fast_accumulation;
  // Where the summed axis is across rows, a step must not reach into the next expert's.
  const int64_t depth_unit = a.b_transposed ? kTerms<BFloat16> : 16;
  return device.has_float8_tiles() && fits_formats(a.a, a.b) && fast && a.out.dtype == DType::kBF16 && depth > 0 &&
         depth % depth_unit == 0 && are_multiples(16, {cols, depth, rows, experts * cols, experts * depth}) &&
         are_aligned({a.a.data.data, a.b.data.data, a.out.data});
}

void run_sm90(CudaDevice& device, const GroupedGemm& a) {
  const auto run = [&](auto type, auto summed_b) {
    using T = decltype(type);
    constexpr bool kSummedB = decltype(summed_b)::value;
    launch_persistent(device, "grouped_gemm", grouped_rows_kernel<T, kSummedB>, make_product<T, kSummedB>(a),
                      kRowsSharedBytes);
  };
  if (a.b_transposed) {
    run(BFloat16{}, std::true_type());
  } else {
    with_operands(a.a.data.dtype, [&](auto type) { run(type, std::false_type()); });
  }
}

bool fits_sm90(const CudaDevice& device, const GroupedWeightGradient& a) {
  const auto [rows, cols, depth, experts] = shape_of(a);
  return device.has_float8_tiles() && fits_formats(a.d_y, a.x) && rows > 0 &&
         are_multiples(16, {cols, depth, rows, experts * cols, experts * depth}) &&
         are_aligned({a.d_y.data.data, a.x.data.data, a.out.data});
}

void run_sm90(CudaDevice& device, const GroupedWeightGradient& a) {
  with_operands(a.d_y.data.dtype, [&](auto type) {
    with_plain_type(a.out.dtype, [&](auto out) {
      using T = decltype(type);
      using Out = decltype(out);
      launch_persistent(device, "grouped_weight_gradient", grouped_gradient_kernel<T, Out>, make_product<T, Out>(a),
                        kSharedBytes);
    });
  });
}

}  // namespace parka::cuda
