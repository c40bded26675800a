#include <bit>

#include "kernels/cuda/attention/rope_pairs.cuh"
#include "kernels/cuda/norm/norm_rows.cuh"
#include "kernels/cuda/norm/qk_norm_input.cuh"
#include "kernels/cuda/quantize/group_codes.cuh"
#include "kernels/ops/norm/qk_norm.h"
#include "kernels/ops/quantize/quantize.h"

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
constexpr int kThreadHeads = 2;  // fetched together: so many bytes are on their way at once

struct NotSaved {
  static constexpr bool kSaves = false;
};

// FP8 with groups of columns, each in one half of a head.
template <typename F8>
struct SavedCodes : GroupCodesOutput<F8, BFloat16> {
  static constexpr bool kSaves = true;
  using GroupCodesOutput<F8, BFloat16>::GroupCodesOutput;
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
  F8* const codes = saved.codes + row * row_width + col;
  *reinterpret_cast<Codes*>(codes) = low_codes;
  *reinterpret_cast<Codes*>(codes + half) = high_codes;
  if (!saved.writes_scale()) return;
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

// A row's heads from `first` to `last`, of which a thread has kHeads of the same pairs: threads of a block have
// neighbouring packs, and the next head of each is a block further.
template <typename Input, int kHeads>
struct ThreadHeads {
  using Piece = typename Input::template Piece<kPackPairs>;

  int own_head, step, last_head, pair;
  Piece low[kHeads], high[kHeads];
  Stored<float, kPackPairs> cos, sin;

  __device__ ThreadHeads(const Input& x_TN, const float* cos_sin_SD, const QkRopeShape& shape, int first, int last,
                         int item, int head_packs)
      : own_head(first + item / head_packs),
        step(static_cast<int>(blockDim.x) / head_packs),
        last_head(last),
        pair(item % head_packs * kPackPairs) {
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      const int col = column(shape, h);
      low[h] = x_TN.template fetch<kPackPairs>(blockIdx.x, shape.row_width(), col, has(h));
      high[h] = x_TN.template fetch<kPackPairs>(blockIdx.x, shape.row_width(), col + shape.half, has(h));
    }
    // A thread's later heads are rotated only if its first one is.
    const bool rotates = own_head < min(last_head, shape.normalized_heads());
    const float* const cos_D =
        cos_sin_SD + int64_t{shape.positions.of(blockIdx.x)} * 2 * shape.half + (rotates ? pair : 0);
    cos = load_stored<kPackPairs>(cos_D, rotates);
    sin = load_stored<kPackPairs>(cos_D + shape.half, rotates);
  }

  __device__ int head(int h) const { return own_head + h * step; }
  __device__ bool has(int h) const { return head(h) < last_head; }
  __device__ bool normalizes(int h, const QkRopeShape& shape) const {
    return head(h) < min(last_head, shape.normalized_heads());
  }
  __device__ int column(const QkRopeShape& shape, int h) const { return head(h) * 2 * shape.half + pair; }

  // By whole warps.
  template <typename Saved>
  __device__ void decode(const Saved& saved, const QkRopeShape& shape, int h, float (&low_x)[kPackPairs],
                         float (&high_x)[kPackPairs]) const {
    Input::template decode<kPackPairs>(low[h], low_x);
    Input::template decode<kPackPairs>(high[h], high_x);
    if constexpr (Saved::kSaves) {
      save_pairs(saved, blockIdx.x, shape.row_width(), column(shape, h), shape.half, has(h), low_x, high_x);
    }
  }
};

// The weights of kPackPairs pairs of a head; zeros, and no access, unless `wanted`.
struct PairWeights {
  Stored<BFloat16, kPackPairs> low, high;

  __device__ PairWeights(const BFloat16* weight, int half, bool wanted)
      : low(load_stored<kPackPairs>(weight, wanted)), high(load_stored<kPackPairs>(weight + half, wanted)) {}
};

// Block (t, p) has kThreadHeads * blockDim.x packs of row t, in which each head is a power of 2 of threads of one
// warp. x may be the memory of out: a thread writes what only it has read.
template <typename Input, typename Saved>
__global__ void __launch_bounds__(kHeadThreads)
    qk_norm_rope_heads_kernel(const Input x_TN, const QkRopeTensors<BFloat16, BFloat16> a, const Saved saved,
                              const QkRopeShape shape, int head_packs) {
  const int item = static_cast<int>(blockIdx.y * kThreadHeads * blockDim.x + threadIdx.x);
  const ThreadHeads<Input, kThreadHeads> own(x_TN, a.cos_sin_SD, shape, 0, shape.row_heads(), item, head_packs);
  const int64_t row = blockIdx.x;
  const float inverse_width = 1.0f / static_cast<float>(2 * shape.half);
#pragma unroll
  for (int h = 0; h < kThreadHeads; ++h) {
    const bool normalizes = own.normalizes(h, shape);
    // Not by an index: the parameters would be copied to local memory.
    const BFloat16* const weight = own.head(h) >= shape.num_heads ? a.weight[1] : a.weight[0];
    const PairWeights weights(weight + (normalizes ? own.pair : 0), shape.half, normalizes);
    float low[kPackPairs], high[kPackPairs];
    own.decode(saved, shape, h, low, high);
    float squares = sum_of_squares(low, high);
    for (int offset = head_packs / 2; offset > 0; offset /= 2) {
      squares = __fadd_rn(squares, __shfl_xor_sync(kFullWarp, squares, offset));
    }
    if (normalizes) {
      const float rstd = 1.0f / sqrtf(squares * inverse_width + a.eps);
      normalize_and_rotate(low, high, rstd, weights.low, weights.high, a.weight_offset, own.cos, own.sin);
      if (own.pair == 0) a.rstd_TG[row * shape.normalized_heads() + own.head(h)] = rstd;
    }
    if (own.has(h)) {
      BFloat16* const out = a.out_TN + row * shape.row_width() + own.column(shape, h);
      store(out, low);
      store(out + shape.half, high);
    }
  }
}

// The sum over a block's packs, kHeads of each thread: in every thread, in an order without kHeads.
template <int kHeads>
__device__ float block_sum_of_packs(const float (&x)[kHeads]) {
  __shared__ float shared[kMaxWarps];
  const int warps = static_cast<int>(blockDim.x) / kWarpSize, lane = static_cast<int>(threadIdx.x) % kWarpSize;
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    const float of_warp = warp_sum(x[h]);
    if (lane == 0) shared[h * warps + static_cast<int>(threadIdx.x) / kWarpSize] = of_warp;
  }
  __syncthreads();
  return warp_sum(lane < kHeads * warps ? shared[lane] : 0.0f);
}

// Block (t, p) has the queries, keys or values of row t, which it normalizes together, and with kHeads > 1 a
// thread's heads are whole heads apart.
template <typename Input, typename Saved, int kHeads>
__global__ void __launch_bounds__(kMaxThreads / kHeads)
    qk_norm_rope_full_kernel(const Input x_TN, const QkRopeTensors<BFloat16, BFloat16> a, const Saved saved,
                             const QkRopeShape shape, int head_packs) {
  const int first_head = blockIdx.y == 0 ? 0 : blockIdx.y == 1 ? shape.num_heads : shape.normalized_heads();
  const int heads = blockIdx.y == 0 ? shape.num_heads : shape.num_kv_heads;
  const ThreadHeads<Input, kHeads> own(x_TN, a.cos_sin_SD, shape, first_head, first_head + heads,
                                       static_cast<int>(threadIdx.x), head_packs);
  const int64_t row = blockIdx.x;
  float low[kHeads][kPackPairs], high[kHeads][kPackPairs], squares[kHeads];
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    own.decode(saved, shape, h, low[h], high[h]);
    squares[h] = sum_of_squares(low[h], high[h]);
  }
  float rstd = 0.0f;
  if (blockIdx.y < 2) {
    const float inverse_width = 1.0f / static_cast<float>(heads * 2 * shape.half);
    rstd = 1.0f / sqrtf(block_sum_of_packs(squares) * inverse_width + a.eps);
    if (threadIdx.x == 0) a.rstd_TG[row * 2 + blockIdx.y] = rstd;
  }
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    if (!own.has(h)) return;
    if (blockIdx.y < 2) {
      const BFloat16* const weight = blockIdx.y == 1 ? a.weight[1] : a.weight[0];
      const PairWeights weights(weight + own.column(shape, h) - first_head * 2 * shape.half, shape.half, true);
      normalize_and_rotate(low[h], high[h], rstd, weights.low, weights.high, a.weight_offset, own.cos, own.sin);
    }
    BFloat16* const out = a.out_TN + row * shape.row_width() + own.column(shape, h);
    store(out, low[h]);
    store(out + shape.half, high[h]);
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

constexpr const char* kOp = "qk_norm_rope_forward";

template <typename T, typename W>
QkRopeTensors<T, W> qk_rope_tensors(const QkNormRopeForward& a) {
  return {.weight = {a.q_weight.as<W>(), a.k_weight.as<W>()},
          .cos_sin_SD = a.cos_sin.as<float>(),
          .out_TN = a.out.as<T>(),
          .rstd_TG = a.rstd.as<float>(),
          .eps = a.eps,
          .weight_offset = a.weight_offset};
}

// True if the groups are as SavedCodes and CodesInput have them.
bool fits_codes(const ScaledView& codes, int half) {
  static_assert(kPackPairs == kGroupCodesWidth);
  return codes.scale.dtype == DType::kBF16 && fits_group_codes(codes) && half % codes.group == 0;
}

// True if the kernels of packs take the shape and formats.
bool fits_packs(const QkNormRopeForward& a, const QkRopeShape& shape) {
  if (a.out.dtype != DType::kBF16 || a.q_weight.dtype != DType::kBF16 || shape.half % kPackPairs != 0) return false;
  if (!are_aligned({a.q_weight.data, a.k_weight.data, a.cos_sin.data, a.out.data})) return false;
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
  // As many threads as have work for each of their heads, in whole warps.
  const auto threads_for_packs = [](int64_t packs, int heads) {
    return static_cast<unsigned>(ceil_div(packs, int64_t{heads} * kWarpSize)) * kWarpSize;
  };
  if (a.kind == QkNormKind::kFull) {
    const int packs = shape.num_heads * head_packs;
    const unsigned threads = threads_for_packs(packs, kThreadHeads);
    if (threads % static_cast<unsigned>(head_packs) == 0) {
      launch(device, kOp, qk_norm_rope_full_kernel<Input, Saved, kThreadHeads>, {dim3(rows, 3), threads}, x,
             tensors, saved, shape, head_packs);
    } else {
      launch(device, kOp, qk_norm_rope_full_kernel<Input, Saved, 1>, {dim3(rows, 3), threads_for_packs(packs, 1)},
             x, tensors, saved, shape, head_packs);
    }
    return;
  }
  const int packs = (shape.num_heads + 2 * shape.num_kv_heads) * head_packs;
  const auto parts = static_cast<unsigned>(ceil_div(packs, kThreadHeads * kHeadThreads));
  launch(device, kOp, qk_norm_rope_heads_kernel<Input, Saved>,
         {dim3(rows, parts), threads_for_packs(packs, static_cast<int>(parts) * kThreadHeads)}, x, tensors, saved,
         shape, head_packs);
}

void launch_packs(CudaDevice& device, const QkNormRopeForward& a, const QkRopeShape& shape) {
  if (a.x.scaling != Scaling::kNone) {
    with_float8_type(a.x.data.dtype,
                     [&](auto f8) { launch_packs(device, a, shape, CodesInput<decltype(f8)>(a.x), NotSaved()); });
  } else if (a.saved.empty()) {
    launch_packs(device, a, shape, PlainInput<BFloat16>(a.x), NotSaved());
  } else {
    with_float8_type(a.saved.data.dtype, [&](auto f8) {
      launch_packs(device, a, shape, PlainInput<BFloat16>(a.x), SavedCodes<decltype(f8)>(a.saved));
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
    return;
  }
  if (!a.saved.empty()) cuda::quantize(device, Quantize{.x = a.x, .out = a.saved, .out_t = {}});
  const AnySource x(a.saved.empty() ? a.x : a.saved);
  const bool full = a.kind == QkNormKind::kFull;
  const unsigned threads = threads_for(full ? a.num_heads * a.cos_sin.dim[1] : a.cos_sin.dim[1]);
  with_plain_type(a.out.dtype, [&](auto out) {
    with_plain_type(a.q_weight.dtype, [&](auto weight) {
      using T = decltype(out);
      using W = decltype(weight);
      launch(device, kOp, qk_norm_rope_any_kernel<T, W>, {dim3(static_cast<unsigned>(a.out.dim[0]), 3), threads}, x,
             qk_rope_tensors<T, W>(a), shape, full);
    });
  });
}

}  // namespace parka::cuda
