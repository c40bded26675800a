#pragma once
#include <cstdint>

#include "kernels/cuda/ptx/mma.cuh"
#include "kernels/cuda/quantize/fp8.cuh"
#include "kernels/cuda/quantize/matrix_source.cuh"

// Tiles of FP8 codes, written in either order. 256 threads have a tile of 128 x 128, each 4 rows of 16 columns.
namespace parka::cuda::tiles {

constexpr int kSize = 128;  // rows and columns of a tile
constexpr int kThreads = 256;
constexpr int kWidth = 16;                                // adjacent columns of a thread
constexpr int kHeight = 4;                                // adjacent rows of a thread
constexpr int kAcross = kSize / kWidth;                   // threads side by side
constexpr int kWords = kWidth / 4;                        // of a thread's codes in a row
constexpr int kWarps = kThreads / kWarpSize;              // one below the other
constexpr int kWarpRows = kWarpSize / kAcross * kHeight;  // rows of a warp
constexpr uint32_t kTileBytes = kSize * kSize;            // of codes
constexpr uint32_t kSharedWords = kTileBytes / 4;

// A thread's codes of its part of a tile, four columns in a word.
using Codes = uint32_t[kHeight][kWords];

// The begin of this thread's part of the block's tile. It may lie outside of the matrix.
struct Place {
  int row = static_cast<int>(blockIdx.y * kSize + threadIdx.x / kAcross * kHeight);
  int col = static_cast<int>(blockIdx.x * kSize + threadIdx.x % kAcross * kWidth);
};

template <typename F8>
__device__ inline uint32_t encode(const float (&x)[4], float inverse) {
  return encode_float8x4<F8>(__fmul_rn(x[0], inverse), __fmul_rn(x[1], inverse), __fmul_rn(x[2], inverse),
                             __fmul_rn(x[3], inverse));
}

template <typename F8>
__device__ inline void encode(const float (&x)[kWidth], float inverse, uint32_t (&codes)[kWords]) {
#pragma unroll
  for (int w = 0; w < kWords; ++w) {
    codes[w] = encode<F8>({x[4 * w], x[4 * w + 1], x[4 * w + 2], x[4 * w + 3]}, inverse);
  }
}

// `target` is aligned to 16 bytes.
__device__ inline void store_16(uint8_t* target, const uint32_t (&codes)[kWords]) {
  *reinterpret_cast<Pack<uint32_t, kWords>*>(target) = {codes[0], codes[1], codes[2], codes[3]};
}

// The target of a matrix of codes, in either order or both.
struct CodeOutput {
  uint8_t* codes_RC;  // null: not wanted; 16-byte aligned, and C and the stride multiples of 16
  uint8_t* codes_CR;  // null: not wanted
  int rows, cols;
  int stride;   // from row to row of codes_RC; more than C where the matrix is a part of a wider one
  bool wide_t;  // codes_CR is 16-byte aligned, and R a multiple of 16

  // The target of one of the matrices below each other of which this is the first.
  __device__ CodeOutput of_matrix(unsigned number) const {
    CodeOutput one = *this;
    if (codes_RC != nullptr) one.codes_RC += number * int64_t{rows} * stride;
    if (codes_CR != nullptr) one.codes_CR += number * int64_t{rows} * cols;
    return one;
  }
};

// ---- The tile in shared memory ----
//
// Rows of 128 bytes, in 8 pieces of 16 columns. To avoid bank conflicts the pieces are swizzled: each is stored at
// its place XOR a number that differs between the rows that write_transposed() reads at once. The 8 pieces of a
// row, which are stored at once, lie in different banks too. A tile is aligned to kTileAlignment.

constexpr int kTileAlignment = 128;

// The begin of the piece, from the tile's first byte.
__device__ inline uint32_t piece_offset(unsigned row, unsigned piece) {
  return row * kSize + (piece ^ (row / 16 % 4 * 2 + row % 2)) * kWidth;
}

// The address of this thread's row 0, for put_codes().
__device__ inline uint32_t part_address(const uint32_t* tile) {
  return shared_address(tile) + piece_offset(threadIdx.x / kAcross * kHeight, threadIdx.x % kAcross);
}

// The same in row k: in odd rows the piece's place differs in its lowest bit.
__device__ inline uint32_t row_address(uint32_t part, int k) {
  return (part ^ static_cast<uint32_t>(k % 2 * kWidth)) + static_cast<uint32_t>(k * kSize);
}

__device__ inline void store_shared(uint32_t address, const uint32_t (&x)[4]) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};\n" ::"r"(address), "r"(x[0]), "r"(x[1]), "r"(x[2]),
               "r"(x[3])
               : "memory");
}

// 16 rows of two adjacent columns of the tile, of this thread. A warp has 16 columns, and 64 rows at a time, and
// reads them as transposed matrices of 8 rows and 8 pairs of columns. Row i of matrix m is row 16 (i / 2) + 2 m + i
// % 2: the eight matrices then give each thread 16 adjacent rows.
struct ColumnPair {
  static constexpr int kRows = 64;

  uint32_t first[4], second[4];

  // The rows from kRows n on; all threads of a warp together.
  __device__ ColumnPair(const uint32_t* tile, int n) {
    const unsigned warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize, i = lane % 8;
    const uint32_t address = shared_address(tile) + piece_offset(i / 2 * 16 + lane / 8 * 2 + i % 2, warp) +
                             static_cast<uint32_t>(n * kRows * kSize);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t rows[4];  // two in each word
      ldmatrix_x4_trans(rows, address + static_cast<uint32_t>(half * 8 * kSize));
#pragma unroll
      for (int w = 0; w < 2; ++w) {
        first[2 * half + w] = __byte_perm(rows[2 * w], rows[2 * w + 1], 0x6420);
        second[2 * half + w] = __byte_perm(rows[2 * w], rows[2 * w + 1], 0x7531);
      }
    }
  }
  // Its place in the matrix.
  static __device__ int row(int n) {
    return static_cast<int>(blockIdx.y * kSize + threadIdx.x % 4 * 16) + n * kRows;
  }
  static __device__ int col() { return static_cast<int>(blockIdx.x * kSize + threadIdx.x / 4 * 2); }
};

// Writes up to 16 rows of a column, of any alignment.
__device__ inline void write_bytes(const uint32_t (&codes)[4], int row, int col, const CodeOutput& out) {
  if (col >= out.cols) return;
  uint8_t* const target = out.codes_CR + offset_of(col, out.rows, row);
#pragma unroll
  for (int w = 0; w < 4; ++w) {
#pragma unroll 1
    for (int i = 0; i < min(out.rows - row - 4 * w, 4); ++i) {
      target[4 * w + i] = static_cast<uint8_t>(codes[w] >> 8 * i);
    }
  }
}

// Writes the tile to codes_CR. To be called by all threads, after a barrier.
__device__ inline void write_transposed(const uint32_t* tile, const CodeOutput& out) {
  const int col = ColumnPair::col();
  const int64_t at = offset_of(col, out.rows, ColumnPair::row(0));
#pragma unroll
  for (int n = 0; n < kSize / ColumnPair::kRows; ++n) {
    const ColumnPair pair(tile, n);
    const int row = ColumnPair::row(n);
    if (out.wide_t) {
      uint8_t* const first = out.codes_CR + at + n * ColumnPair::kRows;
      if (row < out.rows && col < out.cols) store_16(first, pair.first);
      if (row < out.rows && col + 1 < out.cols) store_16(first + out.rows, pair.second);
    } else {
      write_bytes(pair.first, row, col, out);
      write_bytes(pair.second, row, col + 1, out);
    }
  }
}

// ---- Writing codes: rows as they are made, then columns ----

// Writes a thread's codes of its row k to codes_RC, and stores them for finish_codes() in the tile of `part`.
__device__ inline void put_codes(const uint32_t (&codes)[kWords], int k, const CodeOutput& out, uint32_t part) {
  const Place place;
  if (out.codes_RC != nullptr && place.col < out.cols && place.row + k < out.rows) {
    store_16(out.codes_RC + offset_of(place.row + k, out.stride, place.col), codes);
  }
  if (out.codes_CR != nullptr) store_shared(row_address(part, k), codes);
}

// Writes codes_CR, if it is wanted, of what all threads have put, after a barrier.
__device__ inline void finish_codes(const CodeOutput& out, const uint32_t* tile) {
  if (out.codes_CR != nullptr) write_transposed(tile, out);
}

// All of it for the block's tile. To be called by all threads, once.
__device__ inline void write_codes(const Codes& codes, const CodeOutput& out, const uint32_t* tile) {
  const uint32_t part = part_address(tile);
#pragma unroll
  for (int k = 0; k < kHeight; ++k) put_codes(codes[k], k, out, part);
  if (out.codes_CR == nullptr) return;
  __syncthreads();
  finish_codes(out, tile);
}

}  // namespace parka::cuda::tiles
