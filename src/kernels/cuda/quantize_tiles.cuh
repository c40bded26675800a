#pragma once
#include <algorithm>
#include <bit>
#include <cstdint>

#include "core/tensor.h"
#include "kernels/cuda/check.h"
#include "kernels/cuda/cuda_device.h"
#include "kernels/cuda/fp8.cuh"

// Writes a matrix in any format and both orders, whatever its numbers are made of: find_amax and write_tiles at the
// end of this file take them from a Source, which has
//   // x[i] = the number at (row, col + i), in fp32. Called only if fits_wide(): col is a multiple of 16, and all
//   // 16 columns exist. It may be called several times for the same place, and must then give the same bits.
//   __device__ void load(int row, int col, float (&x)[16]) const;
//   // The number at (row, col), the same bits as load() gives: what shapes that do not fit are made with.
//   __device__ float element(int row, int col) const;
//   // Whether load() can be called: the columns are a multiple of 16, and what it reads in 16 bytes is aligned so.
//   bool fits_wide() const;
// and is copied to the GPU as it is: pointers and numbers. load() should begin with its loads, and contain no
// barrier. matrix_source.cuh has those for numbers in memory.
//
// Shapes: R rows and C columns of the source. A block of 256 threads has a tile of 128 x 128, each thread 4 rows of
// 16 columns: whatever a scale belongs to, a group of a row or a column or a block, then lies within one tile.
namespace parka::cuda {
namespace tiles {

constexpr int kSize = 128;  // rows and columns of a tile
constexpr int kThreads = 256;
constexpr int kWidth = 16;                                // adjacent columns of a thread
constexpr int kHeight = 4;                                // adjacent rows of a thread: as many as a word has bytes
constexpr int kAcross = kSize / kWidth;                   // threads side by side
constexpr int kWords = kWidth / 4;                        // of a thread's codes in a row
constexpr int kWarps = kThreads / kWarpSize;              // one below the other
constexpr int kWarpRows = kWarpSize / kAcross * kHeight;  // rows of a warp
constexpr int kMinBlocks = 3;                             // that a multiprocessor should have room for
constexpr int kSharedWords = kSize * kSize / 4;           // of a tile of codes

// A thread's codes of its part of a tile, four columns in a word.
using Codes = uint32_t[kHeight][kWords];

// Where this thread's part of the block's tile begins. It may lie outside of the matrix.
struct Place {
  int row = static_cast<int>(blockIdx.y * kSize + threadIdx.x / kAcross * kHeight);
  int col = static_cast<int>(blockIdx.x * kSize + threadIdx.x % kAcross * kWidth);
};

// All numbers of a thread. Where there is no row or column they repeat the last ones, which changes no maximum.
template <typename Source>
__device__ inline void load_part(const Source& source, int rows, int cols, float (&x)[kHeight][kWidth]) {
  const Place place;
  const int col = min(place.col, cols - kWidth);
#pragma unroll
  for (int k = 0; k < kHeight; ++k) source.load(min(place.row + k, rows - 1), col, x[k]);
}

template <typename F8>
__device__ inline void encode(const float (&x)[kWidth], float inverse, uint32_t (&codes)[kWords]) {
#pragma unroll
  for (int w = 0; w < kWords; ++w) {
    codes[w] = encode_float8x4<F8>(__fmul_rn(x[4 * w], inverse), __fmul_rn(x[4 * w + 1], inverse),
                                   __fmul_rn(x[4 * w + 2], inverse), __fmul_rn(x[4 * w + 3], inverse));
  }
}

__device__ inline float max_magnitude_of(float amax, const float (&x)[kWidth]) {
#pragma unroll
  for (int i = 0; i < kWidth; ++i) amax = max_magnitude(amax, x[i]);
  return amax;
}

// Where a matrix of codes goes, in either order or both.
struct CodeOutput {
  uint8_t* codes_RC;  // null: not wanted; 16-byte aligned, and C and the stride multiples of 16
  uint8_t* codes_CR;  // null: not wanted
  int rows, cols;
  int stride;   // from row to row of codes_RC; more than C where the matrix is a part of a wider one
  bool wide_t;  // codes_CR is 16-byte aligned, and R a multiple of 16
};

// Four words of four columns each, one below the other, become four words of four rows each.
__device__ inline void transpose_4x4(const uint32_t (&rows)[4], uint32_t (&columns)[4]) {
  const uint32_t low01 = __byte_perm(rows[0], rows[1], 0x5140), low23 = __byte_perm(rows[2], rows[3], 0x5140);
  const uint32_t high01 = __byte_perm(rows[0], rows[1], 0x7362), high23 = __byte_perm(rows[2], rows[3], 0x7362);
  columns[0] = __byte_perm(low01, low23, 0x5410);
  columns[1] = __byte_perm(low01, low23, 0x7632);
  columns[2] = __byte_perm(high01, high23, 0x5410);
  columns[3] = __byte_perm(high01, high23, 0x7632);
}

// The tile in `shared`: a column is 128 bytes, 8 pieces of 16 rows. A piece is stored at its place XOR the number
// of the thread that had the column: the threads of a warp then write to different banks, and read 16 bytes each
// from different banks.
__device__ inline void store_transposed(const Codes& codes, uint32_t* shared) {
  const unsigned across = threadIdx.x % kAcross, down = threadIdx.x / kAcross;
  uint32_t* const first = shared + across * kWidth * (kSize / 4) + ((down / 4) ^ across) * 4 + down % 4;
#pragma unroll
  for (int w = 0; w < kWords; ++w) {
    const uint32_t rows[4] = {codes[0][w], codes[1][w], codes[2][w], codes[3][w]};
    uint32_t columns[4];
    transpose_4x4(rows, columns);
#pragma unroll
    for (int i = 0; i < 4; ++i) first[(4 * w + i) * (kSize / 4)] = columns[i];
  }
}

__device__ inline void write_transposed(const uint32_t* shared, const CodeOutput& out) {
  constexpr int kPieces = kSize / 16;  // of a column
#pragma unroll
  for (int n = 0; n < kSize * kPieces / kThreads; ++n) {
    const int column = static_cast<int>(threadIdx.x / kPieces) + n * (kThreads / kPieces);
    const int piece = threadIdx.x % kPieces;
    const int row = static_cast<int>(blockIdx.y) * kSize + piece * 16;
    const int col = static_cast<int>(blockIdx.x) * kSize + column;
    if (row >= out.rows || col >= out.cols) continue;
    const auto codes =
        reinterpret_cast<const Pack<uint32_t, 4>*>(shared)[column * kPieces + (piece ^ (column / kWidth))];
    uint8_t* const target = out.codes_CR + int64_t{col} * out.rows + row;
    if (out.wide_t) {
      *reinterpret_cast<Pack<uint32_t, 4>*>(target) = codes;
    } else {
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        if (row + i < out.rows) target[i] = static_cast<uint8_t>(codes.element[i / 4] >> 8 * (i % 4));
      }
    }
  }
}

// Writes the block's tile. To be called by all threads; `shared`, of kSharedWords, must not be used again before a
// barrier.
__device__ inline void write_codes(const Codes& codes, const CodeOutput& out, uint32_t* shared) {
  const Place place;
  if (out.codes_RC != nullptr && place.col < out.cols) {
    uint8_t* const target = out.codes_RC + int64_t{place.row} * out.stride + place.col;
#pragma unroll
    for (int k = 0; k < kHeight; ++k) {
      if (place.row + k < out.rows) {
        *reinterpret_cast<Pack<uint32_t, 4>*>(target + int64_t{k} * out.stride) = {codes[k][0], codes[k][1],
                                                                                   codes[k][2], codes[k][3]};
      }
    }
  }
  if (out.codes_CR != nullptr) {
    store_transposed(codes, shared);
    __syncthreads();
    write_transposed(shared, out);
  }
}

// ---- Where scales come from and go to ----

__device__ inline bool is_first_thread() { return threadIdx.x == 0 && blockIdx.x == 0 && blockIdx.y == 0; }

// One scale for a whole matrix.
struct TensorScale {
  float* scale;       // written if `amax` is given, else read
  const float* amax;  // may be null

  // What to multiply by before encoding.
  template <typename F8>
  __device__ float inverse() const {
    if (amax == nullptr) return __frcp_rn(*scale);
    const PieceScale piece = scale_for<F8, float>(*amax);
    if (is_first_thread()) *scale = piece.scale;
    return piece.inverse;
  }
};

// One scale per piece of a matrix: a row of scales for each row of pieces.
struct Scales {
  void* scale;
  bool is_bf16;
  int64_t across;  // scales in a row

  template <typename F8>
  __device__ PieceScale scale_of(float amax) const {
    return is_bf16 ? scale_for<F8, BFloat16>(amax) : scale_for<F8, float>(amax);
  }
  __device__ void write(int64_t row, int64_t col, float value) const {
    if (is_bf16) {
      static_cast<BFloat16*>(scale)[row * across + col] = from_float<BFloat16>(value);  // exact: it was rounded
    } else {
      static_cast<float*>(scale)[row * across + col] = value;
    }
  }
};

// ---- Kernels over tiles ----

template <typename Source>
__global__ void __launch_bounds__(kThreads) amax_kernel(const Source source, int rows, int cols, float* amax) {
  __shared__ float shared[kWarps];
  float x[kHeight][kWidth];
  load_part(source, rows, cols, x);
  float largest = 0.0f;
#pragma unroll
  for (int k = 0; k < kHeight; ++k) largest = max_magnitude_of(largest, x[k]);
  largest = block_max<kThreads>(largest, shared);
  if (threadIdx.x == 0) raise_to(amax, largest);
}

template <typename Source, typename F8>
__global__ void __launch_bounds__(kThreads, kMinBlocks)
    tensor_kernel(const Source source, const CodeOutput out, const TensorScale scale) {
  alignas(16) __shared__ uint32_t shared[kSharedWords];
  const float inverse = scale.inverse<F8>();
  const Place place;
  const int col = min(place.col, out.cols - kWidth);
  Codes codes;
#pragma unroll
  for (int k = 0; k < kHeight; ++k) {
    float x[kWidth];
    source.load(min(place.row + k, out.rows - 1), col, x);
    encode<F8>(x, inverse, codes[k]);
  }
  write_codes(codes, out, shared);
}

// A scale per tile, the same for both orders.
template <typename Source, typename F8>
__global__ void __launch_bounds__(kThreads)
    block_kernel(const Source source, const CodeOutput out, const Scales scales, const Scales scales_t) {
  alignas(16) __shared__ uint32_t shared[kSharedWords];
  __shared__ float shared_max[kWarps];
  float x[kHeight][kWidth];
  load_part(source, out.rows, out.cols, x);
  float amax = 0.0f;
#pragma unroll
  for (int k = 0; k < kHeight; ++k) amax = max_magnitude_of(amax, x[k]);
  amax = block_max<kThreads>(amax, shared_max);
  const PieceScale piece = scale_for<F8, float>(amax);
  if (threadIdx.x == 0 && out.codes_RC != nullptr) scales.write(blockIdx.y, blockIdx.x, piece.scale);
  if (threadIdx.x == 0 && out.codes_CR != nullptr) scales_t.write(blockIdx.x, blockIdx.y, piece.scale);
  Codes codes;
#pragma unroll
  for (int k = 0; k < kHeight; ++k) encode<F8>(x[k], piece.inverse, codes[k]);
  write_codes(codes, out, shared);
}

// The maximum over the `lanes` threads (1, 2, 4 or 8) that have a group of a row.
__device__ inline float group_max(float x, int lanes) {
  for (int offset = lanes / 2; offset > 0; offset /= 2) x = fmaxf(x, __shfl_xor_sync(kFullWarp, x, offset));
  return x;
}

// A scale per group of a row, of `lanes` threads.
template <typename Source, typename F8, typename S>
__global__ void __launch_bounds__(kThreads, kMinBlocks)
    group_kernel(const Source source, const CodeOutput out, S* scales, int scales_across, int lanes) {
  float x[kHeight][kWidth];
  load_part(source, out.rows, out.cols, x);
  PieceScale pieces[kHeight];
  Codes codes;
#pragma unroll
  for (int k = 0; k < kHeight; ++k) {
    pieces[k] = scale_for<F8, S>(group_max(max_magnitude_of(0.0f, x[k]), lanes));
    encode<F8>(x[k], pieces[k].inverse, codes[k]);
  }
  write_codes(codes, out, nullptr);
  const Place place;
  const int chunk = place.col / kWidth;
  if (place.col >= out.cols || chunk % lanes != 0) return;
  S* const target = scales + int64_t{place.row} * scales_across + chunk / lanes;
#pragma unroll
  for (int k = 0; k < kHeight; ++k) {
    if (place.row + k < out.rows) target[int64_t{k} * scales_across] = from_float<S>(pieces[k].scale);
  }
}

// A scale per group of a column: of a row of the transposed matrix, all that is written. The rows of `warps` warps
// are a group. Loads the numbers twice.
template <typename Source, typename F8>
__global__ void __launch_bounds__(kThreads)
    group_columns_kernel(const Source source, const CodeOutput out, const Scales scales_t, int warps) {
  alignas(16) __shared__ uint32_t shared[kSharedWords];
  __shared__ float factors[kWarps][kSize];  // maxima; then, in the first row of each group, what to multiply by
  const int across = static_cast<int>(threadIdx.x % kAcross) * kWidth;
  const int warp = static_cast<int>(threadIdx.x / kWarpSize);
  float x[kHeight][kWidth];
  load_part(source, out.rows, out.cols, x);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    float amax = 0.0f;
#pragma unroll
    for (int k = 0; k < kHeight; ++k) amax = max_magnitude(amax, x[k][i]);
#pragma unroll
    for (int offset = kAcross; offset < kWarpSize; offset *= 2) {
      amax = fmaxf(amax, __shfl_xor_sync(kFullWarp, amax, offset));
    }
    if (threadIdx.x % kWarpSize < kAcross) factors[warp][across + i] = amax;
  }
  __syncthreads();
  const int first_col = static_cast<int>(blockIdx.x) * kSize;
  for (int i = static_cast<int>(threadIdx.x); i < kSize * (kWarps / warps); i += kThreads) {
    const int group = i / kSize, column = i % kSize;
    float amax = 0.0f;
    for (int w = 0; w < warps; ++w) amax = fmaxf(amax, factors[group * warps + w][column]);
    const PieceScale piece = scales_t.scale_of<F8>(amax);
    factors[group * warps][column] = piece.inverse;
    const int64_t group_of_column = int64_t{blockIdx.y} * (kWarps / warps) + group;
    if (first_col + column < out.cols && group_of_column < scales_t.across) {
      scales_t.write(first_col + column, group_of_column, piece.scale);
    }
  }
  __syncthreads();
  load_part(source, out.rows, out.cols, x);
  Codes codes;
#pragma unroll
  for (int k = 0; k < kHeight; ++k) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) x[k][i] = __fmul_rn(x[k][i], factors[warp / warps * warps][across + i]);
    encode<F8>(x[k], 1.0f, codes[k]);
  }
  write_codes(codes, out, shared);
}

template <typename Source, typename Y>
__global__ void __launch_bounds__(kThreads) plain_kernel(const Source source, Y* y_RC, int rows, int cols) {
  float x[kHeight][kWidth];
  load_part(source, rows, cols, x);
  const Place place;
  if (place.col >= cols) return;
#pragma unroll
  for (int k = 0; k < kHeight; ++k) {
    if (place.row + k < rows) store(y_RC + int64_t{place.row + k} * cols + place.col, x[k]);
  }
}

// ---- Any shape, alignment and group size, one element at a time ----

template <typename Source>
__global__ void __launch_bounds__(kThreads)
    amax_elements_kernel(const Source source, int rows, int cols, float* amax) {
  __shared__ float shared[kWarps];
  float largest = 0.0f;
  for (int row = static_cast<int>(blockIdx.x); row < rows; row += static_cast<int>(gridDim.x)) {
    for (int col = static_cast<int>(threadIdx.x); col < cols; col += kThreads) {
      largest = max_magnitude(largest, source.element(row, col));
    }
  }
  largest = block_max<kThreads>(largest, shared);
  if (threadIdx.x == 0) raise_to(amax, largest);
}

// One output, in pieces of which each has one scale; or, where all have the same or none, is one warp wide.
struct PieceOutput {
  void* data;
  DType dtype;
  bool transposed;
  int rows, cols;              // of the source, as the extents of a piece are
  int piece_rows, piece_cols;  // of the source
  int across;                  // pieces side by side
  int64_t pieces;
  bool has_tensor_scale;
  TensorScale tensor_scale;
  Scales scales;  // scale null: not one for each piece
};

template <typename F8>
__device__ inline float piece_inverse(const PieceOutput& out, float amax, int64_t scale_row, int64_t scale_col) {
  if (out.has_tensor_scale) return out.tensor_scale.inverse<F8>();
  if (out.scales.scale == nullptr) return 1.0f;
  const PieceScale piece = out.scales.scale_of<F8>(amax);
  if (threadIdx.x % kWarpSize == 0) out.scales.write(scale_row, scale_col, piece.scale);
  return piece.inverse;
}

__device__ inline void write_element(const PieceOutput& out, int64_t at, float value) {
  switch (out.dtype) {
    case DType::kF32: static_cast<float*>(out.data)[at] = value; return;
    case DType::kBF16: static_cast<BFloat16*>(out.data)[at] = from_float<BFloat16>(value); return;
    case DType::kE4M3: static_cast<Float8E4M3*>(out.data)[at] = encode_e4m3(value); return;
    case DType::kE5M2: static_cast<Float8E5M2*>(out.data)[at] = encode_e5m2(value); return;
    default: return;
  }
}

// A warp has one piece at a time.
template <typename Source>
__global__ void __launch_bounds__(kThreads) pieces_kernel(const Source source, const PieceOutput out) {
  const int64_t stride = int64_t{gridDim.x} * kWarps;
  for (int64_t i = int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarpSize; i < out.pieces; i += stride) {
    const int piece_row = static_cast<int>(i / out.across), piece_col = static_cast<int>(i % out.across);
    const int first_row = piece_row * out.piece_rows, first_col = piece_col * out.piece_cols;
    const int width = min(out.piece_cols, out.cols - first_col);
    const int count = min(out.piece_rows, out.rows - first_row) * width;
    const auto for_each = [&](const auto& f) {
      for (int e = static_cast<int>(threadIdx.x % kWarpSize); e < count; e += kWarpSize) {
        f(first_row + e / width, first_col + e % width);
      }
    };
    float amax = 0.0f;
    if (out.scales.scale != nullptr) {
      for_each([&](int row, int col) { amax = max_magnitude(amax, source.element(row, col)); });
      amax = warp_max(amax);
    }
    const int scale_row = out.transposed ? piece_col : piece_row,
              scale_col = out.transposed ? piece_row : piece_col;
    const float inverse = out.dtype == DType::kE5M2 ? piece_inverse<Float8E5M2>(out, amax, scale_row, scale_col)
                                                    : piece_inverse<Float8E4M3>(out, amax, scale_row, scale_col);
    for_each([&](int row, int col) {
      const int64_t at = out.transposed ? int64_t{col} * out.rows + row : int64_t{row} * out.cols + col;
      write_element(out, at, __fmul_rn(source.element(row, col), inverse));
    });
  }
}

// ---- Launches ----

// Columns with room for a tile more in an int, and tiles one below the other in a grid's y.
inline void check_extents(int64_t rows, int64_t cols) {
  constexpr int64_t kMaxGridY = 65535, kMaxCols = int64_t{1} << 30;
  PARKA_REQUIRE(rows <= kMaxGridY * kSize && cols <= kMaxCols);
}

inline dim3 grid_of(int64_t rows, int64_t cols) {
  return dim3(static_cast<unsigned>(ceil_div(cols, kSize)), static_cast<unsigned>(ceil_div(rows, kSize)));
}

inline uint8_t* codes_of(const ScaledView& t) { return static_cast<uint8_t*>(t.data.data); }

inline CodeOutput code_output(const ScaledView& out, const ScaledView& out_t, int64_t rows, int64_t cols) {
  return {codes_of(out),          codes_of(out_t),        static_cast<int>(rows),
          static_cast<int>(cols), static_cast<int>(cols), rows % 16 == 0 && is_aligned(out_t.data.data, 16)};
}

inline TensorScale tensor_scale(const ScaledView& out, const float* amax) { return {out.scale.as<float>(), amax}; }

inline Scales scales_of(const ScaledView& t) {
  if (t.empty()) return {};
  return {t.scale.data, t.scale.dtype == DType::kBF16, t.scale.dim[1]};
}

inline bool same_format(const ScaledView& a, const ScaledView& b) {
  return a.data.dtype == b.data.dtype && a.scaling == b.scaling && a.group == b.group;
}

// Whether pieces with one scale fit into tiles.
inline bool fits_tiles(const ScaledView& t) {
  if (t.scaling == Scaling::kBlock) return t.group == kSize;
  if (t.scaling == Scaling::kGroup)
    return t.group >= kWidth && t.group <= kSize && std::has_single_bit(uint64_t(t.group));
  return true;
}

template <typename Source>
void write_pieces(CudaDevice& device, const Source& source, int64_t rows, int64_t cols, const ScaledView& out,
                  bool transposed, const float* amax) {
  if (out.empty()) return;
  const bool has_scales = out.scaling == Scaling::kGroup || out.scaling == Scaling::kBlock;
  const int64_t along = has_scales ? out.group : kWarpSize, beside = out.scaling == Scaling::kBlock ? out.group : 1;
  const int64_t piece_rows = std::min(transposed ? along : beside, rows);
  const int64_t piece_cols = std::min(transposed ? beside : along, cols);
  PARKA_REQUIRE(piece_rows * piece_cols <= INT32_MAX - kWarpSize);
  const int64_t across = ceil_div(cols, piece_cols), pieces = ceil_div(rows, piece_rows) * across;
  const bool has_tensor_scale = out.scaling == Scaling::kTensor;
  const PieceOutput output{.data = out.data.data,
                           .dtype = out.data.dtype,
                           .transposed = transposed,
                           .rows = static_cast<int>(rows),
                           .cols = static_cast<int>(cols),
                           .piece_rows = static_cast<int>(piece_rows),
                           .piece_cols = static_cast<int>(piece_cols),
                           .across = static_cast<int>(across),
                           .pieces = pieces,
                           .has_tensor_scale = has_tensor_scale,
                           .tensor_scale = has_tensor_scale ? tensor_scale(out, amax) : TensorScale{},
                           .scales = has_scales ? scales_of(out) : Scales{}};
  const int64_t blocks = std::min<int64_t>(ceil_div(pieces, kWarps), INT32_MAX);
  pieces_kernel<Source><<<static_cast<unsigned>(blocks), kThreads, 0, device.stream()>>>(source, output);
}

// Of a kGroup matrix, in the source's order.
template <typename Source>
void write_groups(CudaDevice& device, const Source& source, const CodeOutput& output, const ScaledView& out) {
  const dim3 grid = grid_of(output.rows, output.cols);
  const int lanes = static_cast<int>(out.group) / kWidth, across = static_cast<int>(out.scale.dim[1]);
  with_float8_type(out.data.dtype, [&](auto f8) {
    with_plain_type(out.scale.dtype, [&](auto s) {
      using S = decltype(s);
      group_kernel<Source, decltype(f8), S>
          <<<grid, kThreads, 0, device.stream()>>>(source, output, out.scale.as<S>(), across, lanes);
    });
  });
}

// For kTensor outputs: `out` is 16-byte aligned, and the source fits_wide().
template <typename Source>
void write_tensor(CudaDevice& device, const Source& source, int64_t rows, int64_t cols, const ScaledView& out,
                  const ScaledView& out_t, const float* amax) {
  const ScaledView& any = out.empty() ? out_t : out;
  with_float8_type(any.data.dtype, [&](auto f8) {
    tensor_kernel<Source, decltype(f8)><<<grid_of(rows, cols), kThreads, 0, device.stream()>>>(
        source, code_output(out, out_t, rows, cols), tensor_scale(any, amax));
  });
}

// `out` and `out_t` have one format, which fits tiles.
template <typename Source>
void write_codes_of(CudaDevice& device, const Source& source, int64_t rows, int64_t cols, const ScaledView& out,
                    const ScaledView& out_t, const float* amax) {
  const ScaledView& any = out.empty() ? out_t : out;
  if (any.scaling == Scaling::kTensor) {
    write_tensor(device, source, rows, cols, out, out_t, amax);
    return;
  }
  const dim3 grid = grid_of(rows, cols);
  const cudaStream_t stream = device.stream();
  const CodeOutput output = code_output(out, out_t, rows, cols);
  if (any.scaling == Scaling::kGroup && !out.empty()) {
    CodeOutput row_output = output;
    row_output.codes_CR = nullptr;
    write_groups(device, source, row_output, out);
  }
  with_float8_type(any.data.dtype, [&](auto f8) {
    using F8 = decltype(f8);
    if (any.scaling == Scaling::kBlock) {
      block_kernel<Source, F8><<<grid, kThreads, 0, stream>>>(source, output, scales_of(out), scales_of(out_t));
    } else if (!out_t.empty()) {
      CodeOutput column_output = output;
      column_output.codes_RC = nullptr;
      group_columns_kernel<Source, F8><<<grid, kThreads, 0, stream>>>(source, column_output, scales_of(out_t),
                                                                      static_cast<int>(out_t.group) / kWarpRows);
    }
  });
}

}  // namespace tiles

// ---- What ops call; they call check_launch afterwards ----

// Raises *amax, fp32 on the GPU, to max |x| over the [rows, cols] numbers of the source; NaN is skipped. The caller
// has made it 0, or the maximum of other numbers.
template <typename Source>
void find_amax(CudaDevice& device, const Source& source, int64_t rows, int64_t cols, float* amax) {
  tiles::check_extents(rows, cols);
  const int r = static_cast<int>(rows), c = static_cast<int>(cols);
  if (source.fits_wide()) {
    tiles::amax_kernel<Source>
        <<<tiles::grid_of(rows, cols), tiles::kThreads, 0, device.stream()>>>(source, r, c, amax);
  } else {
    const int64_t blocks = std::min<int64_t>(rows, int64_t{8} * device.num_multiprocessors());
    tiles::amax_elements_kernel<Source>
        <<<static_cast<unsigned>(blocks), tiles::kThreads, 0, device.stream()>>>(source, r, c, amax);
  }
}

// Writes the [rows, cols] numbers of the source to `out`, and transposed to `out_t` [cols, rows]; either may be
// empty, and each may have any format and scaling, by the rule of ops/quantize.h. kTensor: with `amax`, on the GPU,
// the scale is made from it and written; with null the scale is an input. Both then have the same scale memory. One
// kernel if one output is wanted or both are kTensor (or kBlock) of one dtype, else one for each.
template <typename Source>
void write_tiles(CudaDevice& device, const Source& source, int64_t rows, int64_t cols, const ScaledView& out,
                 const ScaledView& out_t, const float* amax) {
  tiles::check_extents(rows, cols);
  if (!out.empty() && !out_t.empty() && !tiles::same_format(out, out_t)) {
    write_tiles(device, source, rows, cols, out, {}, amax);
    write_tiles(device, source, rows, cols, {}, out_t, amax);
    return;
  }
  const ScaledView& any = out.empty() ? out_t : out;
  if (any.empty()) return;
  const bool plain = any.scaling == Scaling::kNone;
  const bool wide = source.fits_wide() && is_aligned(out.data.data, 16) && tiles::fits_tiles(any);
  if (wide && !plain) {
    tiles::write_codes_of(device, source, rows, cols, out, out_t, amax);
    return;
  }
  if (wide && !out.empty()) {
    with_plain_type(out.data.dtype, [&](auto y) {
      using Y = decltype(y);
      tiles::plain_kernel<Source, Y><<<tiles::grid_of(rows, cols), tiles::kThreads, 0, device.stream()>>>(
          source, out.data.as<Y>(), static_cast<int>(rows), static_cast<int>(cols));
    });
  } else {
    tiles::write_pieces(device, source, rows, cols, out, false, amax);
  }
  tiles::write_pieces(device, source, rows, cols, out_t, true, amax);
}

}  // namespace parka::cuda
