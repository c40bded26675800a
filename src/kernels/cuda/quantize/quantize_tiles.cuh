#pragma once
#include <algorithm>
#include <bit>
#include <concepts>
#include <cstdint>

#include "core/tensor.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/quantize/code_tiles.cuh"
#include "kernels/cuda/quantize/fp8.cuh"
#include "kernels/ops/quantize/quantize.h"

// Writes a matrix in any format, row-major and transposed, from any Source of numbers: find_amax and write_tiles,
// at the end of this file. matrix_source.cuh has sources of numbers in memory.
//
//   R, C        rows and columns of the source
//   tile        128 x 128 of them, a block's (code_tiles.cuh): whatever a scale belongs to, a group of a row or a
//               column or a block, lies within one tile
//   x[k][i]     a thread's numbers: kHeight rows of kWidth = 16 columns, which it reads a quarter at a time
namespace parka::cuda {

// What numbers are made of. It is copied to the GPU as it is: pointers and numbers. What it reads is not written
// while a kernel of this file runs.
template <typename S>
concept Source = requires(const S& s, const typename S::Fetched& fetched, float (&x)[4]) {
  // Loads what the 16 numbers from (row, col) on are made of, and leaves the rest to decode(), so that many loads
  // are under way at once. col is a multiple of 16, and all 16 columns exist.
  { s.fetch(/*row=*/0, /*col=*/0) } -> std::same_as<typename S::Fetched>;
  s.decode(fetched, /*quarter=*/0, x);  // 4 of the 16, in fp32; of one place always the same bits
};

// For shapes that fetch() does not fit: the number at (row, col), with the same bits.
template <typename S>
concept ElementSource = requires(const S& s) {
  { s.element(/*row=*/0, /*col=*/0) } -> std::same_as<float>;
};

// fits_wide(): whether fetch() can be called: columns come in 16s, and what it reads in 16 bytes is aligned.
template <typename S>
concept AnyShapeSource = Source<S> && ElementSource<S> && requires(const S& s) {
  { s.fits_wide() } -> std::same_as<bool>;
};

namespace tiles {

// Fetches of so few bytes a thread has under way for all of its rows at once: codes with their scale.
constexpr size_t kSmallFetch = 40;
// Blocks that should fit on a multiprocessor. With load_part() all numbers of a thread are in registers together.
constexpr int kLoadingBlocks = 3, kFetchingBlocks = 4;

// All numbers of a thread. A thread without a row or a column repeats the last ones, which changes no maximum of
// numbers, but makes groups of its own.
template <Source From>
__device__ inline void load_part(const From& source, int rows, int cols, float (&x)[kHeight][kWidth]) {
  const Place place;
  const int col = min(place.col, cols - kWidth);
#pragma unroll
  for (int k = 0; k < kHeight; ++k) {
    const auto fetched = source.fetch(min(place.row + k, rows - 1), col);
#pragma unroll
    for (int quarter = 0; quarter < kWords; ++quarter) {
      float numbers[4];
      source.decode(fetched, quarter, numbers);
#pragma unroll
      for (int i = 0; i < 4; ++i) x[k][4 * quarter + i] = numbers[i];
    }
  }
}

// Calls f(k, fetched) for each row k of a thread, with what was fetched of it: the loads of the next row are under
// way by then. A thread without a row or a column gets the last ones, as above.
template <typename From, typename F>
__device__ inline void for_each_row(const From& source, int rows, int cols, const F& f) {
  const Place place;
  const int col = min(place.col, cols - kWidth);
  const auto fetch = [&](int k) { return source.fetch(min(place.row + k, rows - 1), col); };
  using Fetched = decltype(fetch(0));
  constexpr int kAhead = sizeof(Fetched) <= kSmallFetch ? kHeight - 1 : 1;
  Fetched next[kHeight];
#pragma unroll
  for (int k = 0; k < kAhead; ++k) next[k] = fetch(k);
#pragma unroll
  for (int k = 0; k < kHeight; ++k) {
    if (k + kAhead < kHeight) next[k + kAhead] = fetch(k + kAhead);
    f(k, next[k]);
  }
}

// ---- Where scales come from and go to ----

__device__ inline bool is_first_thread() { return threadIdx.x == 0 && blockIdx.x == 0 && blockIdx.y == 0; }

// One scale for a whole matrix.
struct TensorScale {
  float* scale;       // written if `amax` is given, else read
  const float* amax;  // may be null

  __device__ void go_to_matrix(int number) {
    scale += number;
    if (amax != nullptr) amax += number;
  }

  // The factor before encoding. Without branches: it should not keep loads from being under way.
  template <typename F8>
  __device__ float inverse() const {
    const float value = __ldg(amax == nullptr ? scale : amax);
    const float of_scale = inverse_of_scale(value), of_amax = scale_for<F8, float>(value).inverse;
    return amax == nullptr ? of_scale : of_amax;
  }
  // To be called by all threads.
  template <typename F8>
  __device__ void write() const {
    if (amax != nullptr && is_first_thread()) *scale = scale_for<F8, float>(*amax).scale;
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

template <Source From>
__global__ void __launch_bounds__(kThreads, kFetchingBlocks)
    amax_kernel(const From source, int rows, int cols, float* amax) {
  __shared__ uint32_t shared[kWarps];
  float largest = 0.0f;
  for_each_row(source, rows, cols, [&](int, const auto& fetched) {
#pragma unroll
    for (int quarter = 0; quarter < kWords; ++quarter) {
      float x[4];
      source.decode(fetched, quarter, x);
      largest = max_magnitude_of(largest, x);
    }
  });
  raise_to_block_max<kThreads>(amax, largest, shared);
}

template <Source From, typename F8>
__global__ void __launch_bounds__(kThreads, kFetchingBlocks)
    tensor_kernel(From source, const CodeOutput all, TensorScale scale) {
  alignas(kTileAlignment) __shared__ uint32_t shared[kSharedWords];
  wait_for_kernel_before();
  const CodeOutput out = all.of_matrix(blockIdx.z);
  if constexpr (requires { source.go_to_matrix(0, 0); })
    source.go_to_matrix(static_cast<int>(blockIdx.z), out.rows);
  scale.go_to_matrix(static_cast<int>(blockIdx.z));
  const float inverse = scale.inverse<F8>();
  const uint32_t part = part_address(shared);
  for_each_row(source, out.rows, out.cols, [&](int k, const auto& fetched) {
    uint32_t codes[kWords];
#pragma unroll
    for (int quarter = 0; quarter < kWords; ++quarter) {
      float x[4];
      source.decode(fetched, quarter, x);
      codes[quarter] = encode<F8>(x, inverse);
    }
    put_codes(codes, k, out, part);
  });
  if (out.codes_CR != nullptr) __syncthreads();
  finish_codes(out, shared);
  scale.write<F8>();
}

// A scale per tile, the same for both orders.
template <Source From, typename F8>
__global__ void __launch_bounds__(kThreads)
    block_kernel(const From source, const CodeOutput out, const Scales scales, const Scales scales_t) {
  alignas(kTileAlignment) __shared__ uint32_t shared[kSharedWords];
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
template <Source From, typename F8, typename S>
__global__ void __launch_bounds__(kThreads, kLoadingBlocks)
    group_kernel(const From source, const CodeOutput out, S* scales, int scales_across, int lanes) {
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
template <Source From, typename F8>
__global__ void __launch_bounds__(kThreads)
    group_columns_kernel(const From source, const CodeOutput out, const Scales scales_t, int warps) {
  alignas(kTileAlignment) __shared__ uint32_t shared[kSharedWords];
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

template <Source From, typename Y>
__global__ void __launch_bounds__(kThreads) plain_kernel(const From source, Y* y_RC, int rows, int cols) {
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

template <ElementSource From>
__global__ void __launch_bounds__(kThreads)
    amax_elements_kernel(const From source, int rows, int cols, float* amax) {
  __shared__ uint32_t shared[kWarps];
  float largest = 0.0f;
  for (int row = static_cast<int>(blockIdx.x); row < rows; row += static_cast<int>(gridDim.x)) {
    for (int col = static_cast<int>(threadIdx.x); col < cols; col += kThreads) {
      largest = max_magnitude(largest, source.element(row, col));
    }
  }
  raise_to_block_max<kThreads>(amax, largest, shared);
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
template <ElementSource From>
__global__ void __launch_bounds__(kThreads) pieces_kernel(const From source, const PieceOutput out) {
  const int64_t stride = int64_t{gridDim.x} * kWarps;
  const bool is_scaled = out.has_tensor_scale || out.scales.scale != nullptr;
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
      const float x = source.element(row, col);
      write_element(out, at, is_scaled ? __fmul_rn(x, inverse) : x);  // a product changes the bits of a NaN
    });
  }
  if (!out.has_tensor_scale) return;
  out.dtype == DType::kE5M2 ? out.tensor_scale.write<Float8E5M2>() : out.tensor_scale.write<Float8E4M3>();
}

// ---- Launches ----

constexpr const char* kOp = "quantizing";  // for what a launch throws

// Checks the limits: columns plus a tile must fit in an int, and the tiles of a column in a grid's y.
inline void check_extents(int64_t rows, int64_t cols) {
  constexpr int64_t kMaxGridY = 65535, kMaxCols = int64_t{1} << 30;
  static_assert(kMaxFloat8Rows == kMaxGridY * kSize);  // what a config may ask for
  PARKA_REQUIRE(rows <= kMaxFloat8Rows && cols <= kMaxCols);
}

inline dim3 grid_of(int64_t rows, int64_t cols, int64_t matrices = 1) {
  return dim3(static_cast<unsigned>(ceil_div(cols, kSize)), static_cast<unsigned>(ceil_div(rows, kSize)),
              static_cast<unsigned>(matrices));
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

// True if pieces with one scale fit into tiles.
inline bool fits_tiles(const ScaledView& t) {
  if (t.scaling == Scaling::kBlock) return t.group == kSize;
  if (t.scaling == Scaling::kGroup)
    return t.group >= kWidth && t.group <= kSize && std::has_single_bit(uint64_t(t.group));
  return true;
}

template <ElementSource From>
void write_pieces(CudaDevice& device, const From& source, int64_t rows, int64_t cols, const ScaledView& out,
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
  launch(device, kOp, pieces_kernel<From>, {blocks, kThreads}, source, output);
}

// Writes a kGroup matrix with scales in the format S, in the source's order.
template <typename S, Source From>
void write_groups_scaled_by(CudaDevice& device, const From& source, const CodeOutput& output,
                            const ScaledView& out) {
  const int lanes = static_cast<int>(out.group) / kWidth, across = static_cast<int>(out.scale.dim[1]);
  with_float8_type(out.data.dtype, [&](auto f8) {
    launch(device, kOp, group_kernel<From, decltype(f8), S>, {grid_of(output.rows, output.cols), kThreads}, source,
           output, out.scale.as<S>(), across, lanes);
  });
}

template <Source From>
void write_groups(CudaDevice& device, const From& source, const CodeOutput& output, const ScaledView& out) {
  with_plain_type(out.scale.dtype,
                  [&](auto s) { write_groups_scaled_by<decltype(s)>(device, source, output, out); });
}

// Writes a kGroup matrix, transposed.
template <Source From>
void write_group_columns(CudaDevice& device, const From& source, CodeOutput output, const ScaledView& out_t) {
  output.codes_RC = nullptr;
  with_float8_type(out_t.data.dtype, [&](auto f8) {
    launch(device, kOp, group_columns_kernel<From, decltype(f8)>, {grid_of(output.rows, output.cols), kThreads},
           source, output, scales_of(out_t), static_cast<int>(out_t.group) / kWarpRows);
  });
}

// For kTensor outputs: `out` is 16-byte aligned, and the source fits_wide(). Of `matrices` of that shape below each
// other each has its scale.
template <Source From>
void write_tensor(CudaDevice& device, const From& source, int64_t rows, int64_t cols, const ScaledView& out,
                  const ScaledView& out_t, const float* amax, int64_t matrices = 1) {
  const ScaledView& any = out.empty() ? out_t : out;
  with_float8_type(any.data.dtype, [&](auto f8) {
    launch_early(device, kOp, tensor_kernel<From, decltype(f8)>, {grid_of(rows, cols, matrices), kThreads}, source,
                 code_output(out, out_t, rows, cols), tensor_scale(any, amax));
  });
}

// `out` and `out_t` have one format, which fits tiles.
template <Source From>
void write_codes_of(CudaDevice& device, const From& source, int64_t rows, int64_t cols, const ScaledView& out,
                    const ScaledView& out_t, const float* amax) {
  const ScaledView& any = out.empty() ? out_t : out;
  if (any.scaling == Scaling::kTensor) {
    write_tensor(device, source, rows, cols, out, out_t, amax);
    return;
  }
  const CodeOutput output = code_output(out, out_t, rows, cols);
  if (any.scaling == Scaling::kGroup) {
    if (!out.empty()) write_groups(device, source, code_output(out, {}, rows, cols), out);
    if (!out_t.empty()) write_group_columns(device, source, output, out_t);
    return;
  }
  with_float8_type(any.data.dtype, [&](auto f8) {
    launch(device, kOp, block_kernel<From, decltype(f8)>, {grid_of(rows, cols), kThreads}, source, output,
           scales_of(out), scales_of(out_t));
  });
}

// `y` is 16-byte aligned.
template <Source From>
void write_plain(CudaDevice& device, const From& source, int64_t rows, int64_t cols, const TensorView& y) {
  with_plain_type(y.dtype, [&](auto type) {
    using Y = decltype(type);
    launch(device, kOp, plain_kernel<From, Y>, {grid_of(rows, cols), kThreads}, source, y.as<Y>(),
           static_cast<int>(rows), static_cast<int>(cols));
  });
}

template <Source From>
void find_amax(CudaDevice& device, const From& source, int64_t rows, int64_t cols, float* amax) {
  launch(device, kOp, amax_kernel<From>, {grid_of(rows, cols), kThreads}, source, static_cast<int>(rows),
         static_cast<int>(cols), amax);
}

}  // namespace tiles

// ---- What ops call ----

// find_amax() by single elements: one kernel, which takes any shape.
template <ElementSource From>
void find_amax_of_elements(CudaDevice& device, const From& source, int64_t rows, int64_t cols, float* amax) {
  tiles::check_extents(rows, cols);
  const int64_t blocks = std::min<int64_t>(rows, int64_t{8} * device.num_multiprocessors());
  launch(device, tiles::kOp, tiles::amax_elements_kernel<From>, {blocks, tiles::kThreads}, source,
         static_cast<int>(rows), static_cast<int>(cols), amax);
}

// Raises *amax, fp32 on the GPU, to max |x| over the [rows, cols] numbers of the source; NaN is skipped. The caller
// has made it 0, or the maximum of other numbers.
template <AnyShapeSource From>
void find_amax(CudaDevice& device, const From& source, int64_t rows, int64_t cols, float* amax) {
  tiles::check_extents(rows, cols);
  if (source.fits_wide()) {
    tiles::find_amax(device, source, rows, cols, amax);
  } else {
    find_amax_of_elements(device, source, rows, cols, amax);
  }
}

// write_tiles() for sources of rare formats, which are not worth its many kernels: plain numbers and groups with
// fp32 scales, which GEMMs read, are written in tiles, and all else by single elements.
template <AnyShapeSource From>
void write_rare(CudaDevice& device, const From& source, int64_t rows, int64_t cols, const ScaledView& out,
                const ScaledView& out_t, const float* amax) {
  tiles::check_extents(rows, cols);
  const auto fits = [&](const ScaledView& t) {
    return source.fits_wide() && t.scaling == Scaling::kGroup && t.scale.dtype == DType::kF32 &&
           tiles::fits_tiles(t);
  };
  if (!out.empty() && out.scaling == Scaling::kNone && source.fits_wide() && is_aligned(out.data.data, 16)) {
    tiles::write_plain(device, source, rows, cols, out.data);
  } else if (fits(out) && is_aligned(out.data.data, 16)) {
    tiles::write_groups_scaled_by<float>(device, source, tiles::code_output(out, {}, rows, cols), out);
  } else {
    tiles::write_pieces(device, source, rows, cols, out, false, amax);
  }
  if (fits(out_t)) {
    tiles::write_group_columns(device, source, tiles::code_output({}, out_t, rows, cols), out_t);
  } else {
    tiles::write_pieces(device, source, rows, cols, out_t, true, amax);
  }
}

// Writes the [rows, cols] numbers of the source to `out`, and transposed to `out_t` [cols, rows]; either may be
// empty, and each may have any format and scaling, by the rule of ops/quantize/quantize.h. kTensor: with `amax`, on
// the GPU, the scale is made from it and written; with null the scale is an input. Both then have the same scale
// memory. One kernel if one output is wanted or both are kTensor (or kBlock) of one dtype, else one for each.
template <AnyShapeSource From>
void write_tiles(CudaDevice& device, const From& source, int64_t rows, int64_t cols, const ScaledView& out,
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
    tiles::write_plain(device, source, rows, cols, out.data);
  } else {
    tiles::write_pieces(device, source, rows, cols, out, false, amax);
  }
  tiles::write_pieces(device, source, rows, cols, out_t, true, amax);
}

}  // namespace parka::cuda
