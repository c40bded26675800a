#pragma once
#include <type_traits>

#include "kernels/cuda/quantize/matrix_source.cuh"
#include "kernels/cuda/swiglu/swiglu_elements.cuh"

// The results of SwiGLU from up_gate, the saved silu and d_product, as Sources (see quantize_tiles.cuh).
//
// Shapes: T rows (tokens), F columns of the product; up_gate has 2F, up before gate.
namespace parka::cuda {

// One place of a matrix, where 16 adjacent ones are a Source's Fetched.
struct Element {
  int row, col;
};

// No saved act(gate): it is computed.
struct NoSource {
  struct Fetched {};
  bool fits_wide() const { return true; }
  __device__ Fetched fetch(int, int) const { return {}; }
  __device__ void decode(const Fetched&, int, float (&)[4]) const {}
  __device__ float element(int, int) const { return 0.0f; }
};

__device__ constexpr bool is_given(const NoSource&) { return false; }
template <typename F8, typename Scales>
__device__ constexpr bool is_given(const CodedSource<F8, Scales>&) {
  return true;
}
__device__ inline bool is_given(const AnySource& x) { return x.data != nullptr; }

// Whether numbers are decoded from FP8.
template <typename X>
__device__ constexpr bool is_coded(const PlainSource<X>&) {
  return false;
}
template <typename F8, typename Scales>
__device__ constexpr bool is_coded(const CodedSource<F8, Scales>&) {
  return true;
}
__device__ inline bool is_coded(const AnySource& x) { return x.dtype != DType::kF32 && x.dtype != DType::kBF16; }

// Up and gate of [T, F].
template <typename UpGate, typename Silu, typename Activation>
struct Gated {
  UpGate up_gate;
  Silu saved_silu;
  Activation activation;
  int width;

  struct Fetched {
    typename UpGate::Fetched up, gate;
    typename Silu::Fetched silu;
  };

  Gated(const ScaledView& up_gate_, const Silu& saved, Activation activation_)
      : up_gate(up_gate_),
        saved_silu(saved),
        activation(activation_),
        width(static_cast<int>(up_gate_.num_cols() / 2)) {}

  bool fits_wide() const { return width % kSourceWidth == 0 && up_gate.fits_wide() && saved_silu.fits_wide(); }
  __device__ Fetched fetch(int row, int col) const {
    return {up_gate.fetch(row, col), up_gate.fetch(row, col + width), saved_silu.fetch(row, col)};
  }
  // The numbers of a quarter of what was fetched, or of one element.
  __device__ void read_up(const Fetched& at, int quarter, float (&up)[4]) const {
    up_gate.decode(at.up, quarter, up);
  }
  __device__ void read_up(const Element& at, int, float (&up)[1]) const { up[0] = up_gate.element(at.row, at.col); }
  __device__ void read_gate(const Fetched& at, int quarter, float (&gate)[4]) const {
    up_gate.decode(at.gate, quarter, gate);
  }
  __device__ void read_gate(const Element& at, int, float (&gate)[1]) const {
    gate[0] = up_gate.element(at.row, at.col + width);
  }
  // What the product and gradients are made of: act(gate) and act'(gate).
  template <typename Place, int kCount>
  __device__ void read_activated(const Place& at, int quarter, float (&activated)[kCount],
                                 float (&slope)[kCount]) const {
    float gate[kCount];
    read_gate(at, quarter, gate);
    if (is_given(saved_silu)) read_saved_silu(at, quarter, activated);
    activate(activation, is_coded(up_gate), is_given(saved_silu), gate, activated, slope);
  }

 private:
  __device__ void read_saved_silu(const Fetched& at, int quarter, float (&silus)[4]) const {
    saved_silu.decode(at.silu, quarter, silus);
  }
  __device__ void read_saved_silu(const Element& at, int, float (&silus)[1]) const {
    silus[0] = saved_silu.element(at.row, at.col);
  }
};

using AnyGated = Gated<AnySource, AnySource, GateActivation>;

// The members of a Source that all those below have in common: Numbers has make(at, quarter, x), for 4 numbers of
// what its fetch() gave, and for an Element.
template <typename Numbers>
struct MadeSource : Numbers {
  using typename Numbers::Fetched;

  explicit MadeSource(const Numbers& numbers) : Numbers(numbers) {}
  __device__ void decode(const Fetched& fetched, int quarter, float (&x)[4]) const {
    this->make(fetched, quarter, x);
  }
  __device__ void load(int row, int col, float (&x)[16]) const { load_of(*this, row, col, x); }
  __device__ float element(int row, int col) const {
    float x[1];
    this->make(Element{row, col}, 0, x);
    return x[0];
  }
};

// act(gate) as it is to be saved, [T, F].
template <typename Gates>
struct SiluNumbers {
  Gates gated;

  using Fetched = typename Gates::Fetched;

  bool fits_wide() const { return gated.fits_wide(); }
  __device__ Fetched fetch(int row, int col) const { return gated.fetch(row, col); }
  template <typename Place, int kCount>
  __device__ void make(const Place& at, int quarter, float (&x)[kCount]) const {
    float gate[kCount], slope[kCount];
    gated.read_gate(at, quarter, gate);
    activate(gated.activation, /*coded=*/false, /*saved=*/false, gate, x, slope);
  }
};

// up * act(gate), [T, F].
template <typename Gates>
struct ProductNumbers {
  Gates gated;

  using Fetched = typename Gates::Fetched;

  bool fits_wide() const { return gated.fits_wide(); }
  __device__ Fetched fetch(int row, int col) const { return gated.fetch(row, col); }
  template <typename Place, int kCount>
  __device__ void make(const Place& at, int quarter, float (&x)[kCount]) const {
    float up[kCount], activated[kCount], slope[kCount];
    gated.read_up(at, quarter, up);
    gated.read_activated(at, quarter, activated, slope);
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = product_of(up[i], activated[i]);
  }
};

// What gradients of kCount places are made of, in fp32.
template <int kCount>
struct GradientParts {
  float up[kCount], d_product[kCount], activated[kCount], slope[kCount];

  __device__ float d_up(int i) const { return up_gradient(d_product[i], activated[i]); }
  __device__ float d_gate(int i) const { return gate_gradient(d_product[i], up[i], slope[i]); }
  __device__ float product(int i) const { return product_of(up[i], activated[i]); }
  __device__ float magnitude(int i) const {
    return gradient_magnitude(d_product[i], up[i], activated[i], slope[i]);
  }
};

// Of a place in [T, F].
template <typename Gates, typename DProduct>
struct GradientInputs {
  Gates gated;
  DProduct d_product;

  struct Fetched {
    typename Gates::Fetched gated;
    typename DProduct::Fetched d_product;
  };

  bool fits_wide() const { return gated.fits_wide() && d_product.fits_wide(); }
  __device__ Fetched fetch(int row, int col) const { return {gated.fetch(row, col), d_product.fetch(row, col)}; }
  // As Gated's: a quarter of what was fetched, or one element.
  __device__ void read(const Fetched& at, int quarter, GradientParts<4>& g) const {
    gated.read_up(at.gated, quarter, g.up);
    gated.read_activated(at.gated, quarter, g.activated, g.slope);
    d_product.decode(at.d_product, quarter, g.d_product);
  }
  __device__ void read(const Element& at, int, GradientParts<1>& g) const {
    gated.read_up(at, 0, g.up);
    gated.read_activated(at, 0, g.activated, g.slope);
    g.d_product[0] = d_product.element(at.row, at.col);
  }
};

using AnyGradientInputs = GradientInputs<AnyGated, AnySource>;

// d_up_gate, [T, 2F].
template <typename Inputs>
struct GradientNumbers {
  Inputs inputs;

  struct Fetched {
    typename Inputs::Fetched at;
    bool is_up;
  };

  bool fits_wide() const { return inputs.fits_wide(); }
  __device__ Fetched fetch(int row, int col) const {
    const int width = inputs.gated.width;
    return {inputs.fetch(row, col < width ? col : col - width), col < width};
  }
  __device__ void make(const Fetched& fetched, int quarter, float (&x)[4]) const {
    make_half(fetched.at, quarter, fetched.is_up, x);
  }
  __device__ void make(const Element& at, int, float (&x)[1]) const {
    const int width = inputs.gated.width;
    make_half(Element{at.row, at.col < width ? at.col : at.col - width}, 0, at.col < width, x);
  }

 private:
  template <typename Place, int kCount>
  __device__ void make_half(const Place& at, int quarter, bool is_up, float (&x)[kCount]) const {
    GradientParts<kCount> g;
    inputs.read(at, quarter, g);
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = is_up ? g.d_up(i) : g.d_gate(i);
  }
};

// The larger magnitude of d_up and d_gate, [T, F]: what is needed for the maximum over both.
template <typename Inputs>
struct GradientMagnitudes {
  Inputs inputs;

  using Fetched = typename Inputs::Fetched;

  bool fits_wide() const { return inputs.fits_wide(); }
  __device__ Fetched fetch(int row, int col) const { return inputs.fetch(row, col); }
  template <typename Place, int kCount>
  __device__ void make(const Place& at, int quarter, float (&x)[kCount]) const {
    GradientParts<kCount> g;
    inputs.read(at, quarter, g);
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = g.magnitude(i);
  }
};

// Calls f with the Gated of these matrices. The formats that training uses have kernels of their own, if `wide`:
// act(gate) is saved only beside codes of up_gate.
template <typename F>
void with_gated(const ScaledView& up_gate, const ScaledView& silu, GateActivation activation, bool wide,
                const F& f) {
  using Plain = PlainSource<BFloat16>;
  using Coded = GroupedSource<Float8E4M3>;
  const auto is_saved = [](const ScaledView& t) {
    return t.data.dtype == DType::kE4M3 && BFloat16GroupScales::fits(t);
  };
  const bool plain_alone = up_gate.data.dtype == DType::kBF16 && silu.empty();
  const bool all_coded = is_saved(up_gate) && (silu.empty() || is_saved(silu));
  if (!wide || !(plain_alone || all_coded)) {
    f(AnyGated(up_gate, AnySource(silu), activation));
    return;
  }
  with_activation(activation, [&](auto act) {
    if (plain_alone) {
      f(Gated<Plain, NoSource, decltype(act)>(up_gate, NoSource(), act));
    } else if (silu.empty()) {
      f(Gated<Coded, NoSource, decltype(act)>(up_gate, NoSource(), act));
    } else {
      f(Gated<Coded, Coded, decltype(act)>(up_gate, Coded(silu), act));
    }
  });
}

}  // namespace parka::cuda
