#pragma once
#include <algorithm>
#include <cstdint>

#include <cuda_bf16.h>

#include "kernels/cuda/fp8.cuh"

// What turns pairs, and the kernel that writes turned gradients as FP8 codes in both orders.
//
// Shapes: T rows (tokens), S positions, D elements of a head, W elements of a row of the fused QKV matrix.
namespace parka::cuda::rope {

// Products that nothing can fuse with the sum: the same bits as on the CPU.
__device__ inline float turned_low(float low, float high, float cos, float sin) {
  return __fsub_rn(__fmul_rn(low, cos), __fmul_rn(high, sin));
}
__device__ inline float turned_high(float low, float high, float cos, float sin) {
  return __fadd_rn(__fmul_rn(high, cos), __fmul_rn(low, sin));
}

// The position of a row, without a division.
struct Positions {
  unsigned count, inverse;  // inverse: 2^32 / count, rounded down

  explicit Positions(int64_t positions)
      : count(static_cast<unsigned>(positions)),
        inverse(static_cast<unsigned>(std::min<int64_t>((int64_t{1} << 32) / positions, UINT32_MAX))) {}

  __device__ int of(unsigned row) const {
    const unsigned rest = row - __umulhi(row, inverse) * count;  // the quotient is at most 1 too small
    return static_cast<int>(rest < count ? rest : rest - count);
  }
};

// ---- Codes of one scale, of a matrix of which queries and keys are turned back ----
//
// A block has 64 rows, and makes tiles of 128 columns, one head or two, one after the other: the angles of its
// rows, which are more bytes than a tile, stay in registers. A thread has 4 pairs of 4 rows of each tile, and turns
// them once for both orders of the codes.

constexpr int kTileRows = 64;
constexpr int kTileCols = 128;
constexpr int kTileThreads = 256;
constexpr int kTileBlocks = 2;  // that a multiprocessor should have room for
constexpr int kTileSteps = 8;   // tiles of a block
constexpr int kTileHeight = 4;  // adjacent rows of a thread: as many as a word has bytes
constexpr int kTilePairs = 4;

struct TurnedCodes {
  const BFloat16* qkv_TW;
  const float* cos_sin_SD;
  uint8_t* codes_TW;  // null: not wanted
  uint8_t* codes_WT;  // null: not wanted
  const float* amax;
  float* scale;
  Positions positions;
  int rows, width, turned_width;
};

// Rounds two numbers to bf16, in one conversion.
__device__ inline void round_to_bf16(float& x, float& y) {
  const __nv_bfloat162 rounded = __floats2bfloat162_rn(x, y);
  const auto bits = *reinterpret_cast<const uint32_t*>(&rounded);
  x = __uint_as_float(bits << 16);
  y = __uint_as_float(bits & 0xffff0000u);
}

// A tile in shared memory: its columns, two in 128 bytes, of 4 pieces of 16 rows each. The eight pieces of two
// columns change places by a number that differs between the threads of a warp that store at once: they use
// different banks.
__device__ inline unsigned tile_piece(unsigned column, unsigned piece) {
  return column / 2 * 8 + ((column % 2 * 4 + piece) ^ (column / 4 % 8));
}

// What a thread has of a tile.
template <int kHalf>
struct TilePart {
  // Threads of a warp: 8 side by side, 4 one below the other.
  int across = static_cast<int>(threadIdx.x % 8 + threadIdx.x / kWarpSize % 2 * 8);
  int down = static_cast<int>(threadIdx.x % kWarpSize / 8 + threadIdx.x / (2 * kWarpSize) * 4);
  int pair = across * kTilePairs % kHalf;                         // of the head
  int column = across * kTilePairs / kHalf * (2 * kHalf) + pair;  // of the tile: of the low half
};

struct TilePairs {
  Stored<BFloat16, kTilePairs> low[kTileHeight], high[kTileHeight];
};

struct TileAngles {
  Stored<float, kTilePairs> cos[kTileHeight], sin[kTileHeight];
};

// Codes of a thread's pairs, four columns in a word.
struct TileCodes {
  uint32_t low[kTileHeight], high[kTileHeight];
};

// Turned back, if `turns`.
template <typename F8>
__device__ TileCodes encode(const TilePairs& x, const TileAngles& angles, bool turns, float inverse) {
  TileCodes codes;
#pragma unroll
  for (int k = 0; k < kTileHeight; ++k) {
    float low[kTilePairs], high[kTilePairs];
#pragma unroll
    for (int i = 0; i < kTilePairs; ++i) {
      low[i] = x.low[k][i];
      high[i] = x.high[k][i];
    }
    if (turns) {
#pragma unroll
      for (int i = 0; i < kTilePairs; ++i) {
        const float cos = angles.cos[k][i], sin = -angles.sin[k][i], old_low = low[i];
        low[i] = turned_low(old_low, high[i], cos, sin);
        high[i] = turned_high(old_low, high[i], cos, sin);
      }
#pragma unroll
      for (int i = 0; i < kTilePairs; i += 2) {
        round_to_bf16(low[i], low[i + 1]);
        round_to_bf16(high[i], high[i + 1]);
      }
    }
#pragma unroll
    for (int i = 0; i < kTilePairs; ++i) {
      low[i] = __fmul_rn(low[i], inverse);
      high[i] = __fmul_rn(high[i], inverse);
    }
    codes.low[k] = encode_float8x4<F8>(low[0], low[1], low[2], low[3]);
    codes.high[k] = encode_float8x4<F8>(high[0], high[1], high[2], high[3]);
  }
  return codes;
}

// Stores four columns of four rows, a word each.
__device__ inline void store_columns(const uint32_t (&rows)[4], unsigned column, unsigned down, uint32_t* shared) {
  const uint32_t low01 = __byte_perm(rows[0], rows[1], 0x5140), low23 = __byte_perm(rows[2], rows[3], 0x5140);
  const uint32_t high01 = __byte_perm(rows[0], rows[1], 0x7362), high23 = __byte_perm(rows[2], rows[3], 0x7362);
  const auto at = [&](unsigned i) -> uint32_t& { return shared[tile_piece(column + i, down / 4) * 4 + down % 4]; };
  at(0) = __byte_perm(low01, low23, 0x5410);
  at(1) = __byte_perm(low01, low23, 0x7632);
  at(2) = __byte_perm(high01, high23, 0x5410);
  at(3) = __byte_perm(high01, high23, 0x7632);
}

// Writes a tile that begins at (row, col), transposed.
__device__ inline void write_columns(const uint32_t* shared, const TurnedCodes& a, int row, int col) {
  constexpr int kPieces = kTileRows / 16;  // of a column
  const auto piece = threadIdx.x % kPieces;
  row += static_cast<int>(piece) * 16;
  if (row >= a.rows) return;
#pragma unroll
  for (unsigned n = 0; n < kTileCols * kPieces / kTileThreads; ++n) {
    const unsigned column = threadIdx.x / kPieces + n * (kTileThreads / kPieces);
    uint8_t* const target = a.codes_WT + int64_t{col + static_cast<int>(column)} * a.rows + row;
    *reinterpret_cast<Pack<uint32_t, 4>*>(target) =
        reinterpret_cast<const Pack<uint32_t, 4>*>(shared)[tile_piece(column, piece)];
  }
}

// kHalf: D / 2, of which a tile has whole heads. The rows are a multiple of 16, the columns of 128.
template <typename F8, int kHalf>
__global__ void __launch_bounds__(kTileThreads, kTileBlocks) codes_kernel(const TurnedCodes a) {
  alignas(16) __shared__ uint32_t shared[2][kTileRows * kTileCols / 4];
  const PieceScale scale = scale_for<F8, float>(*a.amax);
  if (threadIdx.x == 0 && blockIdx.x == 0 && blockIdx.y == 0) *a.scale = scale.scale;
  // The last rows and columns first: they are those that the search for the maximum has left in the cache.
  const int first_row = static_cast<int>(gridDim.x - 1 - blockIdx.x) * kTileRows;
  const int last_tile = a.width / kTileCols - static_cast<int>(blockIdx.y) * kTileSteps;
  const int first_tile = max(last_tile - kTileSteps, 0);

  const TilePart<kHalf> part;
  const bool has_rows = first_row + part.down * kTileHeight < a.rows;
  const int row = min(first_row + part.down * kTileHeight, a.rows - kTileHeight);
  const int64_t offset = int64_t{row} * a.width + part.column;
  const auto load_tile = [&](int tile) {
    TilePairs x;
#pragma unroll
    for (int k = 0; k < kTileHeight; ++k) {
      const BFloat16* const p = a.qkv_TW + offset + int64_t{k} * a.width + tile * kTileCols;
      x.low[k] = load_stored<kTilePairs>(p);
      x.high[k] = load_stored<kTilePairs>(p + kHalf);
    }
    return x;
  };
  TilePairs next = load_tile(first_tile);
  TileAngles angles;
#pragma unroll
  for (int k = 0; k < kTileHeight; ++k) {
    const float* const cos_D =
        a.cos_sin_SD + int64_t{a.positions.of(static_cast<unsigned>(row + k))} * (2 * kHalf) + part.pair;
    angles.cos[k] = load_stored<kTilePairs>(cos_D);
    angles.sin[k] = load_stored<kTilePairs>(cos_D + kHalf);
  }

  for (int tile = first_tile; tile < last_tile; ++tile) {
    const TilePairs x = next;
    if (tile + 1 < last_tile) next = load_tile(tile + 1);
    const int col = tile * kTileCols;
    const TileCodes codes = encode<F8>(x, angles, col + part.column < a.turned_width, scale.inverse);
    if (a.codes_TW != nullptr && has_rows) {
#pragma unroll
      for (int k = 0; k < kTileHeight; ++k) {
        uint8_t* const target = a.codes_TW + offset + int64_t{k} * a.width + col;
        *reinterpret_cast<uint32_t*>(target) = codes.low[k];
        *reinterpret_cast<uint32_t*>(target + kHalf) = codes.high[k];
      }
    }
    if (a.codes_WT == nullptr) continue;
    // Two tiles in turn: what is stored now has been read before all threads passed the barrier of the last tile.
    uint32_t* const buffer = shared[tile % 2];
    const auto column = static_cast<unsigned>(part.column), down = static_cast<unsigned>(part.down);
    store_columns(codes.low, column, down, buffer);
    store_columns(codes.high, column + kHalf, down, buffer);
    __syncthreads();
    write_columns(buffer, a, first_row, col);
  }
}

}  // namespace parka::cuda::rope
