#include "kernels/cuda/swiglu/swiglu_fp8.h"

#include <algorithm>
#include <bit>
#include <type_traits>

#include "kernels/cuda/quantize/matrix_source.cuh"
#include "kernels/cuda/quantize/quantize_tiles.cuh"
#include "kernels/cuda/swiglu/gate_codes.cuh"
#include "kernels/cuda/swiglu/swiglu_elements.cuh"
#include "kernels/cuda/swiglu/swiglu_source.cuh"
#include "kernels/device/cuda/check.h"
#include "kernels/ops/quantize/quantize.h"

// Shapes: T rows (tokens), F columns of the product; up_gate has 2F, up before gate.
//
// All tensors are written from Sources (quantize_tiles.cuh). Tensors with one scale take two passes: one finds the
// maximum, the other recomputes the same numbers and writes codes. That is cheaper than keeping the numbers. Where
// the maximum is sampled the first pass reads a part, and the codes are written again if that was not enough.
namespace parka::cuda {
namespace {

// ---- Forward: quantizing up_gate and finding the product's maximum in one pass ----

template <typename Activation>
struct GateQuantization {
  PlainSource<BFloat16> up_gate;
  GateCodes<Activation> codes;
  float* amax;  // of the product; null: not wanted

  struct Fetched {
    PlainSource<BFloat16>::Fetched up, gate;
  };
  __device__ Fetched fetch(int row, int col) const {
    return {up_gate.fetch(row, col), up_gate.fetch(row, col + codes.width)};
  }
};

// A thread has up and gate of its part of a tile of [T, F].
template <typename F8, bool kSavesSilu, typename Activation>
__global__ void __launch_bounds__(tiles::kThreads, tiles::kFetchingBlocks)
    quantize_gate_kernel(const GateQuantization<Activation> q) {
  __shared__ uint32_t shared[tiles::kWarps];
  const tiles::Place place;
  float amax = 0.0f;
  tiles::for_each_row(q, q.codes.rows, q.codes.width,
                      [&](int k, const typename GateQuantization<Activation>::Fetched& fetched) {
                        const auto made = q.codes.template make<F8, kSavesSilu>(fetched.up, fetched.gate);
                        q.codes.store(made, place.row + k, place.col);
                        amax = fmaxf(amax, made.amax);
                      });
  if (q.amax != nullptr) raise_to_block_max<tiles::kThreads>(q.amax, amax, shared);
}

void quantize_gate(CudaDevice& device, const SwigluForward& a, float* amax) {
  const int64_t rows = a.product.num_rows(), width = a.product.num_cols();
  const bool saves_silu = !a.silu.empty();
  with_activation(a.activation, [&](auto activation) {
    with_float8_type(a.up_gate.data.dtype, [&](auto f8) {
      using F8 = decltype(f8);
      using A = decltype(activation);
      const auto kernel = saves_silu ? quantize_gate_kernel<F8, true, A> : quantize_gate_kernel<F8, false, A>;
      kernel<<<tiles::grid_of(rows, width), tiles::kThreads, 0, device.stream()>>>(
          {PlainSource<BFloat16>(a.up_gate_plain), GateCodes<A>(a, activation), amax});
    });
  });
}

// ---- Backward: d_up, d_gate and the product of a tile together ----

// The scale of d_up_gate where its maximum was found before: what a kernel makes codes with.
struct KnownScale : tiles::TensorScale {
  static constexpr bool kFindsAmax = false;
  __device__ bool is_needed() const { return true; }
};

// The same by SwigluBackward::samples_amax, in two kernels. The first takes the scale from the sample, and finds
// the maximum of all; the second one writes all codes again if that exceeds what the sample leaves room for.
template <bool kFirst>
struct SampledScale {
  static constexpr bool kFindsAmax = kFirst;
  float* scale;
  const float* sampled;
  float* amax;  // of all; 0 before the first kernel

  __device__ bool is_needed() const { return kFirst || __ldg(amax) > bound(); }
  template <typename F8>
  __device__ float inverse() const {
    return scale_for<F8, float>(maximum()).inverse;
  }
  template <typename F8>
  __device__ void write() const {
    if (tiles::is_first_thread()) *scale = scale_for<F8, float>(maximum()).scale;
  }

 private:
  __device__ float bound() const { return __fmul_rn(kAmaxRoom, __ldg(sampled)); }
  __device__ float maximum() const { return kFirst ? bound() : __ldg(amax); }
};

// d_up_gate with one scale, and the product, in the format of activations, with its given one.
template <typename Inputs, typename F8, bool kProduct, typename Scale>
__global__ void __launch_bounds__(tiles::kThreads, tiles::kFetchingBlocks)
    gradient_codes_kernel(const Inputs inputs, const tiles::CodeOutput d_up, const tiles::CodeOutput d_gate,
                          const Scale scale, const tiles::CodeOutput product,
                          const tiles::TensorScale product_scale) {
  alignas(tiles::kTileAlignment) __shared__ uint32_t shared[kProduct ? 3 : 2][tiles::kSharedWords];
  if (!scale.is_needed()) return;
  float amax = 0.0f;
  const float inverse = scale.template inverse<F8>();
  const float product_inverse = kProduct ? product_scale.inverse<Float8E4M3>() : 0.0f;
  const uint32_t part = tiles::part_address(shared[0]);
  tiles::for_each_row(inputs, d_up.rows, d_up.cols, [&](int k, const auto& fetched) {
    uint32_t up_codes[tiles::kWords], gate_codes[tiles::kWords];
    [[maybe_unused]] uint32_t product_codes[tiles::kWords];
#pragma unroll
    for (int quarter = 0; quarter < tiles::kWords; ++quarter) {
      GradientParts<4> g;
      inputs.read(fetched, quarter, g);
      if constexpr (Scale::kFindsAmax) {
#pragma unroll
        for (int i = 0; i < 4; ++i) amax = fmaxf(amax, g.magnitude(i));
      }
      up_codes[quarter] = tiles::encode<F8>({g.d_up(0), g.d_up(1), g.d_up(2), g.d_up(3)}, inverse);
      gate_codes[quarter] = tiles::encode<F8>({g.d_gate(0), g.d_gate(1), g.d_gate(2), g.d_gate(3)}, inverse);
      if constexpr (kProduct) {
        product_codes[quarter] =
            tiles::encode<Float8E4M3>({g.product(0), g.product(1), g.product(2), g.product(3)}, product_inverse);
      }
    }
    tiles::put_codes(up_codes, k, d_up, part);
    tiles::put_codes(gate_codes, k, d_gate, part + tiles::kTileBytes);
    if constexpr (kProduct) tiles::put_codes(product_codes, k, product, part + 2 * tiles::kTileBytes);
  });
  if constexpr (Scale::kFindsAmax) {
    const uint32_t of_warp = __reduce_max_sync(kFullWarp, __float_as_uint(amax));
    if (threadIdx.x % kWarpSize == 0) raise_to(scale.amax, __uint_as_float(of_warp));
  }
  __syncthreads();
  tiles::finish_codes(d_up, shared[0]);
  tiles::finish_codes(d_gate, shared[1]);
  if constexpr (kProduct) tiles::finish_codes(product, shared[2]);
  scale.template write<F8>();
}

// *amax = what SwigluBackward::samples_amax takes.
__global__ void take_sampled_amax_kernel(const float* sampled, float* amax) {
  *amax = fmaxf(*amax, __fmul_rn(kAmaxRoom, *sampled));
}

// Of a Source every kAmaxSampling-th row, from the first on. Templates, as no Source is read in both ways.
template <typename Source>
struct SampledRows : Source {
  explicit SampledRows(const Source& source) : Source(source) {}
  void load(int row, int col, float (&x)[16]) const = delete;  // the Source's reads other rows
  template <typename Index>
  __device__ auto fetch(Index row, int col) const {
    return Source::fetch(row * Index{kAmaxSampling}, col);
  }
  template <typename Index>
  __device__ float element(Index row, int col) const {
    return Source::element(row * Index{kAmaxSampling}, col);
  }
};
int64_t num_sampled(int64_t rows) { return ceil_div(rows, kAmaxSampling); }

template <typename Inputs, typename Y>
__global__ void __launch_bounds__(tiles::kThreads)
    gradient_plain_kernel(const Inputs inputs, Y* d_up_gate_T2F, int rows, int width) {
  const tiles::Place place;
  if (place.col >= width) return;
#pragma unroll
  for (int k = 0; k < tiles::kHeight; ++k) {
    if (place.row + k >= rows) return;
    const auto fetched = inputs.fetch(place.row + k, place.col);
    float d_up[16], d_gate[16];
#pragma unroll
    for (int quarter = 0; quarter < 4; ++quarter) {
      GradientParts<4> g;
      inputs.read(fetched, quarter, g);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        d_up[4 * quarter + i] = g.d_up(i);
        d_gate[4 * quarter + i] = g.d_gate(i);
      }
    }
    Y* const target = d_up_gate_T2F + int64_t{place.row + k} * 2 * width + place.col;
    store(target, d_up);
    store(target + width, d_gate);
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

// The maxima that an op's workspace holds, to be raised: 0 at first.
template <typename Args>
float* zero_amax(CudaDevice& device, std::string_view op, const Args& a) {
  auto* const amax = static_cast<float*>(device.workspace(op, workspace_of(a)));
  check(cudaMemsetAsync(amax, 0, static_cast<size_t>(workspace_of(a)), device.stream()), op);
  return amax;
}

// Of forward or backward. With `amax`, which `is_found` or 0, scales are made from it; with null they are inputs.
template <typename Args>
void write_product(CudaDevice& device, const Args& a, float* amax, bool is_found) {
  const int64_t rows = a.up_gate.num_rows(), width = a.up_gate.num_cols() / 2;
  const bool wide =
      AnyGated(a.up_gate, AnySource(a.silu), a.activation).fits_wide() && fits_tensor_tiles(a.product, a.product_t);
  with_gated(a.up_gate, a.silu, a.activation, wide, [&](const auto& gated) {
    using Gates = std::decay_t<decltype(gated)>;
    const MadeSource source(ProductNumbers<Gates>{gated});
    const bool wants_amax = amax != nullptr && !is_found;
    if constexpr (std::is_same_v<Gates, AnyGated>) {
      if (wants_amax) find_amax_of_elements(device, source, rows, width, amax);
      write_rare(device, source, rows, width, a.product, a.product_t, amax);
    } else {
      if (wants_amax) find_amax(device, source, rows, width, amax);
      tiles::write_tensor(device, source, rows, width, a.product, a.product_t, amax);
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

// The gradient as codes with one scale, and the product beside it if `with_product`. `amax`: to be raised, 0 at
// first; of two numbers with samples_amax.
template <typename Inputs>
void write_gradient_codes(CudaDevice& device, const Inputs& inputs, const SwigluBackward& a, bool with_product,
                          float* amax) {
  const int64_t rows = a.d_product.dim[0], width = a.d_product.dim[1];
  const ScaledView& any = a.d_up_gate.empty() ? a.d_up_gate_t : a.d_up_gate;
  const tiles::CodeOutput d_up = part_of(a.d_up_gate, a.d_up_gate_t, rows, 0, width);
  const tiles::CodeOutput d_gate = part_of(a.d_up_gate, a.d_up_gate_t, rows, width, width);
  const tiles::CodeOutput product = part_of(a.product, a.product_t, rows, 0, width);
  const ScaledView& any_product = a.product.empty() ? a.product_t : a.product;
  const tiles::TensorScale product_scale =
      with_product ? tiles::tensor_scale(any_product, nullptr) : tiles::TensorScale{};
  const auto launch = [&](auto f8, const auto& scale) {
    using F8 = decltype(f8);
    using Scale = std::decay_t<decltype(scale)>;
    const auto kernel = with_product ? gradient_codes_kernel<Inputs, F8, true, Scale>
                                     : gradient_codes_kernel<Inputs, F8, false, Scale>;
    kernel<<<tiles::grid_of(rows, width), tiles::kThreads, 0, device.stream()>>>(inputs, d_up, d_gate, scale,
                                                                                 product, product_scale);
  };
  const MadeSource magnitudes(GradientMagnitudes<Inputs>{inputs});
  if (a.samples_amax) {
    auto* const scale = any.scale.as<float>();
    float *const sampled = amax, *const amax_of_all = amax + 1;
    find_amax(device, SampledRows(magnitudes), num_sampled(rows), width, sampled);
    launch(Float8E5M2{}, SampledScale<true>{scale, sampled, amax_of_all});
    launch(Float8E5M2{}, SampledScale<false>{scale, sampled, amax_of_all});
    return;
  }
  find_amax(device, magnitudes, rows, width, amax);
  with_float8_type(any.data.dtype, [&](auto f8) { launch(f8, KnownScale{tiles::tensor_scale(any, amax)}); });
}

// Calls f with the GradientInputs of `a`; as with_gated().
template <typename F>
void with_gradient_inputs(const SwigluBackward& a, bool wide, const F& f) {
  const bool has_kernels = wide && a.d_product.dtype == DType::kBF16;
  with_gated(a.up_gate, a.silu, a.activation, has_kernels, [&](const auto& gated) {
    using Gates = std::decay_t<decltype(gated)>;
    if constexpr (std::is_same_v<Gates, AnyGated>) {
      f(AnyGradientInputs{gated, AnySource(a.d_product)});
    } else {
      f(GradientInputs<Gates, PlainSource<BFloat16>>{gated, PlainSource<BFloat16>(a.d_product)});
    }
  });
}

// *amax = the maximum that the scale is of, for formats without kernels of their own.
void find_amax_of_rare(CudaDevice& device, const AnyGradientInputs& inputs, const SwigluBackward& a, float* amax) {
  const int64_t rows = a.d_product.dim[0], width = a.d_product.dim[1];
  const MadeSource magnitudes(GradientMagnitudes<AnyGradientInputs>{inputs});
  find_amax_of_elements(device, magnitudes, rows, width, amax);
  if (!a.samples_amax) return;
  find_amax_of_elements(device, SampledRows(magnitudes), num_sampled(rows), width, amax + 1);
  take_sampled_amax_kernel<<<1, 1, 0, device.stream()>>>(amax + 1, amax);
}

// Returns whether the product was made as well.
bool write_gradient(CudaDevice& device, const SwigluBackward& a) {
  const int64_t rows = a.d_product.dim[0], width = a.d_product.dim[1];
  const AnyGradientInputs any{AnyGated(a.up_gate, AnySource(a.silu), a.activation), AnySource(a.d_product)};
  const bool wide = any.fits_wide();
  const bool has_codes_kernel = wide && fits_tensor_tiles(a.d_up_gate, a.d_up_gate_t);
  const bool has_plain_kernel = wide && a.d_up_gate_t.empty() && a.d_up_gate.scaling == Scaling::kNone &&
                                is_aligned(a.d_up_gate.data.data, 16);
  const bool with_product = has_codes_kernel && !(a.product.empty() && a.product_t.empty()) &&
                            fits_tensor_tiles(a.product, a.product_t) && is_e4m3_or_empty(a.product) &&
                            is_e4m3_or_empty(a.product_t);
  float* amax = nullptr;
  if (is_tensor(a.d_up_gate) || is_tensor(a.d_up_gate_t)) amax = zero_amax(device, "swiglu_backward", a);
  bool made_product = false;
  with_gradient_inputs(a, has_codes_kernel || has_plain_kernel, [&](const auto& inputs) {
    using Inputs = std::decay_t<decltype(inputs)>;
    if constexpr (std::is_same_v<Inputs, AnyGradientInputs>) {
      if (amax != nullptr) find_amax_of_rare(device, inputs, a, amax);
      write_rare(device, MadeSource(GradientNumbers<Inputs>{inputs}), rows, 2 * width, a.d_up_gate, a.d_up_gate_t,
                 amax);
    } else {
      if (has_codes_kernel) {
        write_gradient_codes(device, inputs, a, with_product, amax);
        made_product = with_product;
        return;
      }
      with_plain_type(a.d_up_gate.data.dtype, [&](auto y) {
        using Y = decltype(y);
        gradient_plain_kernel<Inputs, Y><<<tiles::grid_of(rows, width), tiles::kThreads, 0, device.stream()>>>(
            inputs, a.d_up_gate.data.as<Y>(), static_cast<int>(rows), static_cast<int>(width));
      });
    }
  });
  return made_product;
}

}  // namespace

void swiglu_forward_with(CudaDevice& device, const SwigluForward& a, std::string_view op,
                         const std::function<void(float* amax)>& quantize) {
  float* amax = nullptr;
  if (is_tensor(a.product) || is_tensor(a.product_t)) amax = zero_amax(device, op, a);
  quantize(amax);
  write_product(device, a, amax, true);
  check_launch(op);
}

void swiglu_forward_fp8(Device& device_, const SwigluForward& a) {
  CudaDevice& device = as_cuda(device_);
  const int64_t rows = a.product.num_rows(), width = a.product.num_cols();
  tiles::check_extents(rows, 2 * width);
  if (!a.up_gate_plain.empty() && fits_gate_codes(a)) {
    swiglu_forward_with(device, a, "swiglu_forward", [&](float* amax) { quantize_gate(device, a, amax); });
    return;
  }
  if (!a.up_gate_plain.empty()) cuda::quantize(device_, {.x = a.up_gate_plain, .out = a.up_gate});
  float* amax = nullptr;
  if (is_tensor(a.product) || is_tensor(a.product_t)) amax = zero_amax(device, "swiglu_forward", a);
  if (!a.silu.empty()) {
    const AnyGated gated(a.up_gate, AnySource(ScaledView()), a.activation);
    tiles::write_pieces(device, MadeSource(SiluNumbers<AnyGated>{gated}), rows, width, a.silu, /*transposed=*/false,
                        /*amax=*/nullptr);
  }
  write_product(device, a, amax, false);
  check_launch("swiglu_forward");
}

void swiglu_backward_fp8(Device& device_, const SwigluBackward& a) {
  CudaDevice& device = as_cuda(device_);
  tiles::check_extents(a.up_gate.num_rows(), a.up_gate.num_cols());
  const bool wants_gradient = !a.d_up_gate.empty() || !a.d_up_gate_t.empty();
  const bool has_product = wants_gradient && write_gradient(device, a);
  if (!has_product && !(a.product.empty() && a.product_t.empty())) {
    write_product(device, a, nullptr, false);
  }
  check_launch("swiglu_backward");
}

}  // namespace parka::cuda
