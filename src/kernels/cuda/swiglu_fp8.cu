#include "kernels/cuda/swiglu_fp8.h"

#include <algorithm>
#include <bit>
#include <type_traits>

#include "kernels/cuda/check.h"
#include "kernels/cuda/matrix_source.cuh"
#include "kernels/cuda/quantize.h"
#include "kernels/cuda/quantize_tiles.cuh"
#include "kernels/cuda/swiglu_elements.cuh"

// Shapes: T rows (tokens), F columns of the product; up_gate has 2F, up before gate.
//
// Everything is made of Sources (quantize_tiles.cuh), and tensors with one scale in two passes: one for the
// maximum, one that computes the same numbers again and writes codes, which is cheaper than keeping them in
// between.
namespace parka::cuda {
namespace {

// ---- Numbers made of up_gate, the saved silu and d_product ----

// No saved silu(gate): it is computed.
struct NoSource {
  bool fits_wide() const { return true; }
  __device__ void load(int, int, float (&)[16]) const {}
  __device__ float element(int, int) const { return 0.0f; }
};

__device__ constexpr bool is_given(const NoSource&) { return false; }
template <typename F8>
__device__ constexpr bool is_given(const CodedSource<F8>&) {
  return true;
}
__device__ bool is_given(const AnySource& x) { return x.data != nullptr; }

// The numbers of a source in either of its ways: 16 adjacent ones, or one.
template <typename Source>
__device__ void read(const Source& source, int row, int col, float (&x)[16]) {
  source.load(row, col, x);
}
template <typename Source>
__device__ void read(const Source& source, int row, int col, float (&x)[1]) {
  x[0] = source.element(row, col);
}

// Up and gate of [T, F].
template <typename UpGate, typename Silu>
struct Gated {
  UpGate up_gate;
  Silu saved_silu;
  int width;

  Gated(const ScaledView& up_gate_, const Silu& saved)
      : up_gate(up_gate_), saved_silu(saved), width(static_cast<int>(up_gate_.num_cols() / 2)) {}

  bool fits_wide() const { return width % kSourceWidth == 0 && up_gate.fits_wide() && saved_silu.fits_wide(); }
  template <int kCount>
  __device__ void read_up(int row, int col, float (&up)[kCount]) const {
    read(up_gate, row, col, up);
  }
  template <int kCount>
  __device__ void read_gate(int row, int col, float (&sigmoids)[kCount], float (&silus)[kCount]) const {
    float gate[kCount];
    read(up_gate, row, col + width, gate);
    if (is_given(saved_silu)) read(saved_silu, row, col, silus);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      sigmoids[i] = sigmoid(gate[i]);
      if (!is_given(saved_silu)) silus[i] = silu(gate[i], sigmoids[i]);
    }
  }
};

using AnyGated = Gated<AnySource, AnySource>;

// The members of a Source that all those below have in common: Numbers has make(row, col, x) for 16 numbers and
// one.
template <typename Numbers>
struct MadeSource : Numbers {
  explicit MadeSource(const Numbers& numbers) : Numbers(numbers) {}
  __device__ void load(int row, int col, float (&x)[16]) const { this->make(row, col, x); }
  __device__ float element(int row, int col) const {
    float x[1];
    this->make(row, col, x);
    return x[0];
  }
};

// silu(gate), [T, F].
template <typename Gates>
struct SiluNumbers {
  Gates gated;

  bool fits_wide() const { return gated.fits_wide(); }
  template <int kCount>
  __device__ void make(int row, int col, float (&x)[kCount]) const {
    float sigmoids[kCount];
    gated.read_gate(row, col, sigmoids, x);
  }
};

// up * silu(gate), [T, F].
template <typename Gates>
struct ProductNumbers {
  Gates gated;

  bool fits_wide() const { return gated.fits_wide(); }
  template <int kCount>
  __device__ void make(int row, int col, float (&x)[kCount]) const {
    float up[kCount], sigmoids[kCount], silus[kCount];
    gated.read_up(row, col, up);
    gated.read_gate(row, col, sigmoids, silus);
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = product_of(up[i], silus[i]);
  }
};

template <int kCount>
struct Gradients {
  float d_up[kCount], d_gate[kCount], product[kCount];
};

template <typename Gates, typename DProduct>
struct GradientInputs {
  Gates gated;
  DProduct d_product;

  bool fits_wide() const { return gated.fits_wide() && d_product.fits_wide(); }
  // Of a place in [T, F]. What the caller does not use is not computed.
  template <int kCount>
  __device__ void make_all(int row, int col, Gradients<kCount>& g) const {
    float up[kCount], d[kCount], sigmoids[kCount], silus[kCount];
    gated.read_up(row, col, up);
    read(d_product, row, col, d);
    gated.read_gate(row, col, sigmoids, silus);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      g.d_up[i] = up_gradient(d[i], silus[i]);
      g.d_gate[i] = gate_gradient(d[i], up[i], sigmoids[i], silus[i]);
      g.product[i] = product_of(up[i], silus[i]);
    }
  }
};

using AnyGradientInputs = GradientInputs<AnyGated, AnySource>;

// d_up_gate, [T, 2F].
template <typename Inputs>
struct GradientNumbers {
  Inputs inputs;

  bool fits_wide() const { return inputs.fits_wide(); }
  template <int kCount>
  __device__ void make(int row, int col, float (&x)[kCount]) const {
    const int width = inputs.gated.width;
    Gradients<kCount> g;
    inputs.make_all(row, col < width ? col : col - width, g);
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = col < width ? g.d_up[i] : g.d_gate[i];
  }
};

// The larger magnitude of d_up and d_gate, [T, F]: what is needed for the maximum over both.
template <typename Inputs>
struct GradientMagnitudes {
  Inputs inputs;

  bool fits_wide() const { return inputs.fits_wide(); }
  template <int kCount>
  __device__ void make(int row, int col, float (&x)[kCount]) const {
    Gradients<kCount> g;
    inputs.make_all(row, col, g);
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = fmaxf(fabsf(g.d_up[i]), fabsf(g.d_gate[i]));
  }
};

// Calls f with the Gated of these matrices. The formats that training uses have kernels of their own, if `wide`.
template <typename F>
void with_gated(const ScaledView& up_gate, const ScaledView& silu, bool wide, const F& f) {
  const DType dtype = up_gate.data.dtype;
  const bool has_kernels =
      wide && (dtype == DType::kBF16 || dtype == DType::kE4M3) && (silu.empty() || silu.data.dtype == DType::kE4M3);
  const auto with_silu = [&]<typename UpGate>(std::type_identity<UpGate>) {
    if (silu.empty()) {
      f(Gated<UpGate, NoSource>(up_gate, NoSource()));
    } else {
      f(Gated<UpGate, CodedSource<Float8E4M3>>(up_gate, CodedSource<Float8E4M3>(silu)));
    }
  };
  if (!has_kernels) {
    f(AnyGated(up_gate, AnySource(silu)));
  } else if (dtype == DType::kBF16) {
    with_silu(std::type_identity<PlainSource<BFloat16>>());
  } else {
    with_silu(std::type_identity<CodedSource<Float8E4M3>>());
  }
}

// ---- Forward: quantizing up_gate and finding the product's maximum in one pass ----

struct GateQuantization {
  const BFloat16* up_gate_T2F;
  uint8_t* codes_T2F;
  BFloat16* scales;
  uint8_t* silu_codes_TF;  // null: silu is not saved
  BFloat16* silu_scales;
  unsigned chunks, total;  // of 16 columns, in a row of F and in [T, F]
  int lane_shift;          // log2 of the chunks in a group
  float* amax;             // of the product; null: not wanted
};

// Codes of 16 numbers of a group that adjacent threads have together. x becomes what they decode to.
template <typename F8>
__device__ float quantize_group(float (&x)[16], int lanes, uint32_t (&codes)[4]) {
  const PieceScale piece = scale_for<F8, BFloat16>(tiles::group_max(tiles::max_magnitude_of(0.0f, x), lanes));
  tiles::encode<F8>(x, piece.inverse, codes);
  decode_16<F8>(codes, piece.scale, x);
  return piece.scale;
}

__device__ void store_codes(uint8_t* target, const uint32_t (&codes)[4]) {
  *reinterpret_cast<Pack<uint32_t, 4>*>(target) = {codes[0], codes[1], codes[2], codes[3]};
}

// A thread has 16 columns of up and the same of gate.
template <typename F8, bool kSavesSilu>
__global__ void __launch_bounds__(tiles::kThreads) quantize_gate_kernel(const GateQuantization q) {
  __shared__ float shared[tiles::kWarps];
  // Threads past the end repeat the last chunk: all are needed where groups and the block have their maxima.
  const unsigned index = blockIdx.x * tiles::kThreads + threadIdx.x, i = min(index, q.total - 1);
  const unsigned row = i / q.chunks, chunk = i - row * q.chunks;
  const int64_t width = int64_t{q.chunks} * kSourceWidth;
  const int64_t up_at = row * 2 * width + chunk * kSourceWidth, gate_at = up_at + width;
  float up[16], gate[16];
  const auto stored_up = load_stored<16>(q.up_gate_T2F + up_at),
             stored_gate = load_stored<16>(q.up_gate_T2F + gate_at);
#pragma unroll
  for (int j = 0; j < 16; ++j) up[j] = stored_up[j];
#pragma unroll
  for (int j = 0; j < 16; ++j) gate[j] = stored_gate[j];

  const int lanes = 1 << q.lane_shift;
  uint32_t up_codes[4], gate_codes[4], silu_codes[4];
  const float up_scale = quantize_group<F8>(up, lanes, up_codes);
  const float gate_scale = quantize_group<F8>(gate, lanes, gate_codes);
  float silus[16], amax = 0.0f, silu_scale = 0.0f;
#pragma unroll
  for (int j = 0; j < 16; ++j) silus[j] = silu(gate[j], sigmoid(gate[j]));
  if constexpr (kSavesSilu) silu_scale = quantize_group<F8>(silus, lanes, silu_codes);
#pragma unroll
  for (int j = 0; j < 16; ++j) amax = max_magnitude(amax, product_of(up[j], silus[j]));

  if (index < q.total) {
    store_codes(q.codes_T2F + up_at, up_codes);
    store_codes(q.codes_T2F + gate_at, gate_codes);
    if constexpr (kSavesSilu) store_codes(q.silu_codes_TF + int64_t{i} * kSourceWidth, silu_codes);
    if (chunk % lanes == 0) {
      const int64_t groups = q.chunks >> q.lane_shift, group = chunk >> q.lane_shift;
      BFloat16* const scale = q.scales + row * 2 * groups + group;
      scale[0] = from_float<BFloat16>(up_scale);
      scale[groups] = from_float<BFloat16>(gate_scale);
      if constexpr (kSavesSilu) q.silu_scales[row * groups + group] = from_float<BFloat16>(silu_scale);
    }
  }
  if (q.amax == nullptr) return;
  amax = block_max<tiles::kThreads>(amax, shared);
  if (threadIdx.x == 0) raise_to(q.amax, amax);
}

// Whether quantize_gate_kernel can do it.
bool fits_quantize_gate(const SwigluForward& a) {
  const auto is_usual = [](const ScaledView& t) {
    return t.scaling == Scaling::kGroup && tiles::fits_tiles(t) && t.scale.dtype == DType::kBF16 &&
           is_aligned(t.data.data, 16);
  };
  const bool same_silu = a.silu.empty() || (is_usual(a.silu) && tiles::same_format(a.silu, a.up_gate));
  return a.up_gate_plain.dtype == DType::kBF16 && is_aligned(a.up_gate_plain.data, 16) && is_usual(a.up_gate) &&
         same_silu && a.product.num_cols() % kSourceWidth == 0;
}

void quantize_gate(CudaDevice& device, const SwigluForward& a, float* amax) {
  const int64_t chunks = a.product.num_cols() / kSourceWidth, total = a.product.num_rows() * chunks;
  PARKA_REQUIRE(total <= INT32_MAX);
  const bool saves_silu = !a.silu.empty();
  const GateQuantization q{
      .up_gate_T2F = a.up_gate_plain.as<BFloat16>(),
      .codes_T2F = tiles::codes_of(a.up_gate),
      .scales = a.up_gate.scale.as<BFloat16>(),
      .silu_codes_TF = tiles::codes_of(a.silu),
      .silu_scales = saves_silu ? a.silu.scale.as<BFloat16>() : nullptr,
      .chunks = static_cast<unsigned>(chunks),
      .total = static_cast<unsigned>(total),
      .lane_shift = std::countr_zero(static_cast<uint64_t>(a.up_gate.group / kSourceWidth)),
      .amax = amax,
  };
  with_float8_type(a.up_gate.data.dtype, [&](auto f8) {
    using F8 = decltype(f8);
    const auto kernel = saves_silu ? quantize_gate_kernel<F8, true> : quantize_gate_kernel<F8, false>;
    kernel<<<static_cast<unsigned>(ceil_div(total, tiles::kThreads)), tiles::kThreads, 0, device.stream()>>>(q);
  });
}

// ---- Backward: d_up, d_gate and the product of a tile together ----

// d_up_gate with one scale, and the product, in the format of activations, with its given one.
template <typename Inputs, typename F8, bool kProduct>
__global__ void __launch_bounds__(tiles::kThreads)
    gradient_codes_kernel(const Inputs inputs, const tiles::CodeOutput d_up, const tiles::CodeOutput d_gate,
                          const tiles::TensorScale scale, const tiles::CodeOutput product,
                          const tiles::TensorScale product_scale) {
  alignas(16) __shared__ uint32_t shared[tiles::kSharedWords];
  const tiles::Place place;
  const int col = min(place.col, d_up.cols - tiles::kWidth);
  const float inverse = scale.inverse<F8>();
  const float product_inverse = kProduct ? product_scale.inverse<Float8E4M3>() : 0.0f;
  tiles::Codes up_codes, gate_codes, product_codes;
#pragma unroll
  for (int k = 0; k < tiles::kHeight; ++k) {
    Gradients<16> g;
    inputs.make_all(min(place.row + k, d_up.rows - 1), col, g);
    tiles::encode<F8>(g.d_up, inverse, up_codes[k]);
    tiles::encode<F8>(g.d_gate, inverse, gate_codes[k]);
    if constexpr (kProduct) tiles::encode<Float8E4M3>(g.product, product_inverse, product_codes[k]);
  }
  tiles::write_codes(up_codes, d_up, shared);
  __syncthreads();
  tiles::write_codes(gate_codes, d_gate, shared);
  if constexpr (kProduct) {
    __syncthreads();
    tiles::write_codes(product_codes, product, shared);
  }
}

template <typename Inputs, typename Y>
__global__ void __launch_bounds__(tiles::kThreads)
    gradient_plain_kernel(const Inputs inputs, Y* d_up_gate_T2F, int rows, int width) {
  const tiles::Place place;
  if (place.col >= width) return;
#pragma unroll
  for (int k = 0; k < tiles::kHeight; ++k) {
    if (place.row + k >= rows) return;
    Gradients<16> g;
    inputs.make_all(place.row + k, place.col, g);
    Y* const target = d_up_gate_T2F + int64_t{place.row + k} * 2 * width + place.col;
    store(target, g.d_up);
    store(target + width, g.d_gate);
  }
}

bool is_tensor(const ScaledView& t) { return !t.empty() && t.scaling == Scaling::kTensor; }
bool is_tensor_or_empty(const ScaledView& t) { return t.empty() || t.scaling == Scaling::kTensor; }
bool is_e4m3_or_empty(const ScaledView& t) { return t.empty() || t.data.dtype == DType::kE4M3; }

// Whether both have one scale for the tensor and go to tiles: what the kernels for usual formats write.
bool fits_tensor_tiles(const ScaledView& t, const ScaledView& t_transposed) {
  return is_tensor_or_empty(t) && is_tensor_or_empty(t_transposed) && is_aligned(t.data.data, 16) &&
         (t.empty() || t_transposed.empty() || t.data.dtype == t_transposed.data.dtype);
}

// A maximum to be raised, 0 at first.
float* zero_amax(CudaDevice& device, std::string_view op) {
  auto* const amax = static_cast<float*>(device.workspace(op, sizeof(float)));
  check(cudaMemsetAsync(amax, 0, sizeof(float), device.stream()), op);
  return amax;
}

// With `amax`, which `is_found` or 0, scales are made from it; with null they are inputs.
void write_product(CudaDevice& device, const ScaledView& up_gate, const ScaledView& silu, const ScaledView& product,
                   const ScaledView& product_t, float* amax, bool is_found) {
  const int64_t rows = up_gate.num_rows(), width = up_gate.num_cols() / 2;
  const bool wide = AnyGated(up_gate, AnySource(silu)).fits_wide() && fits_tensor_tiles(product, product_t);
  with_gated(up_gate, silu, wide, [&](const auto& gated) {
    using Gates = std::decay_t<decltype(gated)>;
    const MadeSource source(ProductNumbers<Gates>{gated});
    if (amax != nullptr && !is_found) find_amax(device, source, rows, width, amax);
    if constexpr (std::is_same_v<Gates, AnyGated>) {
      write_tiles(device, source, rows, width, product, product_t, amax);
    } else {
      tiles::write_tensor(device, source, rows, width, product, product_t, amax);
    }
  });
}

// Columns [first, first + width) of what the views, which may be empty, have.
tiles::CodeOutput part_of(const ScaledView& t, const ScaledView& t_transposed, int64_t rows, int64_t first,
                          int64_t width) {
  const int64_t stride = t.empty() ? width : t.num_cols();
  tiles::CodeOutput out = tiles::code_output(t, t_transposed, rows, width);
  out.stride = static_cast<int>(stride);
  if (out.codes_RC != nullptr) out.codes_RC += first;
  if (out.codes_CR != nullptr) out.codes_CR += first * rows;
  return out;
}

// The gradient as codes with one scale, and the product beside it if `with_product`.
template <typename Inputs>
void write_gradient_codes(CudaDevice& device, const Inputs& inputs, const SwigluBackward& a, bool with_product,
                          const float* amax) {
  const int64_t rows = a.d_product.dim[0], width = a.d_product.dim[1];
  const ScaledView& any = a.d_up_gate.empty() ? a.d_up_gate_t : a.d_up_gate;
  const tiles::CodeOutput d_up = part_of(a.d_up_gate, a.d_up_gate_t, rows, 0, width);
  const tiles::CodeOutput d_gate = part_of(a.d_up_gate, a.d_up_gate_t, rows, width, width);
  const tiles::CodeOutput product = part_of(a.product, a.product_t, rows, 0, width);
  const ScaledView& any_product = a.product.empty() ? a.product_t : a.product;
  const tiles::TensorScale scale = tiles::tensor_scale(any, amax);
  const tiles::TensorScale product_scale =
      with_product ? tiles::tensor_scale(any_product, nullptr) : tiles::TensorScale{};
  with_float8_type(any.data.dtype, [&](auto f8) {
    using F8 = decltype(f8);
    const auto kernel =
        with_product ? gradient_codes_kernel<Inputs, F8, true> : gradient_codes_kernel<Inputs, F8, false>;
    kernel<<<tiles::grid_of(rows, width), tiles::kThreads, 0, device.stream()>>>(inputs, d_up, d_gate, scale,
                                                                                 product, product_scale);
  });
}

// Calls f with the GradientInputs of `a`; as with_gated().
template <typename F>
void with_gradient_inputs(const SwigluBackward& a, bool wide, const F& f) {
  const bool has_kernels = wide && a.d_product.dtype == DType::kBF16;
  with_gated(a.up_gate, a.silu, has_kernels, [&](const auto& gated) {
    using Gates = std::decay_t<decltype(gated)>;
    if constexpr (std::is_same_v<Gates, AnyGated>) {
      f(AnyGradientInputs{gated, AnySource(a.d_product)});
    } else {
      f(GradientInputs<Gates, PlainSource<BFloat16>>{gated, PlainSource<BFloat16>(a.d_product)});
    }
  });
}

// Returns whether the product was made as well.
bool write_gradient(CudaDevice& device, const SwigluBackward& a) {
  const int64_t rows = a.d_product.dim[0], width = a.d_product.dim[1];
  const AnyGradientInputs any{AnyGated(a.up_gate, AnySource(a.silu)), AnySource(a.d_product)};
  const bool wide = any.fits_wide();
  const bool has_codes_kernel = wide && fits_tensor_tiles(a.d_up_gate, a.d_up_gate_t);
  const bool has_plain_kernel = wide && a.d_up_gate_t.empty() && a.d_up_gate.scaling == Scaling::kNone &&
                                is_aligned(a.d_up_gate.data.data, 16);
  const bool with_product = has_codes_kernel && !(a.product.empty() && a.product_t.empty()) &&
                            fits_tensor_tiles(a.product, a.product_t) && is_e4m3_or_empty(a.product) &&
                            is_e4m3_or_empty(a.product_t);
  float* amax = nullptr;
  if (is_tensor(a.d_up_gate) || is_tensor(a.d_up_gate_t)) amax = zero_amax(device, "swiglu_backward");
  with_gradient_inputs(a, has_codes_kernel || has_plain_kernel, [&](const auto& inputs) {
    using Inputs = std::decay_t<decltype(inputs)>;
    if (amax != nullptr) {
      find_amax(device, MadeSource(GradientMagnitudes<Inputs>{inputs}), rows, width, amax);
    }
    if (has_codes_kernel) {
      write_gradient_codes(device, inputs, a, with_product, amax);
    } else if (has_plain_kernel) {
      with_plain_type(a.d_up_gate.data.dtype, [&](auto y) {
        using Y = decltype(y);
        gradient_plain_kernel<Inputs, Y><<<tiles::grid_of(rows, width), tiles::kThreads, 0, device.stream()>>>(
            inputs, a.d_up_gate.data.as<Y>(), static_cast<int>(rows), static_cast<int>(width));
      });
    } else {
      write_tiles(device, MadeSource(GradientNumbers<AnyGradientInputs>{any}), rows, 2 * width, a.d_up_gate,
                  a.d_up_gate_t, amax);
    }
  });
  return with_product;
}

}  // namespace

void swiglu_forward_fp8(Device& device_, const SwigluForward& a) {
  CudaDevice& device = as_cuda(device_);
  const int64_t rows = a.product.num_rows(), width = a.product.num_cols();
  tiles::check_extents(rows, 2 * width);
  const bool fused = !a.up_gate_plain.empty() && fits_quantize_gate(a);
  if (!a.up_gate_plain.empty() && !fused) cuda::quantize(device_, {.x = a.up_gate_plain, .out = a.up_gate});
  float* amax = nullptr;
  if (is_tensor(a.product) || is_tensor(a.product_t)) amax = zero_amax(device, "swiglu_forward");
  if (fused) {
    quantize_gate(device, a, amax);
  } else if (!a.silu.empty()) {
    const AnyGated gated(a.up_gate, AnySource(ScaledView()));
    write_tiles(device, MadeSource(SiluNumbers<AnyGated>{gated}), rows, width, a.silu, {}, nullptr);
  }
  write_product(device, a.up_gate, a.silu, a.product, a.product_t, amax, fused);
  check_launch("swiglu_forward");
}

void swiglu_backward_fp8(Device& device_, const SwigluBackward& a) {
  CudaDevice& device = as_cuda(device_);
  tiles::check_extents(a.up_gate.num_rows(), a.up_gate.num_cols());
  const bool wants_gradient = !a.d_up_gate.empty() || !a.d_up_gate_t.empty();
  const bool has_product = wants_gradient && write_gradient(device, a);
  if (!has_product && !(a.product.empty() && a.product_t.empty())) {
    write_product(device, a.up_gate, a.silu, a.product, a.product_t, nullptr, false);
  }
  check_launch("swiglu_backward");
}

}  // namespace parka::cuda
