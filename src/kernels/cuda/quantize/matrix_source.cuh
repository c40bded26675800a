#pragma once
#include <algorithm>
#include <bit>
#include <cstdint>

#include "core/tensor.h"
#include "kernels/cuda/quantize/fp8.cuh"

// Sources (see quantize_tiles.cuh) of matrices in memory.
namespace parka::cuda {

constexpr int kSourceWidth = 16;  // adjacent columns that fetch() loads

// row * cols + col, of numbers that are not negative: one instruction, where signs would take several.
__device__ inline int64_t offset_of(int row, int cols, int col) {
  return static_cast<int64_t>(uint64_t{static_cast<unsigned>(row)} * static_cast<unsigned>(cols) +
                              static_cast<unsigned>(col));
}

// The N elements at p, which is aligned to 16 bytes. Nothing may write them while the kernel runs: their load can
// then be under way while other things are stored.
template <int N, typename T>
__device__ inline Stored<T, N> load_constant(const T* p) {
  static_assert(N * sizeof(T) % sizeof(uint4) == 0);
  Stored<T, N> x;
#pragma unroll
  for (int i = 0; i < Stored<T, N>::kWords / 4; ++i) {
    const uint4 words = __ldg(reinterpret_cast<const uint4*>(p) + i);
    x.word[4 * i] = words.x;
    x.word[4 * i + 1] = words.y;
    x.word[4 * i + 2] = words.z;
    x.word[4 * i + 3] = words.w;
  }
  return x;
}

// fp32 or bf16.
template <typename X>
struct PlainSource {
  const X* x_RC;
  int cols;

  using Fetched = Stored<X, kSourceWidth>;

  explicit PlainSource(const ScaledView& x) : x_RC(x.data.as<X>()), cols(static_cast<int>(x.num_cols())) {}

  bool fits_wide() const { return cols % kSourceWidth == 0 && is_aligned(x_RC, 16); }
  __device__ void go_to_matrix(int number, int rows) { x_RC += number * int64_t{rows} * cols; }
  __device__ Fetched fetch(int row, int col) const {
    return load_constant<kSourceWidth>(x_RC + offset_of(row, cols, col));
  }
  static __device__ void decode(const Fetched& stored, int quarter, float (&x)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = stored[4 * quarter + i];
  }
  __device__ float element(int row, int col) const { return to_float(x_RC[int64_t{row} * cols + col]); }
};

// The scales of codes, of any scaling but kNone (for which it is not to be used).
struct PieceScales {
  static constexpr bool kExactProducts = false;
  const uint16_t* halves;
  int size_shift;       // log2 of the halves of a scale: 2 of fp32, 1 of bf16
  uint32_t lower_mask;  // 0 if a scale has no lower half
  int across;           // scales in a row
  int piece_rows, piece_cols;
  int row_shift, col_shift;  // log2 of them, if fits_wide()

  explicit PieceScales(const ScaledView& x)
      : halves(static_cast<const uint16_t*>(x.scale.data)),
        size_shift(x.scale.dtype == DType::kBF16 ? 0 : 1),
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
  // A scale as it lies in memory. In two halves, so that both formats are read without a branch, which would keep
  // loads from being under way together. bf16 is the upper half of fp32, and memory has the lower one first.
  struct Fetched {
    uint16_t lower, upper;
  };
  __device__ Fetched fetch(int piece_row, int piece_col) const {
    const uint16_t* const first = halves + (offset_of(piece_row, across, piece_col) << size_shift);
    return {__ldg(first), __ldg(first + size_shift)};
  }
  __device__ float decode(const Fetched& stored) const {
    return __uint_as_float(uint32_t{stored.upper} << 16 | (stored.lower & lower_mask));
  }
  // The number of the element at (row, col); the first two forms only if fits_wide().
  __device__ Fetched fetch_wide(int row, int col) const { return fetch(row >> row_shift, col >> col_shift); }
  __device__ float wide_at(int row, int col) const { return decode(fetch_wide(row, col)); }
  __device__ float at(int row, int col) const { return decode(fetch(row / piece_rows, col / piece_cols)); }
};

// x = 4 codes with their scale.
template <typename F8>
__device__ inline void decode_4(uint32_t codes, float scale, float (&x)[4]) {
  decode_float8x4<F8>(codes, x);
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = __fmul_rn(x[i], scale);
}

// x = 16 codes with their scale.
template <typename F8>
__device__ inline void decode_16(const uint32_t (&codes)[4], float scale, float (&x)[16]) {
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    float numbers[4];
    decode_4<F8>(codes[w], scale, numbers);
#pragma unroll
    for (int i = 0; i < 4; ++i) x[4 * w + i] = numbers[i];
  }
}

template <typename F8>
__device__ inline float decode_1(uint8_t code, float scale) {
  float numbers[4];
  decode_float8x4<F8>(code, numbers);
  return __fmul_rn(numbers[0], scale);
}

// The scales of kGroup in bf16, of groups that are a power of two, in fewer instructions than PieceScales.
struct BFloat16GroupScales {
  static constexpr bool kExactProducts = true;  // 8 bits of a scale times at most 4 of a code fit in fp32
  const BFloat16* scale;
  int across;     // scales in a row
  int group;      // columns of one
  int col_shift;  // log2 of them

  explicit BFloat16GroupScales(const ScaledView& x)
      : scale(x.scale.as<BFloat16>()),
        across(static_cast<int>(x.scale.dim[1])),
        group(static_cast<int>(x.group)),
        col_shift(std::countr_zero(static_cast<unsigned>(group))) {}

  static bool fits(const ScaledView& x) { return x.scaling == Scaling::kGroup && x.scale.dtype == DType::kBF16; }
  bool fits_wide() const { return group >= kSourceWidth && std::has_single_bit(static_cast<unsigned>(group)); }
  using Fetched = uint16_t;
  __device__ Fetched fetch_wide(int row, int col) const {
    return __ldg(reinterpret_cast<const uint16_t*>(scale) + offset_of(row, across, col >> col_shift));
  }
  __device__ float decode(Fetched stored) const { return __uint_as_float(uint32_t{stored} << 16); }
  __device__ float at(int row, int col) const { return to_float(scale[int64_t{row} * across + col / group]); }
};

// FP8 with any scaling, decoded; or only with that of the scales.
template <typename F8, typename Scales = PieceScales>
struct CodedSource {
  const uint8_t* codes_RC;
  int cols;
  Scales scales;

  struct Fetched {
    Stored<uint8_t, kSourceWidth> codes;
    typename Scales::Fetched scale;
  };

  explicit CodedSource(const ScaledView& x)
      : codes_RC(reinterpret_cast<const uint8_t*>(x.data.as<F8>())),
        cols(static_cast<int>(x.num_cols())),
        scales(x) {}

  bool fits_wide() const { return cols % kSourceWidth == 0 && is_aligned(codes_RC, 16) && scales.fits_wide(); }
  __device__ Fetched fetch(int row, int col) const {
    return {load_constant<kSourceWidth>(codes_RC + offset_of(row, cols, col)), scales.fetch_wide(row, col)};
  }
  __device__ void decode(const Fetched& stored, int quarter, float (&x)[4]) const {
    decode_4<F8>(stored.codes.word[quarter], scales.decode(stored.scale), x);
  }
  // The same less a number, by one instruction for both operations: the bits of two, the first of which is exact.
  __device__ void decode_less(const Fetched& stored, int quarter, float less,
                              float (&x)[4]) const requires Scales::kExactProducts {
    const float scale = scales.decode(stored.scale);
    decode_float8x4<F8>(stored.codes.word[quarter], x);
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = __fmaf_rn(x[i], scale, -less);
  }
  __device__ float element(int row, int col) const {
    return decode_1<F8>(codes_RC[int64_t{row} * cols + col], scales.at(row, col));
  }
};

template <typename F8>
using GroupedSource = CodedSource<F8, BFloat16GroupScales>;

// Any of the above, chosen as it is read: slower, for formats that are not worth a kernel of their own.
struct AnySource {
  const void* data;  // null: there is no matrix
  DType dtype;
  int cols;
  PieceScales scales;

  struct Fetched {  // only where they are: nothing is loaded early
    int row, col;
  };

  explicit AnySource(const ScaledView& x)
      : data(x.data.data), dtype(x.data.dtype), cols(static_cast<int>(x.num_cols())), scales(x) {}

  bool fits_wide() const { return cols % kSourceWidth == 0 && is_aligned(data, 16) && scales.fits_wide(); }
  __device__ Fetched fetch(int row, int col) const { return {row, col}; }
  __device__ void decode(const Fetched& place, int quarter, float (&x)[4]) const {
    const int col = place.col + 4 * quarter;
    const int64_t at = int64_t{place.row} * cols + col;
    if (dtype == DType::kF32) {
      load(static_cast<const float*>(data) + at, x);
    } else if (dtype == DType::kBF16) {
      load(static_cast<const BFloat16*>(data) + at, x);
    } else {
      const uint32_t codes = load_stored<4>(static_cast<const uint8_t*>(data) + at).word[0];
      const float scale = scales.wide_at(place.row, col);
      dtype == DType::kE4M3 ? decode_4<Float8E4M3>(codes, scale, x) : decode_4<Float8E5M2>(codes, scale, x);
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
