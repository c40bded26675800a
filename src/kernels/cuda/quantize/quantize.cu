#include "kernels/ops/quantize/quantize.h"

#include <bit>

#include "kernels/cuda/map.cuh"
#include "kernels/cuda/quantize/matrix_source.cuh"
#include "kernels/cuda/quantize/quantize_tiles.cuh"

// Shapes: R rows and C columns of x.
namespace parka::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kPacks = 4;  // per thread

struct Same {
  __device__ float operator()(const float (&x)[1]) const { return x[0]; }
};

// Codes whose scales lie in the order of the elements: every 2^scale_shift of them have one.
template <typename F8, typename S, typename Y, int kWidth>
__global__ void __launch_bounds__(kThreads)
    decode_kernel(const uint8_t* codes, const S* scales, int scale_shift, Y* y, int64_t count) {
  static_assert(kWidth % 4 == 0);
  const int64_t first = (int64_t{blockIdx.x} * kThreads * kPacks + threadIdx.x) * kWidth;
  Stored<uint8_t, kWidth> packs[kPacks];
  S scale[kPacks];
#pragma unroll
  for (int n = 0; n < kPacks; ++n) {
    const int64_t at = first + n * kThreads * kWidth;
    packs[n] = load_stored<kWidth>(codes + at, at < count);
    scale[n] = scales[at < count ? at >> scale_shift : 0];
  }
#pragma unroll
  for (int n = 0; n < kPacks; ++n) {
    const int64_t at = first + n * kThreads * kWidth;
    if (at >= count) return;
    float values[kWidth];
#pragma unroll
    for (int w = 0; w < kWidth / 4; ++w) {
      float numbers[4];
      decode_float8x4<F8>(packs[n].word[w], numbers);
#pragma unroll
      for (int i = 0; i < 4; ++i) values[4 * w + i] = __fmul_rn(numbers[i], to_float(scale[n]));
    }
    store(y + at, values);
  }
}

// True if decode_kernel can decode x to y.
bool is_stream(const ScaledView& x, const TensorView& y) {
  if (x.scaling != Scaling::kTensor && x.scaling != Scaling::kGroup) return false;
  const bool whole = x.scaling == Scaling::kTensor;
  const auto group = static_cast<uint64_t>(x.group);
  const bool in_order = whole || (std::has_single_bit(group) && group >= 8 && x.num_cols() % x.group == 0);
  return in_order && y.numel() % 8 == 0 && is_aligned(x.data.data, 16) && is_aligned(y.data, 16);
}

void decode_stream(const CudaDevice& device, const ScaledView& x, const TensorView& y) {
  const int shift = x.scaling == Scaling::kTensor ? 63 : std::countr_zero(static_cast<uint64_t>(x.group));
  with_float8_type(x.data.dtype, [&](auto f8) {
    with_plain_type(x.scale.dtype, [&](auto s) {
      with_plain_type(y.dtype, [&](auto out) {
        using S = decltype(s);
        using Y = decltype(out);
        constexpr int kWidth = 16 / sizeof(Y);
        launch(device, "quantize", decode_kernel<decltype(f8), S, Y, kWidth>,
               {ceil_div(y.numel(), int64_t{kThreads} * kPacks * kWidth), kThreads},
               static_cast<const uint8_t*>(x.data.data), x.scale.as<S>(), shift, y.as<Y>(), y.numel());
      });
    });
  });
}

// Codes of matrices below each other, each transposed as it is. kWide: rows of `codes_RC` are loaded 16 bytes at a
// time.
template <bool kWide>
__global__ void __launch_bounds__(tiles::kThreads)
    move_codes_kernel(const uint8_t* codes_RC, const tiles::CodeOutput all) {
  alignas(tiles::kTileAlignment) __shared__ uint32_t shared[tiles::kSharedWords];
  wait_for_kernel_before();
  const tiles::Place place;
  const tiles::CodeOutput out = all.of_matrix(blockIdx.z);
  codes_RC += blockIdx.z * int64_t{out.rows} * out.cols;
  tiles::Codes codes;
#pragma unroll
  for (int k = 0; k < tiles::kHeight; ++k) {
    const uint8_t* const row = codes_RC + int64_t{min(place.row + k, out.rows - 1)} * out.cols;
    if constexpr (kWide) {
      const auto words = load_stored<tiles::kWidth>(row + min(place.col, out.cols - tiles::kWidth));
#pragma unroll
      for (int w = 0; w < tiles::kWords; ++w) codes[k][w] = words.word[w];
    } else {
#pragma unroll
      for (int w = 0; w < tiles::kWords; ++w) {
        codes[k][w] = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) codes[k][w] |= uint32_t{row[min(place.col + 4 * w + i, out.cols - 1)]} << 8 * i;
      }
    }
  }
  tiles::write_codes(codes, out, shared);
}

void move_codes(const CudaDevice& device, const TensorView& x, const ScaledView& out_t, int64_t matrices = 1) {
  const int64_t rows = x.dim[0] / matrices, cols = x.dim[1];
  tiles::check_extents(rows, cols);
  const bool wide = cols % tiles::kWidth == 0 && is_aligned(x.data, 16);
  launch_early(device, "quantize", wide ? move_codes_kernel<true> : move_codes_kernel<false>,
               {tiles::grid_of(rows, cols, matrices), tiles::kThreads}, static_cast<const uint8_t*>(x.data),
               tiles::code_output({}, out_t, rows, cols));
}

// Codes that keep their scale are moved: decoding and encoding them again could only lose.
bool keeps_codes(const ScaledView& x, const ScaledView& out) {
  return !out.empty() && x.scaling == Scaling::kTensor && out.scaling == Scaling::kTensor &&
         x.data.dtype == out.data.dtype && x.scale.data == out.scale.data;
}

bool is_plain(const ScaledView& t) { return !t.empty() && t.scaling == Scaling::kNone; }

// Moves elements without arithmetic over more than one of them. Takes what it has done from `out` and `out_t`.
void quantize_directly(const CudaDevice& device, const ScaledView& x, ScaledView& out, ScaledView& out_t) {
  if (keeps_codes(x, out)) {
    check(cudaMemcpyAsync(out.data.data, x.data.data, static_cast<size_t>(out.data.bytes()),
                          cudaMemcpyDeviceToDevice, device.stream()),
          "quantize");
    out = {};
  }
  if (keeps_codes(x, out_t)) {
    move_codes(device, x.data, out_t);
    out_t = {};
  }
  if (is_plain(out) && is_stream(x, out.data)) {
    decode_stream(device, x, out.data);
    out = {};
  }
  if (!is_plain(x) || !is_plain(out)) return;
  with_plain_type(x.data.dtype, [&](auto from) {
    with_plain_type(out.data.dtype, [&](auto to) {
      map_elements(device, "quantize", Same(), {x.data.as<decltype(from)>()}, out.data.as<decltype(to)>(),
                   x.data.numel());
    });
  });
  out = {};
}

constexpr int64_t kChunk = 1 << 15;  // elements of a block

// A block has a chunk of a part; x[0] is element `first` of part 0.
template <typename X>
__global__ void __launch_bounds__(kThreads)
    amax_kernel(const X* x, int64_t count, int64_t part, int64_t first, float* result) {
  constexpr int kWidth = 16 / sizeof(X);
  __shared__ uint32_t shared[kThreads / kWarpSize];
  const int64_t in_part = int64_t{blockIdx.x} * kChunk, of_part = blockIdx.y * part - first;
  const int64_t begin = max(of_part + in_part, int64_t{0});
  const int64_t end = min(of_part + min(in_part + kChunk, part), count);
  if (begin >= end) return;
  float largest = 0.0f;
  const bool is_wide = reinterpret_cast<uintptr_t>(x + begin) % 16 == 0;
  const int64_t wide_end = is_wide ? begin + (end - begin) / kWidth * kWidth : begin;
#pragma unroll 4
  for (int64_t at = begin + int64_t{threadIdx.x} * kWidth; at < wide_end; at += int64_t{kThreads} * kWidth) {
    const Stored<X, kWidth> numbers = load_constant<kWidth>(x + at);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) largest = max_magnitude(largest, numbers[i]);
  }
  for (int64_t at = wide_end + threadIdx.x; at < end; at += kThreads) {
    largest = max_magnitude(largest, to_float(x[at]));
  }
  raise_to_block_max<kThreads>(result + blockIdx.y, largest, shared);
}

template <typename F8>
__global__ void __launch_bounds__(kThreads) tensor_scales_kernel(const float* amax_N, float* scales_N, int N) {
  const int i = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
  if (i < N) scales_N[i] = scale_for<F8, float>(amax_N[i]).scale;
}

}  // namespace

void quantize(Device& device_, const Quantize& a) {
  CudaDevice& device = as_cuda(device_);
  ScaledView out = a.out, out_t = a.out_t;  // what is left to do
  quantize_directly(device, a.x, out, out_t);
  const int64_t rows = a.x.num_rows(), cols = a.x.num_cols();
  const bool has_tensor_scale =
      (!out.empty() && out.scaling == Scaling::kTensor) || (!out_t.empty() && out_t.scaling == Scaling::kTensor);
  if (out.empty() && out_t.empty()) return;
  with_source(a.x, [&](const auto& source) {
    const float* amax = optional<float>(a.amax);
    if (has_tensor_scale && !a.scale_given && amax == nullptr) {
      auto* const found = static_cast<float*>(device.workspace("quantize", workspace_of(a)));
      check(cudaMemsetAsync(found, 0, sizeof(float), device.stream()), "quantize");
      find_amax(device, source, rows, cols, found);
      amax = found;
    }
    write_tiles(device, source, rows, cols, out, out_t, amax);
  });
}

void quantize_matrices(Device& any_device, const QuantizeMatrices& a) {
  CudaDevice& device = as_cuda(any_device);
  const int64_t N = a.scales.numel(), rows = a.x.dim[0] / N, cols = a.x.dim[1];
  const auto fits_grid = [](int64_t n) { return n <= 65535; };
  const auto fits = [](const TensorView& t) { return is_aligned(t.data, 16); };
  if (fits_grid(N) && a.amax.empty() && a.out.empty()) {
    move_codes(device, a.x, {a.out_t, a.scales, Scaling::kTensor}, N);
  } else if (fits_grid(N) && !a.amax.empty() && cols % kSourceWidth == 0 && fits(a.x) && fits(a.out)) {
    const ScaledView out = {a.out, a.scales, Scaling::kTensor}, out_t = {a.out_t, a.scales, Scaling::kTensor};
    with_plain_type(a.x.dtype, [&](auto type) {
      tiles::write_tensor(device, PlainSource<decltype(type)>(a.x), rows, cols, out, out_t, a.amax.as<float>(), N);
    });
  } else {
    for (int64_t n = 0; n < N; ++n) cuda::quantize(any_device, matrix_of(a, n));
  }
}

void amax(Device& device, const Amax& a) {
  const int64_t N = a.result.numel(), part = N == 1 ? a.x.numel() : a.part, first = N == 1 ? 0 : a.first;
  const int64_t from = first / part, to = ceil_div(first + a.x.numel(), part);  // parts
  constexpr int64_t kMostParts = 65535;
  PARKA_REQUIRE(to - from <= kMostParts);
  const dim3 grid(static_cast<unsigned>(ceil_div(part, kChunk)), static_cast<unsigned>(to - from));
  with_plain_type(a.x.dtype, [&](auto type) {
    using X = decltype(type);
    launch(as_cuda(device), "amax", amax_kernel<X>, {grid, kThreads}, a.x.as<X>(), a.x.numel(), part,
           first - from * part, a.result.as<float>() + from);
  });
}

void tensor_scales(Device& device, const TensorScales& a) {
  const int64_t N = a.amax.numel();
  with_float8_type(a.format, [&](auto type) {
    launch(as_cuda(device), "tensor_scales", tensor_scales_kernel<decltype(type)>,
           {ceil_div(N, kThreads), kThreads}, a.amax.as<float>(), a.scales.as<float>(), static_cast<int>(N));
  });
}

}  // namespace parka::cuda
