#pragma once
#include <type_traits>

#include "kernels/cuda/quantize/matrix_source.cuh"
#include "kernels/cuda/swiglu/swiglu_elements.cuh"

// What SwiGLU's FP8 kernels read: a Loader fetches 16 columns of a row as they are stored, and decodes 4 of them at
// a time into Numbers, which know the product and its gradients. Letters: swiglu.cu.
namespace parka::cuda {

// In place of act(gate) where it was not saved and is computed; of factors of rows; of d_product in forward.
template <int kWhich>
struct Nothing {
  struct Fetched {};
  __device__ Fetched fetch(int, int) const { return {}; }
  __device__ void decode(const Fetched&, int, float (&)[4]) const {}
};
using NoSilu = Nothing<0>;
using NoFactor = Nothing<1>;
using NoGradient = Nothing<2>;

struct RowFactor {
  const float* row_factor_T;
  using Fetched = float;
  __device__ Fetched fetch(int row, int) const { return __ldg(row_factor_T + row); }
};

// x times the factor of a row. Zero for 0, whatever x is.
__device__ inline float scaled_by(float factor, float x) { return factor == 0.0f ? 0.0f : __fmul_rn(x, factor); }

// up, act(gate), act'(gate) and d_product at kCount places of a row, in fp32.
template <int kCount, bool kFactored = false>
struct Numbers {
  float up[kCount], activated[kCount], slope[kCount], d_product[kCount];
  float factor;

  __device__ float product(int i) const { return scaled(product_of(up[i], activated[i])); }
  __device__ float d_up(int i) const { return scaled(up_gradient(d_product[i], activated[i])); }
  __device__ float d_gate(int i) const { return scaled(gate_gradient(d_product[i], up[i], slope[i])); }
  // The larger magnitude of d_up and d_gate. Rounding keeps the order of the magnitudes.
  __device__ float magnitude(int i) const {
    const float x = scaled(gradient_magnitude(d_product[i], up[i], activated[i], slope[i]));
    return kFactored ? fabsf(x) : x;
  }

 private:
  __device__ float scaled(float x) const { return kFactored ? scaled_by(factor, x) : x; }
};

template <typename UpGate, typename Silu, typename Activation>
struct Gates {
  UpGate up_gate;  // [T, 2F]
  Silu saved_silu;
  Activation activation;
  int width;  // F
};

// Bases take no memory where they have no members: NoFactor, NoGradient.
template <typename UpGate, typename Silu, typename Activation, typename Factor, typename Gradient>
struct Loader : Gates<UpGate, Silu, Activation>, Factor, Gradient {
  static constexpr bool kCoded = !std::is_same_v<UpGate, PlainSource<BFloat16>>;
  static constexpr bool kSaved = !std::is_same_v<Silu, NoSilu>;
  static constexpr bool kFactored = std::is_same_v<Factor, RowFactor>;
  using Numbers = cuda::Numbers<4, kFactored>;
  struct Fetched {
    typename UpGate::Fetched up, gate;
    typename Silu::Fetched silu;
    typename Factor::Fetched factor;
    typename Gradient::Fetched d_product;
  };

  __device__ Fetched fetch(int row, int col) const {
    return {this->up_gate.fetch(row, col), this->up_gate.fetch(row, col + this->width),
            this->saved_silu.fetch(row, col), Factor::fetch(row, col), Gradient::fetch(row, col)};
  }
  // A quarter of what was fetched.
  __device__ void read(const Fetched& at, int quarter, Numbers& x) const {
    float gate[4];
    this->up_gate.decode(at.up, quarter, x.up);
    this->up_gate.decode(at.gate, quarter, gate);
    this->saved_silu.decode(at.silu, quarter, x.activated);
    activate(this->activation, kCoded, kSaved, gate, x.activated, x.slope);
    if constexpr (kFactored) x.factor = at.factor;
    Gradient::decode(at.d_product, quarter, x.d_product);
  }
};
template <typename UpGate, typename Silu, typename A, typename Factor, typename Gradient>
Loader(Gates<UpGate, Silu, A>, Factor, Gradient) -> Loader<UpGate, Silu, A, Factor, Gradient>;

// A Source (matrix_source.cuh) of every kRowStep-th row of the product, or of the larger magnitude of d_up and
// d_gate, from which a maximum over both is taken.
template <bool kMagnitude, int kRowStep, typename Loader>
struct LoaderSource {
  Loader loader;

  using Fetched = typename Loader::Fetched;
  __device__ Fetched fetch(int row, int col) const { return loader.fetch(row * kRowStep, col); }
  __device__ void decode(const Fetched& at, int quarter, float (&x)[4]) const {
    typename Loader::Numbers numbers;
    loader.read(at, quarter, numbers);
    for_each<4>([&](int i) { x[i] = kMagnitude ? numbers.magnitude(i) : numbers.product(i); });
  }
};
template <typename Loader>
LoaderSource<false, 1, Loader> product_source(const Loader& loader) {
  return {loader};
}
template <int kRowStep, typename Loader>
LoaderSource<true, kRowStep, Loader> magnitude_source(const Loader& loader) {
  return {loader};
}

// Only SiLU, which all mixtures of experts have, has factors.
template <typename Args>
bool fits_factor(const Args& a) {
  return a.row_factor.empty() || a.activation == GateActivation::kSilu;
}
// Calls f(activation, factor) with their device forms, for what fits_factor().
template <typename Args, typename F>
void with_activation_and_factor(const Args& a, const F& f) {
  with_activation(a.activation, [&](auto activation) {
    if constexpr (std::is_same_v<decltype(activation), SiluActivation>) {
      if (!a.row_factor.empty()) return f(activation, RowFactor{a.row_factor.template as<float>()});
    }
    f(activation, NoFactor{});
  });
}

// Calls f with the Loader of an op's arguments, with d_product or without, and returns true, where their formats
// have kernels of their own: act(gate) is saved only beside codes of up_gate.
template <typename Args, typename Gradient, typename F>
bool with_loader(const Args& a, const Gradient& d_product, const F& f) {
  const int width = static_cast<int>(a.up_gate.num_cols() / 2);
  const auto is_saved = [](const ScaledView& t) {
    return t.data.dtype == DType::kE4M3 && BFloat16GroupScales::fits(t);
  };
  const bool plain_alone = a.up_gate.data.dtype == DType::kBF16 && a.silu.empty();
  const bool all_coded = is_saved(a.up_gate) && (a.silu.empty() || is_saved(a.silu));
  const bool wide = width % kSourceWidth == 0 && AnySource(a.up_gate).fits_wide() && AnySource(a.silu).fits_wide();
  if (!wide || !(plain_alone || all_coded) || !fits_factor(a)) return false;
  using Plain = PlainSource<BFloat16>;
  using Coded = GroupedSource<Float8E4M3>;
  with_activation_and_factor(a, [&](auto activation, auto factor) {
    if (plain_alone) {
      f(Loader{Gates{Plain(a.up_gate), NoSilu{}, activation, width}, factor, d_product});
    } else if (a.silu.empty()) {
      f(Loader{Gates{Coded(a.up_gate), NoSilu{}, activation, width}, factor, d_product});
    } else {
      f(Loader{Gates{Coded(a.up_gate), Coded(a.silu), activation, width}, factor, d_product});
    }
  });
  return true;
}

// ---- swiglu_generic.cu: any formats and shapes, element by element ----

// `amax` as for write_tiles() of quantize_tiles.cuh; where `finds_amax`, its maximum is found first.
template <typename Args>
void write_any_product(CudaDevice& device, const Args& a, float* amax, bool finds_amax);
void write_any_silu(CudaDevice& device, const SwigluForward& a);
void write_any_gradient(CudaDevice& device, const SwigluBackward& a, float* amax);
void any_row_gradient(CudaDevice& device, const SwigluBackward& a, float* d_row_factor_T);

}  // namespace parka::cuda
