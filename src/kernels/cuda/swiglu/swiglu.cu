#include "kernels/ops/swiglu/swiglu.h"

#include <algorithm>
#include <type_traits>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/quantize/quantize_tiles.cuh"
#include "kernels/cuda/swiglu/gate_codes.cuh"
#include "kernels/cuda/swiglu/swiglu_elements.cuh"
#include "kernels/cuda/swiglu/swiglu_loader.cuh"
#include "kernels/ops/quantize/quantize.h"

// SwiGLU:   product = up * silu(gate)        d_up   = d_product * silu(gate)
//                                            d_gate = d_product * up * silu'(gate)
//                                            d_factor[t] = sum over a row of d_product * up * silu(gate)
// (and act for silu where a model has another activation; swiglu_elements.cuh has the functions of one element).
//
//   T, F        rows (tokens), columns of the product; up_gate is [T, 2F], up before gate
//   piece       of a row: what a thread block of the plain kernels has; each thread has packs of 16 bytes
//   tile        128 x 128 of [T, F]: what a thread block of the FP8 kernels has (quantize/code_tiles.cuh); a thread
//               has 16 columns of four rows, fetches those of a row at once, and decodes a quarter of them at a
//               time
//   factor      of a row, which multiplies product and gradients: the weight of an expert
//
// Three roads: plain formats, one pass; FP8 as training has it; and swiglu_generic.cu. FP8 reads up_gate in bf16 or
// as E4M3 codes with bf16 scales of groups, and writes codes with one scale for the tensor: a pass finds the
// maximum, and one writes. The first is left out where the scale is given, and quantize_gate() finds the product's
// on its way.
namespace parka::cuda {
namespace {

// ---- Plain ----

constexpr int kThreads = 256;
constexpr int kForwardPacks = 2;  // per thread
template <typename T>
constexpr int kPack = 16 / sizeof(T);

// Where this thread's part of a piece begins; a row has `pieces`.
struct Piece {
  int64_t row;
  int pack;  // of this thread, the first

  __device__ Piece(int pieces, int packs_per_piece)
      : row(blockIdx.x / static_cast<unsigned>(pieces)),
        pack(static_cast<int>(blockIdx.x % static_cast<unsigned>(pieces)) * packs_per_piece + threadIdx.x) {}
};

template <int kCount>
__device__ void scale_all(float factor, float (&x)[kCount]) {
  for_each<kCount>([&](int i) { x[i] = scaled_by(factor, x[i]); });
}

template <typename T, typename Activation, bool kFactored>
__global__ void __launch_bounds__(kThreads)
    swiglu_forward_kernel(const T* up_gate_T2F, T* product_TF, Activation activation, int width, int pieces,
                          const float* row_factor) {
  constexpr int kWidth = kPack<T>;
  const Piece piece(pieces, kThreads * kForwardPacks);
  const T* const up_F = up_gate_T2F + piece.row * 2 * width;
  const T* const gate_F = up_F + width;
  Stored<T, kWidth> up[kForwardPacks], gate[kForwardPacks];
#pragma unroll
  for (int n = 0; n < kForwardPacks; ++n) {
    const int64_t column = int64_t{piece.pack + n * kThreads} * kWidth;
    up[n] = load_stored<kWidth>(up_F + column, column < width);
    gate[n] = load_stored<kWidth>(gate_F + column, column < width);
  }
#pragma unroll
  for (int n = 0; n < kForwardPacks; ++n) {
    const int64_t column = int64_t{piece.pack + n * kThreads} * kWidth;
    if (column >= width) return;
    float gates[kWidth], activated[kWidth], slope[kWidth], product[kWidth];
    for_each<kWidth>([&](int i) { gates[i] = gate[n][i]; });
    activate(activation, /*coded=*/false, /*saved=*/false, gates, activated, slope);
    for_each<kWidth>([&](int i) { product[i] = product_of(up[n][i], activated[i]); });
    if constexpr (kFactored) scale_all(row_factor[piece.row], product);
    store(product_TF + piece.row * width + column, product);
  }
}

template <typename T, typename Activation>
struct BackwardTensors {
  const T* up_gate_T2F;
  const T* d_product_TF;
  T* d_up_gate_T2F;
  T* product_TF;  // null: not wanted
  Activation activation;
};

template <typename T, typename Activation, bool kFactored>
__global__ void __launch_bounds__(kThreads)
    swiglu_backward_kernel(const BackwardTensors<T, Activation> a, int width, int pieces, const float* row_factor) {
  constexpr int kWidth = kPack<T>;
  const Piece piece(pieces, kThreads);
  const int64_t column = int64_t{piece.pack} * kWidth;
  if (column >= width) return;
  const int64_t up_at = piece.row * 2 * width + column, gate_at = up_at + width;
  const int64_t product_at = piece.row * width + column;
  const auto up = load_stored<kWidth>(a.up_gate_T2F + up_at);
  const auto gate = load_stored<kWidth>(a.up_gate_T2F + gate_at);
  const auto d_product = load_stored<kWidth>(a.d_product_TF + product_at);
  float gates[kWidth], activated[kWidth], slope[kWidth], d_up[kWidth], d_gate[kWidth], product[kWidth];
  for_each<kWidth>([&](int i) { gates[i] = gate[i]; });
  activate(a.activation, /*coded=*/false, /*saved=*/false, gates, activated, slope);
  for_each<kWidth>([&](int i) {
    d_up[i] = up_gradient(d_product[i], activated[i]);
    d_gate[i] = gate_gradient(d_product[i], up[i], slope[i]);
    product[i] = product_of(up[i], activated[i]);
  });
  if constexpr (kFactored) {
    const float factor = row_factor[piece.row];
    scale_all(factor, d_up);
    scale_all(factor, d_gate);
    scale_all(factor, product);
  }
  store(a.d_up_gate_T2F + up_at, d_up);
  store(a.d_up_gate_T2F + gate_at, d_gate);
  if (a.product_TF != nullptr) store(a.product_TF + product_at, product);
}

// True if the kernels above take these tensors, of which some may be empty.
bool fits_plain(int64_t width, std::initializer_list<ScaledView> tensors) {
  const DType dtype = tensors.begin()->data.dtype;
  return std::all_of(tensors.begin(), tensors.end(), [&](const ScaledView& t) {
    return t.empty() || (t.scaling == Scaling::kNone && t.data.dtype == dtype && is_aligned(t.data.data, 16) &&
                         width % (16 / size_of(dtype)) == 0);
  });
}

template <typename Args>
void run_plain(CudaDevice& device, const Args& a) {
  PARKA_REQUIRE(a.up_gate.num_cols() <= INT32_MAX);
  const int64_t rows = a.up_gate.num_rows(), width = a.up_gate.num_cols() / 2;
  constexpr bool kIsForward = std::is_same_v<Args, SwigluForward>;
  with_plain_type(a.up_gate.data.dtype, [&](auto type) {
    using T = decltype(type);
    const int64_t pieces = ceil_div(width, int64_t{kThreads} * (kIsForward ? kForwardPacks : 1) * kPack<T>);
    const Grid grid(rows * pieces, kThreads);
    with_activation_and_factor(a, [&](auto activation, auto factor) {
      using A = decltype(activation);
      constexpr bool kFactored = std::is_same_v<decltype(factor), RowFactor>;
      if constexpr (kIsForward) {
        launch(device, "swiglu_forward", swiglu_forward_kernel<T, A, kFactored>, grid,
               a.up_gate.data.template as<T>(), a.product.data.template as<T>(), activation,
               static_cast<int>(width), static_cast<int>(pieces), optional<float>(a.row_factor));
      } else {
        const BackwardTensors<T, A> tensors{a.up_gate.data.template as<T>(), a.d_product.template as<T>(),
                                            a.d_up_gate.data.template as<T>(), optional<T>(a.product.data),
                                            activation};
        launch(device, "swiglu_backward", swiglu_backward_kernel<T, A, kFactored>, grid, tensors,
               static_cast<int>(width), static_cast<int>(pieces), optional<float>(a.row_factor));
      }
    });
  });
}

// ---- FP8 ----
//
// A tensor with one scale takes two passes: one finds the maximum, the other recomputes the same numbers and writes
// codes, which is cheaper than keeping the numbers. Where the maximum is sampled the first pass reads a part, and
// the codes are written again if that was not enough.

// The maxima that an op's workspace holds, to be raised: 0 at first.
template <typename Args>
float* zero_amax(CudaDevice& device, std::string_view op, const Args& a) {
  auto* const amax = static_cast<float*>(device.workspace(op, workspace_of(a)));
  check(cudaMemsetAsync(amax, 0, static_cast<size_t>(workspace_of(a)), device.stream()), op);
  return amax;
}

bool is_tensor(const ScaledView& t) { return !t.empty() && t.scaling == Scaling::kTensor; }

// True if tiles::write_tensor can write both: one dtype, one scale for the tensor.
bool fits_tensor_tiles(const ScaledView& t, const ScaledView& t_transposed) {
  return (t.empty() || is_tensor(t)) && (t_transposed.empty() || is_tensor(t_transposed)) &&
         is_aligned(t.data.data, 16) &&
         (t.empty() || t_transposed.empty() || t.data.dtype == t_transposed.data.dtype);
}

// ---- FP8 forward: quantizing up_gate and finding the product's maximum in one pass ----

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

// A thread has up and gate of its part of a tile of [T, F]. Threads past the last column have its numbers again,
// and so groups of their own, whose scales are not those of the numbers: their products do not count.
template <typename F8, bool kSavesSilu, typename Activation, bool kFactored>
__global__ void __launch_bounds__(tiles::kThreads, tiles::kFetchingBlocks)
    quantize_gate_kernel(const GateQuantization<Activation> q, const float* row_factor) {
  __shared__ uint32_t shared[tiles::kWarps];
  const tiles::Place place;
  const bool counts = place.col < q.codes.width;
  float amax = 0.0f;
  tiles::for_each_row(q, q.codes.rows, q.codes.width,
                      [&](int k, const typename GateQuantization<Activation>::Fetched& fetched) {
                        const auto made = q.codes.template make<F8, kSavesSilu>(fetched.up, fetched.gate);
                        q.codes.store(made, place.row + k, place.col);
                        if constexpr (kFactored) {
                          const float factor = row_factor[min(place.row + k, q.codes.rows - 1)];
                          amax = fmaxf(amax, counts ? fabsf(scaled_by(factor, made.amax)) : 0.0f);
                        } else {
                          amax = fmaxf(amax, counts ? made.amax : 0.0f);
                        }
                      });
  if (q.amax != nullptr) raise_to_block_max<tiles::kThreads>(q.amax, amax, shared);
}

void quantize_gate(CudaDevice& device, const SwigluForward& a, float* amax) {
  with_float8_type(a.up_gate.data.dtype, [&](auto f8) {
    with_activation_and_factor(a, [&](auto activation, auto factor) {
      using F8 = decltype(f8);
      using A = decltype(activation);
      constexpr bool kFactored = std::is_same_v<decltype(factor), RowFactor>;
      const GateQuantization<A> q{PlainSource<BFloat16>(a.up_gate_plain), GateCodes<A>(a, activation), amax};
      launch(device, "swiglu_forward",
             a.silu.empty() ? quantize_gate_kernel<F8, false, A, kFactored>
                            : quantize_gate_kernel<F8, true, A, kFactored>,
             {tiles::grid_of(a.product.num_rows(), a.product.num_cols()), tiles::kThreads}, q,
             optional<float>(a.row_factor));
    });
  });
}

// Writes the product of forward or backward. `amax` null: its scale is given. Otherwise that is made from *amax,
// which is there if `is_found`, and 0 and found here if not.
template <typename Args>
void write_product(CudaDevice& device, const Args& a, float* amax, bool is_found) {
  const int64_t rows = a.up_gate.num_rows(), width = a.up_gate.num_cols() / 2;
  const bool finds = amax != nullptr && !is_found;
  const auto write = [&](const auto& loader) {
    if (finds) tiles::find_amax(device, product_source(loader), rows, width, amax);
    tiles::write_tensor(device, product_source(loader), rows, width, a.product, a.product_t, amax);
  };
  if (fits_tensor_tiles(a.product, a.product_t) && with_loader(a, NoGradient{}, write)) return;
  // The input of a product that was left in bf16.
  const bool is_plain = a.product.scaling == Scaling::kNone && a.product.data.dtype == DType::kBF16 &&
                        is_aligned(a.product.data.data, 16) && a.product_t.empty();
  const auto write_plain = [&](const auto& loader) {
    tiles::write_plain(device, product_source(loader), rows, width, a.product.data);
  };
  if (is_plain && with_loader(a, NoGradient{}, write_plain)) return;
  write_any_product(device, a, amax, finds);
}

// ---- FP8 backward: d_up, d_gate and the product of a tile together ----

// The scale of d_up_gate where its maximum was found before.
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

// d_up_gate with one scale, and the product in E4M3 with that of forward.
template <typename Loader, typename F8, bool kProduct, typename Scale>
__global__ void __launch_bounds__(tiles::kThreads, tiles::kFetchingBlocks)
    gradient_codes_kernel(const Loader loader, const tiles::CodeOutput d_up, const tiles::CodeOutput d_gate,
                          const Scale scale, const tiles::CodeOutput product,
                          const tiles::TensorScale product_scale) {
  alignas(tiles::kTileAlignment) __shared__ uint32_t shared[kProduct ? 3 : 2][tiles::kSharedWords];
  if (!scale.is_needed()) return;
  float amax = 0.0f;
  const float inverse = scale.template inverse<F8>();
  const float product_inverse = kProduct ? product_scale.inverse<Float8E4M3>() : 0.0f;
  const uint32_t part = tiles::part_address(shared[0]);
  tiles::for_each_row(loader, d_up.rows, d_up.cols, [&](int k, const auto& fetched) {
    uint32_t up_codes[tiles::kWords], gate_codes[tiles::kWords];
    [[maybe_unused]] uint32_t product_codes[tiles::kWords];
    for_each<tiles::kWords>([&](int quarter) {
      typename Loader::Numbers x;
      loader.read(fetched, quarter, x);
      if constexpr (Scale::kFindsAmax) for_each<4>([&](int i) { amax = fmaxf(amax, x.magnitude(i)); });
      up_codes[quarter] = tiles::encode<F8>({x.d_up(0), x.d_up(1), x.d_up(2), x.d_up(3)}, inverse);
      gate_codes[quarter] = tiles::encode<F8>({x.d_gate(0), x.d_gate(1), x.d_gate(2), x.d_gate(3)}, inverse);
      if constexpr (kProduct) {
        product_codes[quarter] =
            tiles::encode<Float8E4M3>({x.product(0), x.product(1), x.product(2), x.product(3)}, product_inverse);
      }
    });
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
template <typename Loader>
void write_gradient_codes(CudaDevice& device, const Loader& loader, const SwigluBackward& a, bool with_product,
                          float* amax) {
  const int64_t rows = a.d_product.dim[0], width = a.d_product.dim[1];
  const ScaledView& any = a.d_up_gate.empty() ? a.d_up_gate_t : a.d_up_gate;
  const tiles::CodeOutput d_up = part_of(a.d_up_gate, a.d_up_gate_t, rows, 0, width);
  const tiles::CodeOutput d_gate = part_of(a.d_up_gate, a.d_up_gate_t, rows, width, width);
  const tiles::CodeOutput product = part_of(a.product, a.product_t, rows, 0, width);
  const tiles::TensorScale product_scale =
      with_product ? tiles::tensor_scale(a.product.empty() ? a.product_t : a.product, nullptr)
                   : tiles::TensorScale{};
  const auto write = [&](auto f8, const auto& scale) {
    using F8 = decltype(f8);
    using Scale = std::decay_t<decltype(scale)>;
    launch(device, "swiglu_backward",
           with_product ? gradient_codes_kernel<Loader, F8, true, Scale>
                        : gradient_codes_kernel<Loader, F8, false, Scale>,
           {tiles::grid_of(rows, width), tiles::kThreads}, loader, d_up, d_gate, scale, product, product_scale);
  };
  if (a.samples_amax) {
    auto* const scale = any.scale.as<float>();
    float *const sampled = amax, *const amax_of_all = amax + 1;
    tiles::find_amax(device, magnitude_source<kAmaxSampling>(loader), ceil_div(rows, kAmaxSampling), width,
                     sampled);
    write(Float8E5M2{}, SampledScale<true>{scale, sampled, amax_of_all});
    write(Float8E5M2{}, SampledScale<false>{scale, sampled, amax_of_all});
    return;
  }
  tiles::find_amax(device, magnitude_source<1>(loader), rows, width, amax);
  with_float8_type(any.data.dtype, [&](auto f8) { write(f8, KnownScale{tiles::tensor_scale(any, amax)}); });
}

// Returns whether the product was made as well.
bool write_gradient(CudaDevice& device, const SwigluBackward& a) {
  const auto is_e4m3_or_empty = [](const ScaledView& t) { return t.empty() || t.data.dtype == DType::kE4M3; };
  const bool has_kernel = fits_tensor_tiles(a.d_up_gate, a.d_up_gate_t) && a.d_product.dtype == DType::kBF16 &&
                          is_aligned(a.d_product.data, 16);
  const bool with_product = !(a.product.empty() && a.product_t.empty()) &&
                            fits_tensor_tiles(a.product, a.product_t) && is_e4m3_or_empty(a.product) &&
                            is_e4m3_or_empty(a.product_t);
  const bool wants_amax = is_tensor(a.d_up_gate) || is_tensor(a.d_up_gate_t);
  float* const amax = wants_amax ? zero_amax(device, "swiglu_backward", a) : nullptr;
  const auto write = [&](const auto& loader) { write_gradient_codes(device, loader, a, with_product, amax); };
  if (has_kernel && with_loader(a, PlainSource<BFloat16>(a.d_product), write)) return with_product;
  write_any_gradient(device, a, amax);
  return false;
}

// ---- The gradient of the factors of rows ----

// A warp has a row: a lane 16 columns of every 512.
template <typename Loader>
__global__ void __launch_bounds__(kThreads)
    row_gradient_kernel(const Loader loader, int rows, int width, float* out) {
  constexpr int kRows = kThreads / kWarpSize, kWidth = kSourceWidth;
  const int row = static_cast<int>(blockIdx.x) * kRows + static_cast<int>(threadIdx.x) / kWarpSize;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  if (row >= rows) return;
  float sum = 0.0f;
#pragma unroll 2
  for (int col = lane * kWidth; col < width; col += kWarpSize * kWidth) {
    const auto fetched = loader.fetch(row, col);
    for_each<kWidth / 4>([&](int quarter) {
      typename Loader::Numbers x;
      loader.read(fetched, quarter, x);
      for_each<4>([&](int i) { sum = fmaf(x.d_product[i], x.product(i), sum); });
    });
  }
  sum = warp_sum(sum);
  if (lane == 0) out[row] = sum;
}

}  // namespace

float* zero_product_amax(CudaDevice& device, std::string_view op, const SwigluForward& a) {
  return is_tensor(a.product) || is_tensor(a.product_t) ? zero_amax(device, op, a) : nullptr;
}

void write_product_of_codes(CudaDevice& device, const SwigluForward& a, float* amax) {
  write_product(device, a, amax, /*is_found=*/true);
}

void swiglu_forward(Device& any_device, const SwigluForward& a) {
  CudaDevice& device = as_cuda(any_device);
  const int64_t rows = a.product.num_rows(), width = a.product.num_cols();
  if (a.silu.empty() && a.product_t.empty() && fits_factor(a) && fits_plain(width, {a.up_gate, a.product})) {
    run_plain(device, a);
    return;
  }
  tiles::check_extents(rows, 2 * width);
  float* const amax = zero_product_amax(device, "swiglu_forward", a);
  if (!a.up_gate_plain.empty() && fits_gate_codes(a) && fits_factor(a)) {
    quantize_gate(device, a, amax);
    write_product_of_codes(device, a, amax);
    return;
  }
  if (!a.up_gate_plain.empty()) cuda::quantize(device, {.x = a.up_gate_plain, .out = a.up_gate});
  if (!a.silu.empty()) write_any_silu(device, a);
  write_product(device, a, amax, /*is_found=*/false);
}

void swiglu_backward(Device& any_device, const SwigluBackward& a) {
  CudaDevice& device = as_cuda(any_device);
  const bool wants_gradient = !a.d_up_gate.empty() || !a.d_up_gate_t.empty();
  if (!a.d_up_gate.empty() && a.d_up_gate_t.empty() && a.product_t.empty() && a.silu.empty() && fits_factor(a) &&
      fits_plain(a.d_product.dim[1], {a.up_gate, a.d_product, a.d_up_gate, a.product})) {
    run_plain(device, a);
    return;
  }
  if (!wants_gradient && a.product_t.empty() && a.silu.empty() && fits_factor(a) &&
      fits_plain(a.product.num_cols(), {a.up_gate, a.product})) {
    run_plain(
        device,
        SwigluForward{
            .up_gate = a.up_gate, .product = a.product, .activation = a.activation, .row_factor = a.row_factor});
    return;
  }
  tiles::check_extents(a.up_gate.num_rows(), a.up_gate.num_cols());
  const bool has_product = wants_gradient && write_gradient(device, a);
  if (!has_product && !(a.product.empty() && a.product_t.empty())) {
    write_product(device, a, nullptr, /*is_found=*/false);
  }
}

void swiglu_row_gradient(Device& any_device, const SwigluRowGradient& a) {
  CudaDevice& device = as_cuda(any_device);
  const int64_t rows = a.d_product.dim[0], width = a.d_product.dim[1];
  tiles::check_extents(rows, 2 * width);
  const SwigluBackward inputs{
      .up_gate = a.up_gate, .silu = a.silu, .d_product = a.d_product, .activation = a.activation};
  auto* const out = a.d_row_factor.as<float>();
  const auto run = [&](const auto& loader) {
    using L = std::decay_t<decltype(loader)>;
    if constexpr (!L::kFactored) {  // always: no factors are given
      launch(device, "swiglu_row_gradient", row_gradient_kernel<L>,
             {ceil_div(rows, kThreads / kWarpSize), kThreads}, loader, static_cast<int>(rows),
             static_cast<int>(width), out);
    }
  };
  const bool wide = a.d_product.dtype == DType::kBF16 && is_aligned(a.d_product.data, 16);
  if (wide && with_loader(inputs, PlainSource<BFloat16>(a.d_product), run)) return;
  any_row_gradient(device, inputs, out);
}

}  // namespace parka::cuda
