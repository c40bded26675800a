#pragma once
#include <algorithm>
#include <bit>
#include <cstdint>

#include "core/tensor.h"
#include "kernels/cuda/fp8.cuh"

// Sources (quantize_tiles.cuh says what they are) of matrices in memory.
namespace parka::cuda {

constexpr int kSourceWidth = 16;  // adjacent columns that load() gives

// fp32 or bf16.
template <typename X>
struct PlainSource {
  const X* x_RC;
  int cols;

  explicit PlainSource(const ScaledView& x) : x_RC(x.data.as<X>()), cols(static_cast<int>(x.num_cols())) {}

  bool fits_wide() const { return cols % kSourceWidth == 0 && is_aligned(x_RC, 16); }
  __device__ void load(int row, int col, float (&x)[16]) const {
    const auto stored = load_stored<16>(x_RC + int64_t{row} * cols + col);
#pragma unroll
    for (int i = 0; i < 16; ++i) x[i] = stored[i];
  }
  __device__ float element(int row, int col) const { return to_float(x_RC[int64_t{row} * cols + col]); }
};

// The scales of codes, of any scaling but kNone (for which it is not to be used).
struct PieceScales {
  const uint16_t* halves;
  int size;             // halves of a scale: 2 of fp32, 1 of bf16
  uint32_t lower_mask;  // 0 if a scale has no lower half
  int across;           // scales in a row
  int piece_rows, piece_cols;
  int row_shift, col_shift;  // log2 of them, if fits_wide()

  explicit PieceScales(const ScaledView& x)
      : halves(static_cast<const uint16_t*>(x.scale.data)),
        size(x.scale.dtype == DType::kBF16 ? 1 : 2),
        lower_mask(x.scale.dtype == DType::kBF16 ? 0 : 0xffff) {
    constexpr int64_t kAll = int64_t{1} << 30;  // as many columns as there may be; more rows than that
    const bool is_whole = x.scaling == Scaling::kNone || x.scaling == Scaling::kTensor;
    across = is_whole ? 1 : static_cast<int>(x.scale.dim[1]);
    piece_cols = static_cast<int>(is_whole ? kAll : std::min(x.group, kAll));
    piece_rows = x.scaling == Scaling::kGroup ? 1 : piece_cols;
    row_shift = std::countr_zero(static_cast<unsigned>(piece_rows));
    col_shift = std::countr_zero(static_cast<unsigned>(piece_cols));
  }

  bool fits_wide() const {
    return piece_cols >= kSourceWidth && std::has_single_bit(static_cast<unsigned>(piece_cols));
  }
  // In two halves, so that both formats are read without a branch, which would keep loads from being under way
  // together. bf16 is the upper half of fp32, and memory has the lower one first.
  __device__ float scale(int piece_row, int piece_col) const {
    const uint16_t* const first = halves + (int64_t{piece_row} * across + piece_col) * size;
    const uint32_t lower = first[0], upper = first[size - 1];
    return __uint_as_float(upper << 16 | (lower & lower_mask));
  }
  // That of the element at (row, col); the first form only if fits_wide().
  __device__ float wide_at(int row, int col) const { return scale(row >> row_shift, col >> col_shift); }
  __device__ float at(int row, int col) const { return scale(row / piece_rows, col / piece_cols); }
};

// x = 16 codes with their scale.
template <typename F8>
__device__ inline void decode_16(const uint32_t (&codes)[4], float scale, float (&x)[16]) {
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    float numbers[4];
    decode_float8x4<F8>(codes[w], numbers);
#pragma unroll
    for (int i = 0; i < 4; ++i) x[4 * w + i] = __fmul_rn(numbers[i], scale);
  }
}

template <typename F8>
__device__ inline float decode_1(uint8_t code, float scale) {
  float numbers[4];
  decode_float8x4<F8>(code, numbers);
  return __fmul_rn(numbers[0], scale);
}

// FP8 with any scaling, decoded.
template <typename F8>
struct CodedSource {
  const uint8_t* codes_RC;
  int cols;
  PieceScales scales;

  explicit CodedSource(const ScaledView& x)
      : codes_RC(reinterpret_cast<const uint8_t*>(x.data.as<F8>())),
        cols(static_cast<int>(x.num_cols())),
        scales(x) {}

  bool fits_wide() const { return cols % kSourceWidth == 0 && is_aligned(codes_RC, 16) && scales.fits_wide(); }
  __device__ void load(int row, int col, float (&x)[16]) const {
    const auto codes = load_stored<16>(codes_RC + int64_t{row} * cols + col);
    decode_16<F8>(codes.word, scales.wide_at(row, col), x);
  }
  __device__ float element(int row, int col) const {
    return decode_1<F8>(codes_RC[int64_t{row} * cols + col], scales.at(row, col));
  }
};

// Any of the above, chosen as it is read: slower, for formats that are not worth a kernel of their own.
struct AnySource {
  const void* data;  // null: there is no matrix
  DType dtype;
  int cols;
  PieceScales scales;

  explicit AnySource(const ScaledView& x)
      : data(x.data.data), dtype(x.data.dtype), cols(static_cast<int>(x.num_cols())), scales(x) {}

  bool fits_wide() const { return cols % kSourceWidth == 0 && is_aligned(data, 16) && scales.fits_wide(); }
  __device__ void load(int row, int col, float (&x)[16]) const {
    const int64_t at = int64_t{row} * cols + col;
    if (dtype == DType::kF32) {
      cuda::load(static_cast<const float*>(data) + at, x);
    } else if (dtype == DType::kBF16) {
      cuda::load(static_cast<const BFloat16*>(data) + at, x);
    } else {
      const auto codes = load_stored<16>(static_cast<const uint8_t*>(data) + at);
      const float scale = scales.wide_at(row, col);
      if (dtype == DType::kE4M3) {
        decode_16<Float8E4M3>(codes.word, scale, x);
      } else {
        decode_16<Float8E5M2>(codes.word, scale, x);
      }
    }
  }
  __device__ float element(int row, int col) const {
    const int64_t at = int64_t{row} * cols + col;
    if (dtype == DType::kF32) return static_cast<const float*>(data)[at];
    if (dtype == DType::kBF16) return to_float(static_cast<const BFloat16*>(data)[at]);
    const uint8_t code = static_cast<const uint8_t*>(data)[at];
    const float scale = scales.at(row, col);
    return dtype == DType::kE4M3 ? decode_1<Float8E4M3>(code, scale) : decode_1<Float8E5M2>(code, scale);
  }
};

// Calls f with the source of a matrix in memory, of any format.
template <typename F>
void with_source(const ScaledView& x, const F& f) {
  if (x.scaling == Scaling::kNone) {
    with_plain_type(x.data.dtype, [&](auto type) { f(PlainSource<decltype(type)>(x)); });
  } else {
    with_float8_type(x.data.dtype, [&](auto type) { f(CodedSource<decltype(type)>(x)); });
  }
}

}  // namespace parka::cuda
