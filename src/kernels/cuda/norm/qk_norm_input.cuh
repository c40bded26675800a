#pragma once
#include <bit>
#include <cstdint>

#include "core/tensor.h"
#include "kernels/cuda/quantize/matrix_source.cuh"

// What the norm of queries and keys reads: [T, N] in one of the formats that kernels are made for. load() gives
// kWidth adjacent columns of a row, or zeros, and no access, unless `wanted`.
namespace parka::cuda {

template <typename T>
struct PlainInput {
  const T* x_TN;

  explicit PlainInput(const ScaledView& x) : x_TN(x.data.as<T>()) {}

  static bool fits(const ScaledView& x) { return x.scaling == Scaling::kNone && is_aligned(x.data.data, 16); }

  template <int kWidth>
  __device__ void load(int64_t row, int row_width, int col, bool wanted, float (&x)[kWidth]) const {
    const auto stored = load_stored<kWidth>(x_TN + row * row_width + col, wanted);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) x[i] = stored[i];
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

  // Whether `width` columns lie in one group, if they begin at a multiple of it.
  static bool fits(const ScaledView& x, int width) {
    return x.scaling == Scaling::kGroup && x.scale.dtype == DType::kBF16 &&
           std::has_single_bit(static_cast<uint64_t>(x.group)) && x.group >= width && is_aligned(x.data.data, 16);
  }

  template <int kWidth>
  __device__ void load(int64_t row, int row_width, int col, bool wanted, float (&x)[kWidth]) const {
    const auto codes = load_stored<kWidth>(codes_TN + row * row_width + col, wanted);
    const float scale = wanted ? to_float(scales[row * across + (col >> group_shift)]) : 0.0f;
#pragma unroll
    for (int w = 0; w < kWidth / 4; ++w) {
      float numbers[4];
      decode_4<F8>(codes.word[w], scale, numbers);
#pragma unroll
      for (int i = 0; i < 4; ++i) x[4 * w + i] = numbers[i];
    }
  }
};

}  // namespace parka::cuda
