#pragma once
#include "kernels/cuda/norm/norm_rows.cuh"
#include "kernels/cuda/quantize/matrix_source.cuh"
#include "kernels/ops/norm/norm.h"

// The output of a norm as a Source (quantize_tiles.cuh says what that is).
namespace parka::cuda {

// ---- Weights, offset included; LayerNorm has none. load(): 4 adjacent columns. Some have a bias ----

struct NoWeight {
  static constexpr bool kCentred = true;  // the norm subtracts the mean

  bool fits_wide() const { return true; }
  __device__ void load(int, float (&)[4]) const {}
  __device__ float element(int) const { return 1.0f; }
  static __device__ float times(float x, float) { return x; }
  __device__ float plus_bias(float x, int) const { return x; }
};

struct BFloat16Weight {
  static constexpr bool kCentred = false;
  const BFloat16* weight_C;
  float offset;

  bool fits_wide() const { return is_aligned(weight_C, 16); }
  __device__ void load(int col, float (&w)[4]) const {
    const uint2 words = __ldg(reinterpret_cast<const uint2*>(weight_C + col));
    const Stored<BFloat16, 4> stored{{words.x, words.y}};
#pragma unroll
    for (int i = 0; i < 4; ++i) w[i] = stored[i] + offset;
  }
  __device__ float element(int col) const { return to_float(weight_C[col]) + offset; }
  static __device__ float times(float x, float w) { return __fmul_rn(x, w); }
  __device__ float plus_bias(float x, int) const { return x; }
};

// A weight of either format, with a bias of the same; null: multiplying by 1 changes nothing.
struct AnyWeight {
  static constexpr bool kCentred = true;
  const void* weight_C;
  const void* bias_C;  // null: no bias
  bool is_bf16;
  float offset;

  AnyWeight(const TensorView& weight, const TensorView& bias, float offset_)
      : weight_C(weight.data), bias_C(bias.data), is_bf16(weight.dtype == DType::kBF16), offset(offset_) {}

  bool fits_wide() const { return is_aligned(weight_C, 16); }
  __device__ void load(int col, float (&w)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) w[i] = element(col + i);
  }
  __device__ float element(int col) const { return weight_C == nullptr ? 1.0f : of(weight_C, col) + offset; }
  static __device__ float times(float x, float w) { return __fmul_rn(x, w); }
  __device__ float plus_bias(float x, int col) const {
    return bias_C == nullptr ? x : __fadd_rn(x, of(bias_C, col));
  }

 private:
  __device__ float of(const void* values_C, int col) const {
    return is_bf16 ? to_float(static_cast<const BFloat16*>(values_C)[col])
                   : static_cast<const float*>(values_C)[col];
  }
};

// ---- What the norm read, normalized with the statistics of its rows and multiplied by the weight ----

template <typename X, typename Weight>
struct NormSource {
  // True if the mean is subtracted as x is decoded.
  static constexpr bool kDecodesLess =
      Weight::kCentred && requires(const X& of, const typename X::Fetched& fetched, float (&y)[4]) {
    of.decode_less(fetched, 0, 0.0f, y);
  };

  X x;
  Weight weight;
  const float* mean_T;  // null for RMSNorm: zeros
  const float* rstd_T;

  struct Fetched {
    typename X::Fetched x;
    float mean, rstd;
    int col;
  };

  bool fits_wide() const { return x.fits_wide() && weight.fits_wide(); }

  __device__ Fetched fetch(int row, int col) const {
    return {x.fetch(row, col), mean_of(row), __ldg(rstd_T + row), col};
  }
  __device__ void decode(const Fetched& fetched, int quarter, float (&y)[4]) const {
    float w[4];
    weight.load(fetched.col + 4 * quarter, w);
    if constexpr (kDecodesLess) {
      x.decode_less(fetched.x, quarter, fetched.mean, y);
    } else {
      x.decode(fetched.x, quarter, y);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      constexpr bool kSubtracts = Weight::kCentred && !kDecodesLess;
      y[i] = Weight::times(normalized<kSubtracts>(y[i], fetched.mean, fetched.rstd), w[i]);
      y[i] = weight.plus_bias(y[i], fetched.col + 4 * quarter + i);
    }
  }

  __device__ float element(int row, int col) const {
    const float xhat = normalized<Weight::kCentred>(x.element(row, col), mean_of(row), rstd_T[row]);
    return weight.plus_bias(Weight::times(xhat, weight.element(col)), col);
  }

 private:
  __device__ float mean_of(int row) const {
    if (!Weight::kCentred || (!std::is_same_v<Weight, NoWeight> && mean_T == nullptr)) return 0.0f;
    return __ldg(mean_T + row);
  }
};

using AnyNormSource = NormSource<AnySource, AnyWeight>;
// The norm of x with the weight and the statistics of `a`, forward's or recompute's arguments: of any input.
template <typename Args>
AnyNormSource any_norm_source(const ScaledView& x, const Args& a) {
  return {AnySource(x), AnyWeight(a.weight, a.bias, a.weight_offset), optional<float>(a.mean),
          a.rstd.template as<float>()};
}

// Calls f with the source: one made for the formats that training asks for, or one for any.
template <typename Args, typename F>
void with_norm_source(const ScaledView& x, const Args& a, const F& f) {
  const TensorView& weight = a.weight;
  const auto with_weight = [&](auto source) {
    using X = decltype(source);
    const float* const mean_T = optional<float>(a.mean);
    const auto* const rstd_T = a.rstd.template as<float>();
    if (weight.empty()) {
      f(NormSource<X, NoWeight>{source, {}, mean_T, rstd_T});
    } else {
      f(NormSource<X, BFloat16Weight>{source, {weight.as<BFloat16>(), a.weight_offset}, mean_T, rstd_T});
    }
  };
  if (a.kind == NormKind::kAffineLayerNorm || (!weight.empty() && weight.dtype != DType::kBF16)) {
    f(any_norm_source(x, a));
  } else if (x.data.dtype == DType::kBF16) {
    with_weight(PlainSource<BFloat16>(x));
  } else if (x.data.dtype == DType::kE4M3 && BFloat16GroupScales::fits(x)) {
    with_weight(GroupedSource<Float8E4M3>(x));
  } else {
    f(any_norm_source(x, a));
  }
}

}  // namespace parka::cuda
