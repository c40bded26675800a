#include "kernels/ops/norm/norm.h"

#include <type_traits>

#include "kernels/cuda/norm/norm_rows.cuh"
#include "kernels/cuda/norm/norm_source.cuh"
#include "kernels/cuda/norm/residual_sum.cuh"
#include "kernels/cuda/quantize/group_codes.cuh"
#include "kernels/cuda/quantize/quantize_tiles.cuh"
#include "kernels/ops/quantize/quantize.h"

// y = norm(x) * weight + bias of rows x = residual + branch.
//
//   T, C            rows (tokens), columns (elements of a row)
//   Part            what a thread has of a row, a block's: kPacks packs of kWidth columns, x[pack][i]
//   (norm_rows.cuh) copy            x quantized, where that is what the norm reads: a group's columns lie in
//   neighbouring threads mean, rstd      of each row, in every thread of its block
//
// Plain y takes one kernel, which has a row in registers. Quantized y takes two: that one finds the row's
// statistics and the maximum of y, and write_tiles recomputes y from the norm's input, as norm_recompute does.
namespace parka::cuda {
namespace {

template <typename Part>
struct PartValues {
  float element[Part::kPacks][Part::kWidth];
};

template <typename W>
struct Weights {
  const W* weight_C;  // null for LayerNorm
  const W* bias_C;    // null without a bias
  float weight_offset;
};

// normalized(x) * (weight + weight_offset) + bias, as far as the kind has them
template <NormKind kKind, typename Part, typename W>
__device__ PartValues<Part> normalized_part(const Part& part, const float (&x)[Part::kPacks][Part::kWidth],
                                            float mean, float rstd, const Weights<W>& a) {
  constexpr bool kCentred = has_mean(kKind);
  PartValues<Part> y;
  if constexpr (!has_weight(kKind)) {
    Part::for_each([&](int pack, int i) { y.element[pack][i] = normalized<kCentred>(x[pack][i], mean, rstd); });
  } else {
    Stored<W, Part::kWidth> weight[Part::kPacks];
    part.read(a.weight_C, weight);
    Part::for_each([&](int pack, int i) {
      y.element[pack][i] =
          __fmul_rn(normalized<kCentred>(x[pack][i], mean, rstd), weight[pack][i] + a.weight_offset);
    });
  }
  if constexpr (kKind == NormKind::kAffineLayerNorm) {
    if (a.bias_C == nullptr) return y;
    Stored<W, Part::kWidth> bias[Part::kPacks];
    part.read(a.bias_C, bias);
    Part::for_each([&](int pack, int i) { y.element[pack][i] = __fadd_rn(y.element[pack][i], bias[pack][i]); });
  }
  return y;
}

// ---- What the norm reads, if that is a quantized copy of the sum ----

// None: the norm reads residual_out.
struct NoCopy {
  template <typename Part>
  __device__ void quantize(const Part&, int, int, float (&)[Part::kPacks][Part::kWidth]) const {}
};

// fp8 codes with scales S for groups of a row. A thread's two groups are those of its two packs.
template <typename F8, typename S>
struct GroupCopy : GroupCodesOutput<F8, S> {
  using GroupCodesOutput<F8, S>::GroupCodesOutput;

  // Writes x of a row, and replaces it by the values that were written. To be called by whole warps.
  template <typename Part>
  __device__ void quantize(const Part& part, int row, int cols, float (&x)[Part::kPacks][Part::kWidth]) const {
    static_assert(Part::kPacks == 2);
    const GroupScales scale =
        scales_for_groups<F8, S>(max_magnitude_of(0.0f, x[0]), max_magnitude_of(0.0f, x[1]), this->lanes);
    const PieceScale pieces[] = {scale.first, scale.second};
    F8* const codes_C = this->codes + int64_t{row} * cols;
#pragma unroll
    for (int pack = 0; pack < Part::kPacks; ++pack) {
      auto codes = encode_and_decode<F8>(pieces[pack], x[pack]);
      if (part.has(pack)) *reinterpret_cast<decltype(codes)*>(codes_C + part.column(pack)) = codes;
    }
    const int column = part.column(GroupScales::owns_first() ? 0 : 1);
    if (this->writes_scale() && column < cols) {
      this->scales[int64_t{row} * this->across + (column >> this->group_shift)] =
          from_float<S>(scale.own.scale);  // exact: it was rounded
    }
  }
};

// ---- Forward ----

// Stands for y's type where only the maximum of |y| is wanted.
struct AmaxOnly {};

template <typename T, typename Y>
struct ForwardTensors {
  const T* residual_TC;
  const T* branch_TC;  // not added unless `adds`, but read all the same: a condition would delay the loads
  bool adds;
  Weights<T> weights;
  T* residual_out_TC;
  bool writes_sum;  // false where residual_out is the residual, and nothing is added
  Y* y_TC;
  float* mean_T;  // null for RMSNorm
  float* rstd_T;
  float* amax;  // AmaxOnly: raised to max |y|; null: not wanted either
};

template <typename T, typename Y, NormKind kKind, bool kWide, typename Copy>
__global__ void __launch_bounds__(kMaxThreads)
    norm_forward_kernel(const ForwardTensors<T, Y> a, const Copy copy, float eps, int cols, float inverse_cols) {
  using Part = RowPart<T, kWide>;
  constexpr bool kCentred = has_mean(kKind);
  __shared__ float shared[2][kMaxWarps];
  // The first rows come last, so that the next kernel, which begins with them, finds them in the cache.
  const int t = static_cast<int>(gridDim.x - 1 - blockIdx.x);
  const int64_t row = int64_t{t} * cols;
  float x[Part::kPacks][Part::kWidth];
  const auto read_again = [&](const Part& part) {
    if constexpr (!kWide) {
      Stored<T, Part::kWidth> sum[Part::kPacks];
      part.read(a.residual_out_TC + row, sum);
      Part::for_each([&](int pack, int i) { x[pack][i] = sum[pack][i]; });
    }
  };

  float sum = 0.0f;
  Part::for_each_chunk(cols, [&](const Part& part) {
    Stored<T, Part::kWidth> residual[Part::kPacks], branch[Part::kPacks];
    part.read(a.residual_TC + row, residual);
    part.read(a.branch_TC + row, branch);
    if (a.adds) {
#pragma unroll
      for (int pack = 0; pack < Part::kPacks; ++pack) {
        residual[pack] = rounded_sum(residual[pack], branch[pack]);
      }
    }
    if (a.writes_sum) part.write(a.residual_out_TC + row, residual);
    // The norm uses what backward will read: the sum as stored.
    Part::for_each([&](int pack, int i) { x[pack][i] = residual[pack][i]; });
    copy.quantize(part, t, cols, x);
    Part::for_each([&](int pack, int i) { sum += x[pack][i]; });
  });
  const float count = static_cast<float>(cols);
  const float mean = kCentred ? divided(row_sum(sum, shared[0]), count, inverse_cols) : 0.0f;

  float squares = 0.0f;
  Part::for_each_chunk(cols, [&](const Part& part) {
    read_again(part);
    Part::for_each([&](int pack, int i) {
      const float deviation = !kCentred || part.has(pack) ? x[pack][i] - mean : 0.0f;
      squares += deviation * deviation;
    });
  });
  const float rstd = rsqrtf(divided(row_sum(squares, shared[1]), count, inverse_cols) + eps);
  if (threadIdx.x == 0) {
    if (kCentred) a.mean_T[t] = mean;
    a.rstd_T[t] = rstd;
  }

  if constexpr (!std::is_same_v<Y, AmaxOnly>) {
    Part::for_each_chunk(cols, [&](const Part& part) {
      read_again(part);
      const auto y = normalized_part<kKind>(part, x, mean, rstd, a.weights);
      part.write(a.y_TC + row, y.element);
    });
  } else if (a.amax != nullptr) {
    float largest = 0.0f;
    Part::for_each_chunk(cols, [&](const Part& part) {
      read_again(part);
      const auto y = normalized_part<kKind>(part, x, mean, rstd, a.weights);
      Part::for_each([&](int pack, int i) {
        // Past the last column RMSNorm yields zeros.
        largest = max_magnitude(largest, !kCentred || part.has(pack) ? y.element[pack][i] : 0.0f);
      });
    });
    largest = row_max(largest, shared[0]);
    if (threadIdx.x == 0) raise_to(a.amax, largest);
  }
}

// ---- Recompute ----

template <typename T, NormKind kKind, bool kWide>
__global__ void __launch_bounds__(kMaxThreads)
    norm_recompute_kernel(const T* x_TC, const Weights<T> weights, const float* mean_T, const float* rstd_T,
                          T* y_TC, int cols) {
  using Part = RowPart<T, kWide>;
  const int64_t row = int64_t{blockIdx.x} * cols;
  const float mean = has_mean(kKind) ? mean_T[blockIdx.x] : 0.0f, rstd = rstd_T[blockIdx.x];
  Part::for_each_chunk(cols, [&](const Part& part) {
    Stored<T, Part::kWidth> stored[Part::kPacks];
    part.read(x_TC + row, stored);
    float x[Part::kPacks][Part::kWidth];
    Part::for_each([&](int pack, int i) { x[pack][i] = stored[pack][i]; });
    part.write(y_TC + row, normalized_part<kKind>(part, x, mean, rstd, weights).element);
  });
}

// ---- Statistics alone ----

constexpr int kStatisticsThreads = 256;

// Finds, column by column for rows of any format, what norm_forward_kernel finds for rows in registers.
__global__ void __launch_bounds__(kStatisticsThreads)
    norm_statistics_kernel(const AnySource x, bool centred, float eps, int cols, float* mean_T, float* rstd_T) {
  __shared__ float shared[kStatisticsThreads / kWarpSize];
  const int row = static_cast<int>(blockIdx.x);
  const auto mean_of = [&](const auto& term) {
    float sum = 0.0f;
    for (int col = static_cast<int>(threadIdx.x); col < cols; col += kStatisticsThreads) {
      sum += term(x.element(row, col));
    }
    return block_sum<kStatisticsThreads>(sum, shared) / static_cast<float>(cols);
  };
  const float mean = centred ? mean_of([](float value) { return value; }) : 0.0f;
  const float variance = mean_of([&](float value) { return (value - mean) * (value - mean); });
  if (threadIdx.x != 0) return;
  if (centred) mean_T[row] = mean;
  rstd_T[row] = rsqrtf(variance + eps);
}

// ---- Launches ----

template <typename Y, NormKind kKind, bool kWide, typename T, typename Copy>
void launch_forward(CudaDevice& device, const NormForward& a, const T* residual, const Copy& copy, float* amax) {
  const int64_t rows = a.residual.dim[0], cols = a.residual.dim[1];
  const bool adds = !a.branch.empty();
  ForwardTensors<T, Y> tensors{
      .residual_TC = residual,
      .branch_TC = adds ? a.branch.as<T>() : residual,
      .adds = adds,
      .weights = {optional<T>(a.weight), optional<T>(a.bias), a.weight_offset},
      .residual_out_TC = a.residual_out.as<T>(),
      .writes_sum = adds || a.residual_out.data != a.residual.data,
      .y_TC = nullptr,
      .mean_T = optional<float>(a.mean),
      .rstd_T = a.rstd.as<float>(),
      .amax = amax,
  };
  if constexpr (!std::is_same_v<Y, AmaxOnly>) tensors.y_TC = a.y.data.as<Y>();
  launch(device, "norm_forward", norm_forward_kernel<T, Y, kKind, kWide, Copy>, {rows, threads_for(cols)}, tensors,
         copy, a.eps, static_cast<int>(cols), 1.0f / static_cast<float>(cols));
}

template <typename T>
bool is_wide(const NormForward& a) {
  return fits_wide(
      a.residual.dim[1], RowPart<T, true>::kWidth,
      {a.residual.data, a.branch.data, a.weight.data, a.bias.data, a.residual_out.data, a.y.data.data});
}

// True if norm_of_rows() takes these tensors: it can make some copies of the sum, and no others.
bool fits_rows(const NormForward& a) {
  static_assert(RowPart<BFloat16, true>::kWidth == kGroupCodesWidth);
  return a.x.empty() || (a.residual.dtype == DType::kBF16 && is_wide<BFloat16>(a) && fits_group_codes(a.x));
}

// One kernel: the sum, its quantized copy if one is wanted, the statistics, and y or, for AmaxOnly, its maximum
// unless `amax` is null.
template <typename Y>
void norm_of_rows(CudaDevice& device, const NormForward& a, float* amax) {
  with_norm_kind(a.kind, [&](auto kind) {
    if (a.x.empty()) {
      with_plain_type(a.residual.dtype, [&](auto residual) {
        using T = decltype(residual);
        with_constant(is_wide<T>(a), [&](auto wide) {
          launch_forward<Y, kind.value, wide.value>(device, a, a.residual.as<T>(), NoCopy(), amax);
        });
      });
    } else if constexpr (!std::is_same_v<Y, float>) {
      with_float8_type(a.x.data.dtype, [&](auto f8) {
        with_plain_type(a.x.scale.dtype, [&](auto scale) {
          const GroupCopy<decltype(f8), decltype(scale)> copy(a.x);
          launch_forward<Y, kind.value, true>(device, a, a.residual.as<BFloat16>(), copy, amax);
        });
      });
    }
  });
}

// The sum, its copy of any format, the statistics of that, and the maximum of y unless `amax` is null.
void norm_of_any_copy(CudaDevice& device, const NormForward& a, float* amax) {
  const int64_t rows = a.residual.dim[0], cols = a.residual.dim[1];
  NormForward of_sum = a;
  of_sum.x = {};
  norm_of_rows<AmaxOnly>(device, of_sum, nullptr);
  cuda::quantize(device, Quantize{.x = a.residual_out, .out = a.x});
  launch(device, "norm_forward", norm_statistics_kernel, {rows, kStatisticsThreads}, AnySource(a.x),
         has_mean(a.kind), a.eps, static_cast<int>(cols), optional<float>(a.mean), a.rstd.as<float>());
  if (amax != nullptr) find_amax_of_elements(device, any_norm_source(a.x, a), rows, cols, amax);
}

// kNone: the sum, and y made of it.
void sum_alone(CudaDevice& device, const NormForward& a, float* amax) {
  const bool is_plain = a.y.scaling == Scaling::kNone, copies = is_plain && a.y.data.data != a.residual_out.data;
  with_plain_type(a.residual.dtype, [&](auto type) {
    using T = decltype(type);
    with_plain_type(copies ? a.y.data.dtype : a.residual.dtype, [&](auto y) {
      using Y = decltype(y);
      const ResidualSum<T, Y> sum{.x = a.residual.as<T>(),
                                  .added = optional<T>(a.branch),
                                  .sum = a.residual_out.as<T>(),
                                  .copy = copies ? a.y.data.as<Y>() : nullptr,
                                  .amax = amax};
      launch_residual_sum(device, sum, a.residual.numel(), "norm_forward");
    });
  });
  if (is_plain && a.y_t.empty()) return;
  const TensorView found = amax == nullptr ? TensorView{} : TensorView(amax, DType::kF32, {1});
  cuda::quantize(device, Quantize{.x = a.residual_out, .out = a.y, .out_t = a.y_t, .amax = found});
}

template <typename T, NormKind kKind>
void launch_recompute(CudaDevice& device, const NormRecompute& a) {
  const int64_t rows = a.x.num_rows(), cols = a.x.num_cols();
  const bool wide =
      fits_wide(cols, RowPart<T, true>::kWidth, {a.x.data.data, a.weight.data, a.bias.data, a.y.data.data});
  launch(device, "norm_recompute",
         wide ? norm_recompute_kernel<T, kKind, true> : norm_recompute_kernel<T, kKind, false>,
         {rows, threads_for(cols)}, a.x.data.as<T>(),
         Weights<T>{optional<T>(a.weight), optional<T>(a.bias), a.weight_offset}, optional<float>(a.mean),
         a.rstd.as<float>(), a.y.data.as<T>(), static_cast<int>(cols));
}

// y of the norm of x, from the statistics of its rows.
template <typename Args>
void write_norm(CudaDevice& device, const ScaledView& x, const Args& a, const float* amax) {
  const int64_t rows = x.num_rows(), cols = x.num_cols();
  with_norm_source(x, a, [&](const auto& y) {
    if constexpr (std::is_same_v<std::decay_t<decltype(y)>, AnyNormSource>) {
      write_rare(device, y, rows, cols, a.y, a.y_t, amax);
    } else {
      write_tiles(device, y, rows, cols, a.y, a.y_t, amax);
    }
  });
}

bool is_tensor_scaled(const ScaledView& t) { return !t.empty() && t.scaling == Scaling::kTensor; }

}  // namespace

void norm_forward(Device& any_device, const NormForward& a) {
  CudaDevice& device = as_cuda(any_device);
  check_row_extents(a.residual.dim[0], a.residual.dim[1]);
  float* amax = nullptr;
  if (is_tensor_scaled(a.y) || is_tensor_scaled(a.y_t)) {
    amax = static_cast<float*>(device.workspace("norm_forward", workspace_of(a)));
    check(cudaMemsetAsync(amax, 0, sizeof(float), device.stream()), "norm_forward");
  }
  if (a.kind == NormKind::kNone) return sum_alone(device, a, amax);
  const bool is_plain = a.y.scaling == Scaling::kNone && a.y_t.empty();
  if (is_plain && fits_rows(a) && (a.x.empty() || a.y.data.dtype == DType::kBF16)) {
    with_plain_type(a.y.data.dtype, [&](auto y) { norm_of_rows<decltype(y)>(device, a, nullptr); });
    return;
  }
  fits_rows(a) ? norm_of_rows<AmaxOnly>(device, a, amax) : norm_of_any_copy(device, a, amax);
  write_norm(device, a.x.empty() ? ScaledView(a.residual_out) : a.x, a, amax);
}

void norm_recompute(Device& any_device, const NormRecompute& a) {
  CudaDevice& device = as_cuda(any_device);
  check_row_extents(a.x.num_rows(), a.x.num_cols());
  if (a.kind == NormKind::kNone) {
    cuda::quantize(device, Quantize{.x = a.x, .out = a.y, .out_t = a.y_t, .scale_given = true});
    return;
  }
  // One kernel where all formats are those of a bf16 or an fp32 model.
  const bool is_plain =
      a.x.scaling == Scaling::kNone && !a.y.empty() && a.y.scaling == Scaling::kNone && a.y_t.empty();
  const DType dtype = a.x.data.dtype;
  if (!is_plain || a.y.data.dtype != dtype || (!a.weight.empty() && a.weight.dtype != dtype)) {
    write_norm(device, a.x, a, nullptr);
    return;
  }
  with_plain_type(dtype, [&](auto type) {
    with_norm_kind(a.kind, [&](auto kind) { launch_recompute<decltype(type), kind.value>(device, a); });
  });
}

}  // namespace parka::cuda
