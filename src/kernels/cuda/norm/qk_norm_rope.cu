#include <bit>

#include "kernels/cuda/attention/rope_pairs.cuh"
#include "kernels/cuda/norm/norm_rows.cuh"
#include "kernels/cuda/norm/qk_norm_input.cuh"
#include "kernels/cuda/quantize/group_codes.cuh"
#include "kernels/device/cuda/check.h"
#include "kernels/device/cuda/cuda_device.h"
#include "kernels/ops/qk_norm.h"
#include "kernels/ops/quantize.h"

// Shapes: T rows (tokens), N columns of the fused QKV matrix, G groups of a row, S positions, D elements of a head.
namespace parka::cuda {
namespace {

struct QkRopeShape {
  int num_heads, num_kv_heads, half;  // half: D / 2
  Positions positions;

  __device__ int normalized_heads() const { return num_heads + num_kv_heads; }
  __device__ int row_heads() const { return num_heads + 2 * num_kv_heads; }
  __device__ int row_width() const { return row_heads() * 2 * half; }
};

template <typename T, typename W>
struct QkRopeTensors {
  const W* weight[2];  // of queries, of keys
  const float* cos_sin_SD;
  T* out_TN;
  float* rstd_TG;
  float eps, weight_offset;
};

// x * rstd * weight of a pair, rotated.
struct NormalizedPair {
  float low, high;

  __device__ NormalizedPair(float x_low, float x_high, float rstd, float low_weight, float high_weight, float cos,
                            float sin) {
    const float y_low = __fmul_rn(normalized<false>(x_low, 0.0f, rstd), low_weight);
    const float y_high = __fmul_rn(normalized<false>(x_high, 0.0f, rstd), high_weight);
    low = rotated_low(y_low, y_high, cos, sin);
    high = rotated_high(y_low, y_high, cos, sin);
  }
};

// ---- bf16, a thread for kPackPairs pairs of some heads ----

constexpr int kPackPairs = 8;  // 16 bytes in each half of the head
constexpr int kHeadThreads = 256;
// Heads of a thread that normalizes each of them: so many bytes are on their way at once. Where a block normalizes
// all heads together it has one: it would have to keep the others' numbers until it has their sum.
template <bool kFull>
constexpr int kThreadHeads = kFull ? 1 : 2;

struct NotSaved {
  static constexpr bool kSaves = false;
};

// FP8 with groups of columns, each in one half of a head and in `lanes` neighbouring threads (group_codes.cuh).
template <typename F8_>
struct SavedCodes {
  static constexpr bool kSaves = true;
  using F8 = F8_;

  F8* codes_TN;
  BFloat16* scales;
  int across;       // scales in a row
  int group_shift;  // log2 of the columns of a group
  int lanes;
};

// Writes the codes of a thread's pairs, which become what these decode to. To be called by whole warps.
template <typename F8>
__device__ void save_pairs(const SavedCodes<F8>& saved, int64_t row, int row_width, int col, int half, bool wanted,
                           float (&low)[kPackPairs], float (&high)[kPackPairs]) {
  using Codes = Pack<uint32_t, kPackPairs / 4>;
  const GroupScales scale =
      scales_for_groups<F8, BFloat16>(max_magnitude_of(0.0f, low), max_magnitude_of(0.0f, high), saved.lanes);
  const Codes low_codes = encode_and_decode<F8>(scale.first, low);
  const Codes high_codes = encode_and_decode<F8>(scale.second, high);
  if (!wanted) return;
  F8* const codes = saved.codes_TN + row * row_width + col;
  *reinterpret_cast<Codes*>(codes) = low_codes;
  *reinterpret_cast<Codes*>(codes + half) = high_codes;
  // The first two threads of a group have computed a scale each, of the lower and the upper half.
  if ((static_cast<int>(threadIdx.x) & (saved.lanes - 1)) >= 2) return;
  const int own_column = col + (GroupScales::owns_first() ? 0 : half);
  saved.scales[row * saved.across + (own_column >> saved.group_shift)] = from_float<BFloat16>(scale.own.scale);
}

__device__ inline float sum_of_squares(const float (&low)[kPackPairs], const float (&high)[kPackPairs]) {
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < kPackPairs; ++i) squares += low[i] * low[i];
#pragma unroll
  for (int i = 0; i < kPackPairs; ++i) squares += high[i] * high[i];
  return squares;
}

// In place.
__device__ inline void normalize_and_rotate(float (&low)[kPackPairs], float (&high)[kPackPairs], float rstd,
                                            const Stored<BFloat16, kPackPairs>& low_weight,
                                            const Stored<BFloat16, kPackPairs>& high_weight, float weight_offset,
                                            const Stored<float, kPackPairs>& cos,
                                            const Stored<float, kPackPairs>& sin) {
#pragma unroll
  for (int i = 0; i < kPackPairs; ++i) {
    const NormalizedPair y(low[i], high[i], rstd, low_weight[i] + weight_offset, high_weight[i] + weight_offset,
                           cos[i], sin[i]);
    low[i] = y.low;
    high[i] = y.high;
  }
}

// Block (t, p) has row t: with kFull its queries, keys or values; otherwise kThreadHeads of blockDim.x packs, in
// which each head is a power of 2 of threads of one warp. x may be the memory of out: a thread writes what only it
// has read.
template <typename Input, typename Saved, bool kFull>
__global__ void __launch_bounds__(kFull ? kMaxThreads : kHeadThreads)
    qk_norm_rope_kernel(const Input x_TN, const QkRopeTensors<BFloat16, BFloat16> a, const Saved saved,
                        const QkRopeShape shape, int head_packs) {
  using Piece = typename Input::template Piece<kPackPairs>;
  constexpr int kHeads = kThreadHeads<kFull>;
  __shared__ float shared[kMaxWarps];
  const int first_head = !kFull || blockIdx.y == 0 ? 0
                         : blockIdx.y == 1         ? shape.num_heads
                                                   : shape.normalized_heads();
  const int last_head = !kFull            ? shape.row_heads()
                        : blockIdx.y == 0 ? shape.num_heads
                                          : first_head + shape.num_kv_heads;
  const int item = static_cast<int>((kFull ? 0 : blockIdx.y * kHeads * blockDim.x) + threadIdx.x);
  const int pair = item % head_packs * kPackPairs, D = 2 * shape.half;  // of each of its heads the same pairs
  const int own_head = first_head + item / head_packs, step = static_cast<int>(blockDim.x) / head_packs;
  const int64_t row = blockIdx.x;

  Piece low_x[kHeads], high_x[kHeads];
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    const int head = own_head + h * step, col = head * D + pair;
    low_x[h] = x_TN.template fetch<kPackPairs>(row, shape.row_width(), col, head < last_head);
    high_x[h] = x_TN.template fetch<kPackPairs>(row, shape.row_width(), col + shape.half, head < last_head);
  }
  // A thread's later heads are rotated only if its first one is.
  const bool rotates = own_head < min(last_head, shape.normalized_heads());
  const float* const cos_D = a.cos_sin_SD + int64_t{shape.positions.of(blockIdx.x)} * D + (rotates ? pair : 0);
  const auto cos = load_stored<kPackPairs>(cos_D, rotates);
  const auto sin = load_stored<kPackPairs>(cos_D + shape.half, rotates);

#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    const int head = own_head + h * step, col = head * D + pair;
    const bool wanted = head < last_head, normalizes = wanted && head < shape.normalized_heads();
    // Not by an index: the parameters would be copied to local memory.
    const BFloat16* const weight = (head >= shape.num_heads ? a.weight[1] : a.weight[0]) +
                                   (kFull ? (head - first_head) * D : 0) + (normalizes ? pair : 0);
    const auto low_weight = load_stored<kPackPairs>(weight, normalizes);
    const auto high_weight = load_stored<kPackPairs>(weight + shape.half, normalizes);
    float low[kPackPairs], high[kPackPairs];
    Input::template decode<kPackPairs>(low_x[h], low);
    Input::template decode<kPackPairs>(high_x[h], high);
    if constexpr (Saved::kSaves) save_pairs(saved, row, shape.row_width(), col, shape.half, wanted, low, high);
    float squares = sum_of_squares(low, high);
    if constexpr (kFull) {
      if (blockIdx.y != 2) squares = row_sum(squares, shared);
    } else {
      for (int offset = head_packs / 2; offset > 0; offset /= 2) {
        squares = __fadd_rn(squares, __shfl_xor_sync(kFullWarp, squares, offset));
      }
    }
    if (normalizes) {
      const int group_heads = kFull ? last_head - first_head : 1;
      const float inverse_width = 1.0f / static_cast<float>(group_heads * D);
      const float rstd = 1.0f / sqrtf(squares * inverse_width + a.eps);
      normalize_and_rotate(low, high, rstd, low_weight, high_weight, a.weight_offset, cos, sin);
      if constexpr (kFull) {
        if (threadIdx.x == 0) a.rstd_TG[row * 2 + blockIdx.y] = rstd;
      } else {
        if (pair == 0) a.rstd_TG[row * shape.normalized_heads() + head] = rstd;
      }
    }
    if (wanted) {
      BFloat16* const out = a.out_TN + row * shape.row_width() + col;
      store(out, low);
      store(out + shape.half, high);
    }
  }
}

// ---- Any format and shape ----

// Block (t, p): part p of row t, one group after another.
template <typename T, typename W>
__global__ void __launch_bounds__(kMaxThreads)
    qk_norm_rope_any_kernel(const AnySource x_TN, const QkRopeTensors<T, W> a, const QkRopeShape shape, bool full) {
  __shared__ float shared[2][kMaxWarps];
  const int row = static_cast<int>(blockIdx.x), part = static_cast<int>(blockIdx.y), threads = blockDim.x;
  const int D = 2 * shape.half, part_heads = part == 0 ? shape.num_heads : shape.num_kv_heads;
  const int first_head = part == 0 ? 0 : part == 1 ? shape.num_heads : shape.normalized_heads();
  T* const out_N = a.out_TN + int64_t{row} * shape.row_width();
  if (part == 2) {
    for (int i = static_cast<int>(threadIdx.x); i < part_heads * D; i += threads) {
      const int col = first_head * D + i;
      out_N[col] = from_float<T>(x_TN.element(row, col));
    }
    return;
  }
  const int heads = full ? part_heads : 1, groups = part_heads / heads, width = heads * D;
  const float* const cos_D = a.cos_sin_SD + int64_t{shape.positions.of(blockIdx.x)} * D;
  const W* const weight = part == 0 ? a.weight[0] : a.weight[1];
  for (int group = 0; group < groups; ++group) {
    const int first_col = (first_head + group * heads) * D;
    float squares = 0.0f;
    for (int i = static_cast<int>(threadIdx.x); i < width; i += threads) {
      const float x = x_TN.element(row, first_col + i);
      squares += x * x;
    }
    const float mean = row_sum(squares, shared[group % 2]) * (1.0f / static_cast<float>(width));
    const float rstd = 1.0f / sqrtf(mean + a.eps);
    for (int i = static_cast<int>(threadIdx.x); i < width / 2; i += threads) {
      const int pair = i % shape.half, low = i / shape.half * D + pair, high = low + shape.half;
      const NormalizedPair y(x_TN.element(row, first_col + low), x_TN.element(row, first_col + high), rstd,
                             to_float(weight[low]) + a.weight_offset, to_float(weight[high]) + a.weight_offset,
                             cos_D[pair], cos_D[pair + shape.half]);
      out_N[first_col + low] = from_float<T>(y.low);
      out_N[first_col + high] = from_float<T>(y.high);
    }
    if (threadIdx.x == 0) {
      a.rstd_TG[int64_t{row} * (full ? 2 : shape.normalized_heads()) + (full ? part : first_head + group)] = rstd;
    }
  }
}

// ---- Launches ----

template <typename T, typename W>
QkRopeTensors<T, W> qk_rope_tensors(const QkNormRopeForward& a) {
  return {.weight = {a.q_weight.as<W>(), a.k_weight.as<W>()},
          .cos_sin_SD = a.cos_sin.as<float>(),
          .out_TN = a.out.as<T>(),
          .rstd_TG = a.rstd.as<float>(),
          .eps = a.eps,
          .weight_offset = a.weight_offset};
}

// Whether the groups are as SavedCodes and CodesInput have them.
bool fits_codes(const ScaledView& codes, int half) {
  const auto group = static_cast<uint64_t>(codes.group);
  return codes.scale.dtype == DType::kBF16 && is_aligned(codes.data.data, kPackPairs) &&
         std::has_single_bit(group) && group >= 2 * kPackPairs && group <= uint64_t{kPackPairs} * kWarpSize &&
         half % static_cast<int>(group) == 0;
}

// Whether qk_norm_rope_kernel has the shape and formats.
bool fits_packs(const QkNormRopeForward& a, const QkRopeShape& shape) {
  if (a.out.dtype != DType::kBF16 || a.q_weight.dtype != DType::kBF16 || shape.half % kPackPairs != 0) return false;
  for (const void* p : {a.q_weight.data, a.k_weight.data, a.cos_sin.data, a.out.data}) {
    if (!is_aligned(p, 16)) return false;
  }
  // Codes that were saved are read by the kernel that saved them, so that both give the same bits.
  const ScaledView& codes = a.x.scaling == Scaling::kNone ? a.saved : a.x;
  if (!codes.empty() && !fits_codes(codes, shape.half)) return false;
  if (a.x.scaling == Scaling::kNone && !PlainInput<BFloat16>::fits(a.x)) return false;
  const int head_packs = shape.half / kPackPairs;
  if (a.kind == QkNormKind::kFull) return a.num_heads * head_packs <= kMaxThreads;
  return std::has_single_bit(static_cast<unsigned>(head_packs)) && head_packs <= kWarpSize;
}

template <typename Input, typename Saved>
void launch_packs(CudaDevice& device, const QkNormRopeForward& a, const QkRopeShape& shape, const Input& x,
                  const Saved& saved) {
  const auto tensors = qk_rope_tensors<BFloat16, BFloat16>(a);
  const auto rows = static_cast<unsigned>(a.out.dim[0]);
  const int head_packs = shape.half / kPackPairs;
  if (a.kind == QkNormKind::kFull) {
    const int packs = shape.num_heads * head_packs;
    const auto threads = static_cast<unsigned>(ceil_div(packs, kWarpSize)) * kWarpSize;
    qk_norm_rope_kernel<Input, Saved, true>
        <<<dim3(rows, 3), threads, 0, device.stream()>>>(x, tensors, saved, shape, head_packs);
    return;
  }
  // As many threads as have work for each of their heads, in whole warps.
  constexpr int kHeads = kThreadHeads<false>;
  const int packs = (shape.num_heads + 2 * shape.num_kv_heads) * head_packs;
  const auto parts = static_cast<unsigned>(ceil_div(packs, kHeads * kHeadThreads));
  const auto threads =
      static_cast<unsigned>(ceil_div(packs, static_cast<int>(parts) * kHeads * kWarpSize)) * kWarpSize;
  qk_norm_rope_kernel<Input, Saved, false>
      <<<dim3(rows, parts), threads, 0, device.stream()>>>(x, tensors, saved, shape, head_packs);
}

void launch_packs(CudaDevice& device, const QkNormRopeForward& a, const QkRopeShape& shape) {
  if (a.x.scaling != Scaling::kNone) {
    with_float8_type(a.x.data.dtype,
                     [&](auto f8) { launch_packs(device, a, shape, CodesInput<decltype(f8)>(a.x), NotSaved()); });
  } else if (a.saved.empty()) {
    launch_packs(device, a, shape, PlainInput<BFloat16>(a.x), NotSaved());
  } else {
    with_float8_type(a.saved.data.dtype, [&](auto f8) {
      using F8 = decltype(f8);
      launch_packs(device, a, shape, PlainInput<BFloat16>(a.x),
                   SavedCodes<F8>{.codes_TN = a.saved.data.as<F8>(),
                                  .scales = a.saved.scale.as<BFloat16>(),
                                  .across = static_cast<int>(a.saved.scale.dim[1]),
                                  .group_shift = std::countr_zero(static_cast<uint64_t>(a.saved.group)),
                                  .lanes = static_cast<int>(a.saved.group) / kPackPairs});
    });
  }
}

}  // namespace

void qk_norm_rope_forward(Device& any_device, const QkNormRopeForward& a) {
  CudaDevice& device = as_cuda(any_device);
  check_row_extents(a.x.num_rows(), a.x.num_cols());
  PARKA_REQUIRE(a.cos_sin.dim[0] <= INT32_MAX);
  const QkRopeShape shape{static_cast<int>(a.num_heads), static_cast<int>(a.num_kv_heads),
                          static_cast<int>(a.cos_sin.dim[1] / 2), Positions(a.cos_sin.dim[0])};
  if (fits_packs(a, shape)) {
    launch_packs(device, a, shape);
    check_launch("qk_norm_rope_forward");
    return;
  }
  if (!a.saved.empty()) cuda::quantize(device, Quantize{.x = a.x, .out = a.saved, .out_t = {}});
  const AnySource x(a.saved.empty() ? a.x : a.saved);
  const bool full = a.kind == QkNormKind::kFull;
  const int threads = threads_for(full ? a.num_heads * a.cos_sin.dim[1] : a.cos_sin.dim[1]);
  with_plain_type(a.out.dtype, [&](auto out) {
    with_plain_type(a.q_weight.dtype, [&](auto weight) {
      using T = decltype(out);
      using W = decltype(weight);
      qk_norm_rope_any_kernel<T, W><<<dim3(static_cast<unsigned>(a.out.dim[0]), 3), threads, 0, device.stream()>>>(
          x, qk_rope_tensors<T, W>(a), shape, full);
    });
  });
  check_launch("qk_norm_rope_forward");
}

}  // namespace parka::cuda
