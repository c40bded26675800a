#pragma once
#include <bit>
#include <cstdint>

#include "core/tensor.h"
#include "kernels/cuda/quantize/matrix_source.cuh"

// The input of the norm of queries and keys: [T, N] in one of the formats that kernels are made for. fetch() gives
// kWidth adjacent columns of a row as they are stored, or zeros, and no access, unless `wanted`; nothing waits for
// them until they are decoded. load() does both.
namespace parka::cuda {

template <typename T>
struct PlainInput {
  const T* x_TN;

  explicit PlainInput(const ScaledView& x) : x_TN(x.data.as<T>()) {}

  static bool fits(const ScaledView& x) { return x.scaling == Scaling::kNone && is_aligned(x.data.data, 16); }

  template <int kWidth>
  using Piece = Stored<T, kWidth>;

  template <int kWidth>
  __device__ Piece<kWidth> fetch(int64_t row, int row_width, int col, bool wanted) const {
    return load_stored<kWidth>(x_TN + row * row_width + col, wanted);
  }
  template <int kWidth>
  static __device__ void decode(const Piece<kWidth>& piece, float (&x)[kWidth]) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) x[i] = piece[i];
  }
  template <int kWidth>
  __device__ void load(int64_t row, int row_width, int col, bool wanted, float (&x)[kWidth]) const {
    decode<kWidth>(fetch<kWidth>(row, row_width, col, wanted), x);
  }
};

// FP8 with a bf16 scale per group, as q, k and v are saved. Columns that are loaded together have one scale.
template <typename F8>
struct CodesInput {
  const uint8_t* codes_TN;
  const BFloat16* scales;
  int across;       // scales in a row
  int group_shift;  // log2 of the columns of a group

  explicit CodesInput(const ScaledView& x)
      : codes_TN(reinterpret_cast<const uint8_t*>(x.data.as<F8>())),
        scales(x.scale.as<BFloat16>()),
        across(static_cast<int>(x.scale.dim[1])),
        group_shift(std::countr_zero(static_cast<uint64_t>(x.group))) {}

  // True if `width` columns lie in one group, if they begin at a multiple of it.
  static bool fits(const ScaledView& x, int width) {
    return x.scaling == Scaling::kGroup && x.scale.dtype == DType::kBF16 &&
           std::has_single_bit(static_cast<uint64_t>(x.group)) && x.group >= width && is_aligned(x.data.data, 16);
  }

  template <int kWidth>
  struct Piece {
    Stored<uint8_t, kWidth> codes;
    BFloat16 scale;
  };

  template <int kWidth>
  __device__ Piece<kWidth> fetch(int64_t row, int row_width, int col, bool wanted) const {
    return {load_stored<kWidth>(codes_TN + row * row_width + col, wanted),
            wanted ? scales[row * across + (col >> group_shift)] : BFloat16{}};
  }
  template <int kWidth>
  static __device__ void decode(const Piece<kWidth>& piece, float (&x)[kWidth]) {
    const float scale = to_float(piece.scale);
#pragma unroll
    for (int w = 0; w < kWidth / 4; ++w) {
      float numbers[4];
      decode_4<F8>(piece.codes.word[w], scale, numbers);
#pragma unroll
      for (int i = 0; i < 4; ++i) x[4 * w + i] = numbers[i];
    }
  }
  template <int kWidth>
  __device__ void load(int64_t row, int row_width, int col, bool wanted, float (&x)[kWidth]) const {
    decode<kWidth>(fetch<kWidth>(row, row_width, col, wanted), x);
  }
};

}  // namespace parka::cuda
