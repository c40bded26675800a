#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "core/number_formats.h"
#include "kernels/cuda/attention/attention_paths.cuh"
#include "kernels/cuda/attention/rope_pairs.cuh"
#include "kernels/cuda/ptx/mma.cuh"
#include "kernels/cuda/quantize/fp8.cuh"

// Building blocks of the tensor-core attention kernels, and their letters:
//
//   B, S, H, Hkv, D   sequences, positions of each, heads of queries, heads of keys and values, elements of a head
//   qkv               [B S, (H + 2 Hkv) D]: queries, keys and values of a row side by side; out is [B S, H D]
//   lse, delta        [B, H, S]: a row's log-sum-exp of scores, and d_out . out
//   tile              rows of a head in shared memory, D columns wide; with D = kPaddedHeadDim the head's own,
//                     zeros behind them, and a part of a wider row
//   c[m][n][4]        what a lane has of a warp's product: fp32 fragments of 16 x 8, as mma_m16n8k16 has them.
//                     Element e of c[m][n] is at row 16 m + 8 (e / 2) + lane / 4, column 8 n + 2 (lane % 4) + e % 2
namespace parka::cuda {

constexpr float kLog2E = 1.44269504088896341f;  // log2(e)
constexpr float kLn2 = 0.693147180559945309f;

// Columns that a row of a tile has place for: multiples of 64, so that chunks are permuted within rows.
template <int D>
constexpr int kTileWidth = D == kPaddedHeadDim ? 128 : D;
template <int D>
constexpr int kRowBytes = kTileWidth<D> * 2;

// The width of heads in memory.
template <int D>
__device__ inline int head_width(const AttentionDims& dims) {
  return D == kPaddedHeadDim ? dims.D : D;
}

// The shared memory that a block may take on any GPU: the least is that of compute capability 8.6 and 8.9.
constexpr int kMostSharedBytes = 99 << 10;

// The place of a row's 16-byte chunk in its tile, which begins at a multiple of 256 bytes. Chunks are permuted
// within 8 so that both a row and a column of 8 chunks cover all banks.
template <int D>
__device__ inline uint32_t chunk_offset(int row, int chunk) {
  return static_cast<uint32_t>(row * kRowBytes<D> + ((chunk ^ (row % 8)) * 16));
}

// The chunk whose address this lane gives to ldmatrix, for the 16 rows and 16 columns at the start of a tile: first
// the upper and lower 8 rows of the left half, then those of the right half. To move by 16 rows add 16 kRowBytes.
template <int D>
__device__ inline uint32_t lane_offset() {
  const int lane = threadIdx.x % kWarpSize;
  return chunk_offset<D>(lane % 16, lane / 16);
}
// The same in the order left and right half of the upper 8 rows, then of the lower: for the right operands of a
// product with the transposed tile, so that the two registers of each are neighbours, as the product needs them.
template <int D>
__device__ inline uint32_t lane_offset_transposed() {
  const int lane = threadIdx.x % kWarpSize;
  return chunk_offset<D>(lane / 16 * 8 + lane % 8, lane / 8 % 2);
}
// Moves such an address by 16 k columns: toggles bits of the chunk within its 8, and adds for each 8.
__device__ inline uint32_t columns16(uint32_t address, int k) {
  return (address ^ static_cast<uint32_t>(k % 4 * 32)) + static_cast<uint32_t>(k / 4 * 128);
}

// Starts the copy of rows [begin, begin + kRows) of a matrix into a tile. Rows from `end` on become zeros, and so
// do columns from `width` on.
template <int D, int kRows, int kThreads>
__device__ inline void load_tile_async(uint32_t tile, const BFloat16* x, int64_t stride, int begin, int end,
                                       int width = D) {
  constexpr int kChunks = kTileWidth<D> / 8, kRowsPerPass = kThreads / kChunks;
  static_assert(kRows % kRowsPerPass == 0 && (kRowsPerPass % 8 == 0 || kRowsPerPass == 4));
  const int row = static_cast<int>(threadIdx.x) / kChunks, chunk = static_cast<int>(threadIdx.x) % kChunks;
  const BFloat16* source = x + (begin + row) * stride + chunk * 8;
  const uint32_t target = tile + chunk_offset<D>(row, chunk);
#pragma unroll
  for (int pass = 0; pass < kRows / kRowsPerPass; ++pass) {
    const int rows = pass * kRowsPerPass;
    // Four rows on, the third bit of the row toggles that of the chunk.
    const uint32_t permuted = target ^ static_cast<uint32_t>(rows % 8 * 16);
    cp_async_16(permuted + rows * kRowBytes<D>, source + rows * stride,
                begin + row + rows < end && (D != kPaddedHeadDim || chunk * 8 < width));
  }
}

// Starts the copy of the statistics of queries [begin, begin + kRows); of those from `end` on they become zeros.
template <int kRows, int kThreads>
__device__ inline void load_statistics_async(RowStatistics* tile, const RowStatistics* statistics, int begin,
                                             int end) {
  static_assert(kRows <= kThreads);
  const int i = static_cast<int>(threadIdx.x);
  if (i < kRows) cp_async_8(shared_address(tile + i), statistics + begin + i, begin + i < end);
}

// The place of a warp's operand in shared memory: an address with lane_offset or lane_offset_transposed added, and
// bytes beyond it, a constant. Operands of the same address share what columns16 makes of it.
struct Operand {
  uint32_t address;
  int bytes;
};

// c += A B^T for A [16 kM, D], at lane_offset, and B [8 kN, D], at lane_offset_transposed.
template <int D, int kM, int kN>
__device__ inline void multiply_transposed(float (&c)[kM][kN][4], Operand a_tile, Operand b_tile) {
  static_assert(kN % 2 == 0);
#pragma unroll
  for (int k = 0; k < D / 16; ++k) {
    uint32_t a[kM][4];
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      ldmatrix_x4(a[m], columns16(a_tile.address, k) + a_tile.bytes + m * 16 * kRowBytes<D>);
    }
#pragma unroll
    for (int n = 0; n < kN; n += 2) {
      uint32_t b[4];
      ldmatrix_x4(b, columns16(b_tile.address, k) + b_tile.bytes + n * 8 * kRowBytes<D>);
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        mma_m16n8k16(c[m][n], a[m], b[0], b[1]);
        mma_m16n8k16(c[m][n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

// Rows [16 kM, D] of a tile, at lane_offset, as the left operand of products with transposed tiles.
template <int D, int kM>
__device__ inline void load_rows(uint32_t (&a)[kM][D / 16][4], uint32_t address) {
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int k = 0; k < D / 16; ++k) ldmatrix_x4(a[m][k], columns16(address, k) + m * 16 * kRowBytes<D>);
  }
}

// c += A B^T for A [16 kM, D] in registers (see load_rows) and B [8 kN, D], at lane_offset_transposed.
template <int D, int kM, int kN>
__device__ inline void multiply_transposed(float (&c)[kM][kN][4], const uint32_t (&a)[kM][D / 16][4],
                                           Operand b_tile) {
  static_assert(kN % 2 == 0);
#pragma unroll
  for (int k = 0; k < D / 16; ++k) {
#pragma unroll
    for (int n = 0; n < kN; n += 2) {
      uint32_t b[4];
      ldmatrix_x4(b, columns16(b_tile.address, k) + b_tile.bytes + n * 8 * kRowBytes<D>);
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        mma_m16n8k16(c[m][n], a[m][k], b[0], b[1]);
        mma_m16n8k16(c[m][n + 1], a[m][k], b[2], b[3]);
      }
    }
  }
}

// c += A B for A [16 kM, 16 kK] in registers (see pack_rows) and B [16 kK, D], at lane_offset.
template <int D, int kM, int kK>
__device__ inline void multiply(float (&c)[kM][D / 8][4], const uint32_t (&a)[kM][kK][4], Operand b_tile) {
#pragma unroll
  for (int k = 0; k < kK; ++k) {
#pragma unroll
    for (int n = 0; n < D / 8; n += 2) {
      uint32_t b[4];
      ldmatrix_x4_trans(b, columns16(b_tile.address, n / 2) + b_tile.bytes + k * 16 * kRowBytes<D>);
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        mma_m16n8k16(c[m][n], a[m][k], b[0], b[1]);
        mma_m16n8k16(c[m][n + 1], a[m][k], b[2], b[3]);
      }
    }
  }
}

// Accumulators rounded to bf16, as the left operand of a product.
template <int kM, int kN>
__device__ inline void pack_rows(const float (&c)[kM][kN][4], uint32_t (&a)[kM][kN / 2][4]) {
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      a[m][n / 2][n % 2 * 2] = pack_bf16(c[m][n][0], c[m][n][1]);
      a[m][n / 2][n % 2 * 2 + 1] = pack_bf16(c[m][n][2], c[m][n][3]);
    }
  }
}

template <int kM, int kN>
__device__ inline void clear(float (&c)[kM][kN][4]) {
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int n = 0; n < kN; ++n) c[m][n][0] = c[m][n][1] = c[m][n][2] = c[m][n][3] = 0.0f;
  }
}

template <int kM, int kN>
__device__ inline void scale_by(float (&c)[kM][kN][4], float factor) {
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) c[m][n][e] *= factor;
    }
  }
}

// Scores of the warp's tile for which is_hidden(query, key) become -inf, both counted from the tile's first. Rows
// are queries and columns keys, or the other way around.
template <bool kRowsAreKeys, int kM, int kN, typename IsHidden>
__device__ inline void mask_scores(float (&scores)[kM][kN][4], const IsHidden& is_hidden) {
  const int lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int row = m * 16 + e / 2 * 8 + lane / 4, column = n * 8 + lane % 4 * 2 + e % 2;
        if (kRowsAreKeys ? is_hidden(column, row) : is_hidden(row, column)) scores[m][n][e] = -INFINITY;
      }
    }
  }
}

// Scores of keys after their query become -inf; `distance` is the first query less the first key.
template <bool kRowsAreKeys, int kM, int kN>
__device__ inline void mask_later_keys(float (&scores)[kM][kN][4], int distance) {
  mask_scores<kRowsAreKeys>(scores, [&](int query, int key) { return key - query > distance; });
}

// Scores of keys from the `count`th of the tile on, which do not exist, become -inf. Rows are queries.
template <int kM, int kN>
__device__ inline void mask_missing_keys(float (&scores)[kM][kN][4], int count) {
  mask_scores<false>(scores, [&](int, int key) { return key >= count; });
}

// Scores of keys before the first key of their query become -inf. `first_key` points to that of the tile's first
// query; the sequence ends `last` queries later, and those past it are masked alike. `first`: the tile's first key.
template <bool kRowsAreKeys, int kM, int kN>
__device__ inline void mask_earlier_keys(float (&scores)[kM][kN][4], const int32_t* first_key, int last,
                                         int first) {
  mask_scores<kRowsAreKeys>(scores, [&](int query, int key) { return first + key < first_key[min(query, last)]; });
}

// Puts p in place of scores, of keys (rows) and queries.
template <int kN>
__device__ __forceinline__ void probabilities_by_key(float (&scores)[1][kN][4], const RowStatistics* statistics,
                                                     float scale_log2) {
  const int lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    const float4 pair = *reinterpret_cast<const float4*>(statistics + n * 8 + lane % 4 * 2);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      scores[0][n][e] = exp2_approximate(fmaf(scores[0][n][e], scale_log2, e % 2 == 0 ? -pair.x : -pair.z));
    }
  }
}

// d_s = p * (d_p - delta) in place of d_p.
template <int kN>
__device__ __forceinline__ void score_gradient_by_key(const float (&p)[1][kN][4], float (&d_p)[1][kN][4],
                                                      const RowStatistics* statistics) {
  const int lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    const float4 pair = *reinterpret_cast<const float4*>(statistics + n * 8 + lane % 4 * 2);
#pragma unroll
    for (int e = 0; e < 4; ++e) d_p[0][n][e] = p[0][n][e] * (d_p[0][n][e] - (e % 2 == 0 ? pair.y : pair.w));
  }
}

// Rotates a warp's rows, which are positions from `begin` on of S, back by the angles of cos_sin [S, D]. A lane has
// both elements of each of its pairs. Rows past the end are rotated by those of the last one.
template <int D, int kM>
__device__ inline void rotate_back(float (&c)[kM][D / 8][4], const float* cos_sin, int begin, int S) {
  constexpr int kHalf = D / 2, kTiles = D / 16;      // of a half of a head: columns, and fragments across
  const int lane = read_thread_index() % kWarpSize;  // anew, as in store_rows
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int position = min(begin + m * 16 + half * 8 + lane / 4, S - 1);
      const float* const cos_D = cos_sin + int64_t{position} * D + lane % 4 * 2;
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        const float2 cos = __ldg(reinterpret_cast<const float2*>(cos_D + n * 8));
        const float2 sin = __ldg(reinterpret_cast<const float2*>(cos_D + kHalf + n * 8));
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float &low = c[m][n][2 * half + e], &high = c[m][n + kTiles][2 * half + e];
          const float old_low = low, cos_e = e == 0 ? cos.x : cos.y, sin_e = e == 0 ? sin.x : sin.y;
          low = rotated_low(old_low, high, cos_e, -sin_e);
          high = rotated_high(old_low, high, cos_e, -sin_e);
        }
      }
    }
  }
}

// The maximum of `amax` and the magnitudes in the lane's rows, of which the warp's first `count` exist.
template <int kM, int kN>
__device__ inline float max_of_rows(float amax, const float (&c)[kM][kN][4], int count) {
  const int lane = read_thread_index() % kWarpSize;
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float of_row = 0.0f;
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        of_row = max_magnitude(max_magnitude(of_row, c[m][n][2 * half]), c[m][n][2 * half + 1]);
      }
      if (m * 16 + half * 8 + lane / 4 < count) amax = fmaxf(amax, of_row);
    }
  }
  return amax;
}

// Raises *target to the largest of the warp's `amax`, as bf16 holds it: rounding keeps the order of numbers.
__device__ inline void raise_to_warp_max(float* target, float amax) {
  amax = warp_max(amax);
  if (read_thread_index() % kWarpSize == 0) raise_to(target, to_float(from_float<BFloat16>(amax)));
}

// Stores a warp's accumulators, rounded to bf16, as rows of x, of which the first `count` exist, and the first
// `width` columns. They pass through as many rows of a tile, which begin at a multiple of 8 and which no other warp
// reads any more, so that each row is written in one piece.
template <int D, int kM>
__device__ inline void store_rows(const float (&c)[kM][D / 8][4], unsigned char* tile_rows, BFloat16* x,
                                  int64_t stride, int count, int width = D) {
  constexpr int kChunks = kTileWidth<D> / 8, kRowsPerPass = kWarpSize / kChunks;
  const int lane = read_thread_index() % kWarpSize;  // anew: addresses computed ahead would take registers
  __syncwarp();
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int n = 0; n < D / 8; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t offset = chunk_offset<D>(m * 16 + half * 8 + lane / 4, n) + lane % 4 * 4;
        *reinterpret_cast<uint32_t*>(tile_rows + offset) = pack_bf16(c[m][n][2 * half], c[m][n][2 * half + 1]);
      }
    }
  }
  __syncwarp();
#pragma unroll
  for (int begin = 0; begin < kM * 16; begin += kRowsPerPass) {
    const int row = begin + lane / kChunks, chunk = lane % kChunks;
    if (row < count && (D != kPaddedHeadDim || chunk * 8 < width)) {
      *reinterpret_cast<uint4*>(x + row * stride + chunk * 8) =
          *reinterpret_cast<const uint4*>(tile_rows + chunk_offset<D>(row, chunk));
    }
  }
}

// A warp works on a head of sequence b, on the rows from `begin` on: those of the block's tile from `warp_row` on.
struct Work {
  int b, head, begin, warp_row;
};

// Blocks start roughly in the order of their index. They process a section of the heads of all sequences at a time,
// small enough for the data they reuse to stay in the L2 cache. In a section, tiles with the most work come first,
// so that no long tile is left at the end. A second call, after a kernel's main loop, recomputes everything: the
// loop needs the registers that would hold it.
template <int kTileRows, int kWarpRows, bool kLastIsLongest>
__device__ inline Work find_work(const AttentionDims& dims, int heads_per_sequence, int section_heads) {
  // blockIdx.x and threadIdx.x, which the compiler does not know to be the same at the next call.
  const unsigned block = read_block_index(), thread = read_thread_index();
  const unsigned num_tiles = (dims.S + kTileRows - 1) / kTileRows, num_heads = dims.B * heads_per_sequence;
  const unsigned section_blocks = section_heads * num_tiles;
  const unsigned first_head = block / section_blocks * section_heads, within = block % section_blocks;
  const unsigned heads = min(static_cast<unsigned>(section_heads), num_heads - first_head);
  const unsigned head = first_head + within % heads, rank = within / heads;
  const unsigned tile = kLastIsLongest ? num_tiles - 1 - rank : rank;
  const unsigned warp_row = thread / kWarpSize * kWarpRows;
  return {static_cast<int>(head / heads_per_sequence), static_cast<int>(head % heads_per_sequence),
          static_cast<int>(tile * kTileRows + warp_row), static_cast<int>(warp_row)};
}

// Heads per section when the blocks of each read `bytes`, which rounds to none where many heads share a key head.
inline int heads_per_section(int num_heads, int64_t bytes) {
  constexpr int64_t kSectionBytes = int64_t{16} << 20;  // the L2 cache holds 40 MiB (A100) or more
  return static_cast<int>(std::clamp<int64_t>(kSectionBytes / std::max<int64_t>(bytes, 1), 1, num_heads));
}

}  // namespace parka::cuda
