#include <algorithm>

#include "kernels/cuda/norm/norm_rows.cuh"
#include "kernels/cuda/norm/residual_sum.cuh"
#include "kernels/cuda/quantize/matrix_source.cuh"
#include "kernels/cuda/quantize/quantize_tiles.cuh"
#include "kernels/op/workspace.h"
#include "kernels/ops/norm/norm.h"
#include "kernels/ops/quantize/quantize.h"

// Shapes: T rows (tokens), C columns (elements of a row), B blocks.
namespace parka::cuda {
namespace {

// ---- What the norm read, in three forms ----

// fp32 or bf16.
template <typename X>
struct PlainRows {
  using Element = X;
  template <int kWidth>
  using Held = Stored<X, kWidth>;
  const X* x_TC;

  template <typename Part, int kPacks, int kWidth>
  __device__ void read(const Part& part, unsigned t, int cols, Stored<X, kWidth> (&x)[kPacks]) const {
    part.read(x_TC + int64_t{t} * cols, x);
  }
};

// Codes as they lie in memory, with the scale of them all.
template <typename F8, int kWidth>
struct HeldCodes {
  Stored<uint8_t, kWidth> codes;
  float scale;

  __device__ float operator[](int i) const {
    float numbers[4];
    decode_float8x4<F8>(codes.word[i / 4], numbers);
    return __fmul_rn(numbers[i % 4], scale);
  }
};

// fp8 as it is saved, with groups of a row that hold whole packs. Wide only; as many columns in a pack as of bf16.
template <typename F8>
struct CodedRows {
  using Element = BFloat16;
  template <int kWidth>
  using Held = HeldCodes<F8, kWidth>;
  GroupedSource<F8> source;

  template <typename Part, int kPacks, int kWidth>
  __device__ void read(const Part& part, unsigned t, int cols, HeldCodes<F8, kWidth> (&x)[kPacks]) const {
    const uint8_t* const row = source.codes_RC + int64_t{t} * cols;
#pragma unroll
    for (int pack = 0; pack < kPacks; ++pack) {
      x[pack].codes = load_stored<kWidth>(row + part.column(pack), part.has(pack));
      const int column = part.has(pack) ? part.column(pack) : 0;
      x[pack].scale = source.scales.decode(source.scales.fetch_wide(static_cast<int>(t), column));
    }
  }
};

struct HeldFloat {
  float value;
  __device__ float operator[](int) const { return value; }
};

// Any format, column by column. Not wide only.
struct AnyRows {
  using Element = float;
  template <int kWidth>
  using Held = HeldFloat;
  AnySource source;

  template <typename Part, int kPacks>
  __device__ void read(const Part& part, unsigned t, int, HeldFloat (&x)[kPacks]) const {
#pragma unroll
    for (int pack = 0; pack < kPacks; ++pack) {
      x[pack].value = part.has(pack) ? source.element(static_cast<int>(t), part.column(pack)) : 0.0f;
    }
  }
};

// ---- The gradient ----

template <typename Rows, typename W, typename G>
struct BackwardTensors {
  Rows x;
  const W* weight_C;    // null for LayerNorm
  const float* mean_T;  // null for RMSNorm
  const float* rstd_T;
  const G* d_y_TC;
  const G* d_residual_TC;  // not added unless `adds`, but read all the same: a condition would delay the loads
  bool adds;
  G* d_residual_out_TC;  // may be d_y or d_residual: a thread reads its part of a row before it writes it
  float* d_weight_BC;    // null for LayerNorm: what the rows of each block add to d_weight
  float* d_bias_BC;      // the same of d_bias, for kAffineLayerNorm
  float* amax;           // kFindsAmax: raised to max |d_residual_out|, unless it is null
  float weight_offset;
};

// No block has 768 threads. The bound leaves registers for that many on a multiprocessor, beside d_weight's sums.
template <typename Rows, typename G, NormKind kKind>
constexpr int kBackwardMaxThreads = kKind == NormKind::kRmsNorm && sizeof(typename Rows::Element) == 2 &&
                                            sizeof(G) == 2
                                        ? 768
                                        : kMaxThreads;

// With xhat = (x - mean) * rstd and g = d_y * (weight + weight_offset), both functions of the row:
//   d_x = rstd * (g - mean(g) - xhat * mean(g * xhat)),   without mean(g) for RMSNorm
template <typename Rows, typename W, typename G, NormKind kKind, bool kWide, bool kFindsAmax>
__global__ void __launch_bounds__(kBackwardMaxThreads<Rows, G, kKind>)
    norm_backward_kernel(const BackwardTensors<Rows, W, G> a, unsigned rows, int cols, float inverse_cols) {
  using Part = RowPart<typename Rows::Element, kWide>;
  constexpr int kPacks = Part::kPacks, kWidth = Part::kWidth;
  constexpr bool kCentred = has_mean(kKind), kWeighted = has_weight(kKind);
  constexpr bool kBiased = kKind == NormKind::kAffineLayerNorm;
  __shared__ std::conditional_t<kCentred, float2, float> shared[2][kMaxWarps];
  float* const d_weight_C = kWeighted ? a.d_weight_BC + int64_t{blockIdx.x} * cols : nullptr;
  float* const d_bias_C = kBiased ? a.d_bias_BC + int64_t{blockIdx.x} * cols : nullptr;
  float d_weight[kPacks][kWidth] = {};  // wide: of this thread's columns, over the block's rows
  float d_bias[kPacks][kWidth] = {};
  float largest = 0.0f;  // of what this thread has written
  int buffer = 0;
  for (unsigned done = blockIdx.x; done < rows; done += gridDim.x, buffer ^= 1) {
    // The first rows come last, so that the next kernel, which begins with them, finds them in the cache.
    const unsigned t = rows - 1 - done;
    const int64_t row = int64_t{t} * cols;
    const float mean = kCentred ? a.mean_T[t] : 0.0f, rstd = a.rstd_T[t];
    typename Rows::template Held<kWidth> x[kPacks];
    Stored<W, kWidth> weight[kPacks] = {};
    Stored<G, kWidth> d_y[kPacks], d_residual[kPacks];
    const auto read = [&](const Part& part) {
      a.x.read(part, t, cols, x);
      part.read(a.d_y_TC + row, d_y);
      part.read(a.d_residual_TC + row, d_residual);
      if constexpr (kWeighted) part.read(a.weight_C, weight);
    };
    const auto xhat = [&](int pack, int i) { return normalized<kCentred>(x[pack][i], mean, rstd); };
    const auto g = [&](int pack, int i) {
      return kWeighted ? d_y[pack][i] * (weight[pack][i] + a.weight_offset) : d_y[pack][i];
    };

    float2 sums = {0.0f, 0.0f};  // of g, if that is wanted, and of g * xhat
    Part::for_each_chunk(cols, [&](const Part& part) {
      read(part);
      Part::for_each([&](int pack, int i) {
        if constexpr (kCentred) sums.x += g(pack, i);
        sums.y += g(pack, i) * xhat(pack, i);
        if constexpr (!kWeighted) {
          return;
        } else if constexpr (kWide) {
          d_weight[pack][i] += d_y[pack][i] * xhat(pack, i);
          if constexpr (kBiased) d_bias[pack][i] += d_y[pack][i];
        } else if (part.has(pack)) {
          const bool is_first = done == blockIdx.x;
          float& sum = d_weight_C[part.column(pack)];
          sum = d_y[pack][i] * xhat(pack, i) + (is_first ? 0.0f : sum);
          if constexpr (kBiased) {
            float& bias_sum = d_bias_C[part.column(pack)];
            bias_sum = d_y[pack][i] + (is_first ? 0.0f : bias_sum);
          }
        }
      });
    });
    if constexpr (kCentred) {
      sums = row_sum(sums, shared[buffer]);
    } else {
      sums.y = row_sum(sums.y, shared[buffer]);
    }
    const float mean_g = kCentred ? sums.x * inverse_cols : 0.0f, mean_g_xhat = sums.y * inverse_cols;

    Part::for_each_chunk(cols, [&](const Part& part) {
      if constexpr (!kWide) read(part);
      float d_x[kPacks][kWidth];
      Part::for_each([&](int pack, int i) {
        d_x[pack][i] = rstd * (g(pack, i) - mean_g - xhat(pack, i) * mean_g_xhat);
        if (a.adds) d_x[pack][i] += d_residual[pack][i];
        // Past the last column RMSNorm yields zeros.
        if constexpr (kFindsAmax)
          largest = max_magnitude(largest, !kCentred || part.has(pack) ? d_x[pack][i] : 0.0f);
      });
      part.write(a.d_residual_out_TC + row, d_x);
    });
  }
  if constexpr (kWide && kWeighted) Part(0, cols).write(d_weight_C, d_weight);
  if constexpr (kWide && kBiased) Part(0, cols).write(d_bias_C, d_bias);
  if constexpr (kFindsAmax) {
    __shared__ float shared_max[kMaxWarps];
    // Rounding keeps the order of numbers: the maximum of what is stored is that of the rest, rounded.
    largest = to_float(from_float<G>(row_max(largest, shared_max)));
    if (threadIdx.x == 0 && a.amax != nullptr) raise_to(a.amax, largest);
  }
}

// The workspace: partial sums of d_weight, one row per block, and after the last possible row the maximum of
// d_residual_out. Behind that, for kAffineLayerNorm, as many partial sums of d_bias.
struct Workspace {
  float* d_weight_BC = nullptr;  // null for LayerNorm
  float* d_bias_BC = nullptr;    // null but for kAffineLayerNorm
  float* amax = nullptr;         // null if not wanted
  int64_t max_blocks;

  Workspace(CudaDevice& device, const NormBackward& a) : max_blocks(norm_backward_max_blocks(a.d_y.dim[1]) - 1) {
    const auto is_tensor_scaled = [](const ScaledView& t) { return !t.empty() && t.scaling == Scaling::kTensor; };
    const bool wants_amax = is_tensor_scaled(a.d_quantized) || is_tensor_scaled(a.d_quantized_t);
    if (!has_weight(a.kind) && !wants_amax) return;
    const int64_t cols = a.d_y.dim[1];
    d_weight_BC = static_cast<float*>(device.workspace("norm_backward", workspace_of(a)));
    if (a.kind == NormKind::kAffineLayerNorm) d_bias_BC = d_weight_BC + norm_backward_max_blocks(cols) * cols;
    if (wants_amax) {
      amax = d_weight_BC + max_blocks * cols;
      check(cudaMemsetAsync(amax, 0, sizeof(float), device.stream()), "norm_backward");
    }
  }
};

// d_x, and of a norm with a weight the partial sums of d_weight in the workspace. Returns the number of blocks.
template <NormKind kKind, bool kWide, bool kFindsAmax, typename Rows, typename W, typename G>
int launch_rows(CudaDevice& device, const NormBackward& a, const Workspace& workspace, const Rows& x,
                const W* weight, const G* d_y) {
  const int64_t rows = a.x.num_rows(), cols = a.x.num_cols();
  const unsigned threads = threads_for(cols);
  const auto kernel = norm_backward_kernel<Rows, W, G, kKind, kWide, kFindsAmax>;
  int64_t blocks = rows;
  if constexpr (has_weight(kKind)) {
    // As many as run at once, the same number on every multiprocessor.
    int resident = 0;
    check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, threads, 0), "norm_backward");
    const int64_t multiprocessors = device.num_multiprocessors();
    const int64_t per_multiprocessor =
        std::clamp<int64_t>(workspace.max_blocks / multiprocessors, 1, std::max(resident, 1));
    blocks = std::min({rows, per_multiprocessor * multiprocessors, workspace.max_blocks});
  }
  const bool adds = !a.d_residual.empty();
  const BackwardTensors<Rows, W, G> tensors{
      .x = x,
      .weight_C = weight,
      .mean_T = optional<float>(a.mean),
      .rstd_T = a.rstd.as<float>(),
      .d_y_TC = d_y,
      .d_residual_TC = (adds ? a.d_residual : a.d_y).as<G>(),
      .adds = adds,
      .d_residual_out_TC = a.d_residual_out.as<G>(),
      .d_weight_BC = workspace.d_weight_BC,
      .d_bias_BC = workspace.d_bias_BC,
      .amax = workspace.amax,
      .weight_offset = a.weight_offset,
  };
  launch(device, "norm_backward", kernel, {blocks, threads}, tensors, static_cast<unsigned>(rows),
         static_cast<int>(cols), 1.0f / static_cast<float>(cols));
  return static_cast<int>(blocks);
}

struct RowsResult {
  int blocks;
  bool found_amax;
};

// Kernels that also find the maximum exist for wide rows of bf16 gradients, which are those of FP8 training.
template <NormKind kKind, typename W, typename G>
RowsResult launch_backward(CudaDevice& device, const NormBackward& a, const Workspace& workspace, const W* weight,
                           const G* d_y) {
  constexpr bool kCanFindAmax = std::is_same_v<G, BFloat16>;
  const int64_t cols = a.x.num_cols();
  const auto is_wide = [&](int width) {
    return fits_wide(cols, width,
                     {a.x.data.data, a.weight.data, a.d_y.data, a.d_residual.data, a.d_residual_out.data});
  };
  RowsResult result{};
  if (a.x.scaling == Scaling::kNone) {
    with_plain_type(a.x.data.dtype, [&](auto type) {
      using X = decltype(type);
      const PlainRows<X> x{a.x.data.as<X>()};
      if (!is_wide(RowPart<X, true>::kWidth)) {
        result = {launch_rows<kKind, false, false>(device, a, workspace, x, weight, d_y), false};
      } else if (!kCanFindAmax || sizeof(X) != 2 || workspace.amax == nullptr) {
        result = {launch_rows<kKind, true, false>(device, a, workspace, x, weight, d_y), false};
      } else if constexpr (kCanFindAmax && sizeof(X) == 2) {
        result = {launch_rows<kKind, true, true>(device, a, workspace, x, weight, d_y), true};
      }
    });
    return result;
  }
  if constexpr (kCanFindAmax) {
    if (BFloat16GroupScales::fits(a.x) && BFloat16GroupScales(a.x).fits_wide() && is_wide(kSourceWidth)) {
      with_float8_type(a.x.data.dtype, [&](auto f8) {
        const CodedRows<decltype(f8)> x{GroupedSource<decltype(f8)>(a.x)};
        result = {launch_rows<kKind, true, true>(device, a, workspace, x, weight, d_y), true};
      });
      return result;
    }
  }
  return {launch_rows<kKind, false, false>(device, a, workspace, AnyRows{AnySource(a.x)}, weight, d_y), false};
}

// kNone
template <typename G>
RowsResult add_gradients(CudaDevice& device, const NormBackward& a, const Workspace& workspace) {
  const bool adds = !a.d_residual.empty();
  const ResidualSum<G, G> sum{.x = (adds ? a.d_residual : a.d_y).as<G>(),
                              .added = adds ? a.d_y.as<G>() : nullptr,
                              .sum = a.d_residual_out.as<G>(),
                              .copy = nullptr,
                              .amax = workspace.amax};
  launch_residual_sum(device, sum, a.d_y.numel(), "norm_backward");
  return {0, true};
}

// The quantized copies of d_residual_out.
template <typename G>
void quantize_gradient(CudaDevice& device, const NormBackward& a, float* amax, bool found_amax) {
  const int64_t rows = a.d_y.dim[0], cols = a.d_y.dim[1];
  const PlainSource<G> source(a.d_residual_out);
  if (amax != nullptr && !found_amax) find_amax(device, source, rows, cols, amax);
  const TensorView found = amax == nullptr ? TensorView{} : TensorView(amax, DType::kF32, {1});
  cuda::quantize(device,
                 Quantize{.x = a.d_residual_out, .out = a.d_quantized, .out_t = a.d_quantized_t, .amax = found});
}

}  // namespace

void norm_backward(Device& any_device, const NormBackward& a) {
  CudaDevice& device = as_cuda(any_device);
  check_row_extents(a.d_y.dim[0], a.d_y.dim[1]);
  const Workspace workspace(device, a);
  with_plain_type(a.d_y.dtype, [&](auto g) {
    using G = decltype(g);
    const G* const d_y = a.d_y.as<G>();
    RowsResult result{};
    if (a.kind == NormKind::kNone) {
      result = add_gradients<G>(device, a, workspace);
    } else {
      with_norm_kind(a.kind, [&](auto kind) {
        if constexpr (!has_weight(kind.value)) {
          result = launch_backward<kind.value, float>(device, a, workspace, nullptr, d_y);
        } else {
          with_plain_type(a.weight.dtype, [&](auto weight) {
            using W = decltype(weight);
            result = launch_backward<kind.value>(device, a, workspace, a.weight.as<W>(), d_y);
          });
        }
      });
    }
    const int64_t cols = a.d_y.dim[1];
    add_column_sums(device, "norm_backward", workspace.d_weight_BC, result.blocks, cols, a.d_weight);
    add_column_sums(device, "norm_backward", workspace.d_bias_BC, result.blocks, cols, a.d_bias);
    if (!a.d_quantized.empty() || !a.d_quantized_t.empty()) {
      quantize_gradient<G>(device, a, workspace.amax, result.found_amax);
    }
  });
}

}  // namespace parka::cuda
