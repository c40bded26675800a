#pragma once
#include <type_traits>

#include "kernels/cuda/quantize/matrix_source.cuh"
#include "kernels/cuda/swiglu/swiglu_elements.cuh"

// The results of SwiGLU from up_gate, the saved silu and d_product, as Sources (see quantize_tiles.cuh).
//
// Shapes: T rows (tokens), F columns of the product; up_gate has 2F, up before gate.
namespace parka::cuda {

// ---- Formats that training uses, 16 columns at a time ----

// No saved act(gate): it is computed.
struct NoSource {
  struct Fetched {};
  __device__ Fetched fetch(int, int) const { return {}; }
  __device__ void decode(const Fetched&, int, float (&)[4]) const {}
};

// The factors of product and gradients at kCount places, in fp32: act(gate) and act'(gate) beside up and
// d_product.
template <int kCount>
struct SwigluParts {
  float up[kCount], activated[kCount], slope[kCount], d_product[kCount];

  __device__ float product(int i) const { return product_of(up[i], activated[i]); }
  __device__ float d_up(int i) const { return up_gradient(d_product[i], activated[i]); }
  __device__ float d_gate(int i) const { return gate_gradient(d_product[i], up[i], slope[i]); }
  // The larger of both gradients'.
  __device__ float magnitude(int i) const {
    return gradient_magnitude(d_product[i], up[i], activated[i], slope[i]);
  }
};

// x times the factor of a row. Zero for 0, whatever x is.
__device__ inline float scaled_by(float factor, float x) { return factor == 0.0f ? 0.0f : __fmul_rn(x, factor); }

// The same where rows have a factor. Rounding keeps the order of the magnitudes.
template <int kCount>
struct FactoredParts : SwigluParts<kCount> {
  using Base = SwigluParts<kCount>;
  float factor;

  __device__ float product(int i) const { return scaled_by(factor, Base::product(i)); }
  __device__ float d_up(int i) const { return scaled_by(factor, Base::d_up(i)); }
  __device__ float d_gate(int i) const { return scaled_by(factor, Base::d_gate(i)); }
  __device__ float magnitude(int i) const { return fabsf(scaled_by(factor, Base::magnitude(i))); }
};

// Up and gate of [T, F].
template <typename UpGate, typename Silu, typename Activation>
struct Gates {
  static constexpr bool kCoded = !std::is_same_v<UpGate, PlainSource<BFloat16>>;
  static constexpr bool kSaved = !std::is_same_v<Silu, NoSource>;
  static constexpr bool kIsSilu = std::is_same_v<Activation, SiluActivation>;
  UpGate up_gate;
  Silu saved_silu;
  Activation activation;
  int width;

  using Parts = SwigluParts<4>;
  struct Fetched {
    typename UpGate::Fetched up, gate;
    typename Silu::Fetched silu;
  };

  __device__ Fetched fetch(int row, int col) const {
    return {up_gate.fetch(row, col), up_gate.fetch(row, col + width), saved_silu.fetch(row, col)};
  }
  // A quarter of what was fetched.
  __device__ void read(const Fetched& at, int quarter, SwigluParts<4>& parts) const {
    float gate[4];
    up_gate.decode(at.up, quarter, parts.up);
    up_gate.decode(at.gate, quarter, gate);
    saved_silu.decode(at.silu, quarter, parts.activated);
    activate(activation, kCoded, kSaved, gate, parts.activated, parts.slope);
  }
};

// The same of rows that have a factor.
template <typename Gates>
struct FactoredGates {
  Gates gates;
  const float* row_factor;

  using Parts = FactoredParts<4>;
  struct Fetched {
    typename Gates::Fetched gates;
    float factor;
  };

  __device__ Fetched fetch(int row, int col) const { return {gates.fetch(row, col), __ldg(row_factor + row)}; }
  __device__ void read(const Fetched& at, int quarter, Parts& parts) const {
    gates.read(at.gates, quarter, parts);
    parts.factor = at.factor;
  }
};

// Kernels of their own have factors of rows only with SiLU, which all mixtures of experts have.
template <typename Args>
bool fits_factor(const Args& a) {
  return a.row_factor.empty() || a.activation == GateActivation::kSilu;
}

// Calls f with the Gates of an op's arguments, and returns true, where their formats have kernels of their own:
// act(gate) is saved only beside codes of up_gate.
template <typename Args, typename F>
bool with_gates(const Args& a, const F& f) {
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
  const auto with_factor = [&](const auto& gates) {
    using G = std::decay_t<decltype(gates)>;
    if constexpr (G::kIsSilu) {
      if (!a.row_factor.empty()) {
        f(FactoredGates<G>{gates, a.row_factor.template as<float>()});
        return;
      }
    }
    f(gates);
  };
  with_activation(a.activation, [&](auto activation) {
    using A = decltype(activation);
    if (plain_alone) {
      with_factor(Gates<Plain, NoSource, A>{Plain(a.up_gate), {}, activation, width});
    } else if (a.silu.empty()) {
      with_factor(Gates<Coded, NoSource, A>{Coded(a.up_gate), {}, activation, width});
    } else {
      with_factor(Gates<Coded, Coded, A>{Coded(a.up_gate), Coded(a.silu), activation, width});
    }
  });
  return true;
}

// up * act(gate), [T, F].
template <typename Gates>
struct ProductSource {
  Gates gates;

  using Fetched = typename Gates::Fetched;

  __device__ Fetched fetch(int row, int col) const { return gates.fetch(row, col); }
  __device__ void decode(const Fetched& at, int quarter, float (&x)[4]) const {
    typename Gates::Parts parts;
    gates.read(at, quarter, parts);
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = parts.product(i);
  }
};

// The inputs of gradients, [T, F].
template <typename Gates>
struct GradientInputs {
  Gates gates;
  PlainSource<BFloat16> d_product;

  using Parts = typename Gates::Parts;
  struct Fetched {
    typename Gates::Fetched gates;
    PlainSource<BFloat16>::Fetched d_product;
  };

  __device__ Fetched fetch(int row, int col) const { return {gates.fetch(row, col), d_product.fetch(row, col)}; }
  __device__ void read(const Fetched& at, int quarter, Parts& parts) const {
    gates.read(at.gates, quarter, parts);
    d_product.decode(at.d_product, quarter, parts.d_product);
  }
};

// The larger magnitude of d_up and d_gate in every kRowStep-th row: what is needed for the maximum over both.
template <typename Inputs, int kRowStep>
struct MagnitudeSource {
  Inputs inputs;

  using Fetched = typename Inputs::Fetched;

  __device__ Fetched fetch(int row, int col) const { return inputs.fetch(row * kRowStep, col); }
  __device__ void decode(const Fetched& at, int quarter, float (&x)[4]) const {
    typename Inputs::Parts parts;
    inputs.read(at, quarter, parts);
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = parts.magnitude(i);
  }
};

// ---- Any format, element by element ----

enum class SwigluPart { kSilu, kProduct, kGradient, kMagnitude };

// act(gate) as it is to be saved, the product, or the larger magnitude of both gradients, [T, F]; or both, [T, 2F].
template <SwigluPart kPart, int kRowStep = 1>
struct AnySwigluSource {
  AnySource up_gate, silu, d_product;
  GateActivation activation;
  int width;

  struct Fetched {  // only where they are
    int row, col;
  };

  bool fits_wide() const { return width % kSourceWidth == 0; }
  __device__ Fetched fetch(int row, int col) const { return {row, col}; }
  __device__ void decode(const Fetched& at, int quarter, float (&x)[4]) const {
    for (int i = 0; i < 4; ++i) x[i] = element(at.row, at.col + 4 * quarter + i);
  }
  // A call: inlined for each of 16 columns, it would make kernels large.
  __device__ __noinline__ float element(int row, int col) const {
    row *= kRowStep;
    const bool is_gate = col >= width;
    if (is_gate) col -= width;
    const bool saved = kPart != SwigluPart::kSilu && silu.data != nullptr;
    const bool coded = kPart != SwigluPart::kSilu && up_gate.dtype != DType::kF32 && up_gate.dtype != DType::kBF16;
    const float gate[] = {up_gate.element(row, col + width)};
    SwigluParts<1> parts;
    parts.up[0] = up_gate.element(row, col);
    if (saved) parts.activated[0] = silu.element(row, col);
    activate(activation, coded, saved, gate, parts.activated, parts.slope);
    if constexpr (kPart == SwigluPart::kSilu) return parts.activated[0];
    if constexpr (kPart == SwigluPart::kProduct) return parts.product(0);
    parts.d_product[0] = d_product.element(row, col);
    if constexpr (kPart == SwigluPart::kMagnitude) return parts.magnitude(0);
    return is_gate ? parts.d_gate(0) : parts.d_up(0);
  }
};

// The same of rows that have a factor.
template <SwigluPart kPart, int kRowStep>
struct FactoredElements {
  AnySwigluSource<kPart, kRowStep> source;
  const float* row_factor;

  __device__ float element(int row, int col) const {
    return scaled_by(row_factor[row * kRowStep], source.element(row, col));
  }
};

}  // namespace parka::cuda
