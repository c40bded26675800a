#include "kernels/ops/attention/rope.h"

#include <algorithm>
#include <bit>

#include "kernels/cuda/attention/rope_pairs.cuh"
#include "kernels/cuda/quantize/group_codes.cuh"
#include "kernels/cuda/quantize/quantize_tiles.cuh"
#include "kernels/ops/quantize/quantize.h"

// Shapes: T rows (tokens), S positions, D elements of a head, W elements of a row of the fused QKV matrix. A block
// works on heads of one row. A thread rotates kWidth adjacent pairs of kHeads of them, all by the same angles.
namespace parka::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kHeads = 4;
constexpr int kPairHeads = 3;  // of Pairs: mostly as many heads are keys, and values, as queries

// Rotates the first `num_rotated` heads of each row (queries and keys). half: D / 2.
template <typename T, int kWidth>
__global__ void __launch_bounds__(kThreads) rope_kernel(T* qkv_TW, const float* cos_sin_SD, int64_t row_width,
                                                        Positions positions, int num_rotated, int half) {
  const int pair = (blockIdx.y * blockDim.x + threadIdx.x) * kWidth;
  if (pair >= half) return;
  const int first_head = blockIdx.z * blockDim.y * kHeads + threadIdx.y;
  const auto head = [&](int n) { return first_head + n * static_cast<int>(blockDim.y); };
  T* const row = qkv_TW + int64_t{blockIdx.x} * row_width + pair;
  Stored<T, kWidth> low[kHeads], high[kHeads];
#pragma unroll
  for (int n = 0; n < kHeads; ++n) {
    low[n] = load_stored<kWidth>(row + head(n) * 2 * half, head(n) < num_rotated);
    high[n] = load_stored<kWidth>(row + head(n) * 2 * half + half, head(n) < num_rotated);
  }
  const float* const cos_D = cos_sin_SD + int64_t{positions.of(blockIdx.x)} * 2 * half + pair;
  const auto cos = load_stored<kWidth>(cos_D), sin = load_stored<kWidth>(cos_D + half);
#pragma unroll
  for (int n = 0; n < kHeads; ++n) {
    if (head(n) >= num_rotated) return;
    float new_low[kWidth], new_high[kWidth];
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      new_low[i] = rotated_low(low[n][i], high[n][i], cos[i], sin[i]);
      new_high[i] = rotated_high(low[n][i], high[n][i], cos[i], sin[i]);
    }
    store(row + head(n) * 2 * half, new_low);
    store(row + head(n) * 2 * half + half, new_high);
  }
}

// All kernels over pairs have these in common.
struct Shape {
  int64_t row_width;
  Positions positions;
  int num_rotated, num_heads;  // query and key heads; and value heads, which are not rotated
  int half;                    // D / 2
};

// A thread's pairs of one row, as in rope_kernel, of kPairHeads heads. All threads of a block stay to the end. A
// thread past the last pair or head has a copy of a neighbour's, which changes no maximum and must not be written.
template <typename T, int kWidth>
struct Pairs {
  int first_head;
  bool in_head;
  int column;      // of the row: of the pairs' low halves in the first head
  int64_t offset;  // of the matrix: the same
  int stride;      // columns from one head of a thread to its next one
  Stored<T, kWidth> low[kPairHeads], high[kPairHeads];
  Stored<float, kWidth> cos, sin;

  __device__ Pairs(const T* qkv_TW, const float* cos_sin_SD, const Shape& shape)
      : first_head(blockIdx.z * blockDim.y * kPairHeads + threadIdx.y),
        stride(static_cast<int>(blockDim.y) * 2 * shape.half) {
    int pair = static_cast<int>(blockIdx.y * blockDim.x + threadIdx.x) * kWidth;
    in_head = pair < shape.half;
    pair = min(pair, shape.half - kWidth);
    const int64_t row_start = int64_t{blockIdx.x} * shape.row_width;
    column = first_head * 2 * shape.half + pair;
    offset = row_start + column;
    const int last_column = (shape.num_heads - 1) * 2 * shape.half + pair;
    const T* const row_W = qkv_TW + row_start;
#pragma unroll
    for (int n = 0; n < kPairHeads; ++n) {
      const T* const p = row_W + min(column + n * stride, last_column);
      low[n] = load_stored<kWidth>(p);
      high[n] = load_stored<kWidth>(p + shape.half);
    }
    const float* const cos_D = cos_sin_SD + int64_t{shape.positions.of(blockIdx.x)} * 2 * shape.half + pair;
    cos = load_stored<kWidth>(cos_D);
    sin = load_stored<kWidth>(cos_D + shape.half);
  }

  __device__ int head(int n) const { return first_head + n * static_cast<int>(blockDim.y); }
  __device__ bool has(int n, const Shape& shape) const { return in_head && head(n) < shape.num_heads; }

  // The pairs of one head, rotated if it is a query or a key.
  __device__ void rotate(int n, const Shape& shape, float (&new_low)[kWidth], float (&new_high)[kWidth]) const {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      new_low[i] = low[n][i];
      new_high[i] = high[n][i];
    }
    if (head(n) >= shape.num_rotated) return;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      new_low[i] = rotated_low(low[n][i], high[n][i], cos[i], sin[i]);
      new_high[i] = rotated_high(low[n][i], high[n][i], cos[i], sin[i]);
    }
  }
};

// ---- Forward, saving ----

constexpr int kSaveBlocks = 6;  // that should fit on a multiprocessor

// Rotates queries and keys, quantizes all heads, and writes what they decode to back. A thread's two groups are in
// the low and the high half of a head.
template <typename T, int kWidth, typename F8, typename S>
__global__ void __launch_bounds__(kThreads, kSaveBlocks)
    rope_save_kernel(T* qkv_TW, const float* cos_sin_SD, const GroupCodesOutput<F8, S> saved, const Shape shape) {
  using Codes = Pack<uint32_t, kWidth / 4>;
  const Pairs<T, kWidth> pairs(qkv_TW, cos_sin_SD, shape);
  T* const qkv = qkv_TW + pairs.offset;
  F8* const codes = saved.codes + pairs.offset;
  const int own_column = pairs.column + (GroupScales::owns_first() ? 0 : shape.half);
  S* const scales = saved.scales + int64_t{blockIdx.x} * saved.across + (own_column >> saved.group_shift);
  const int scale_stride = pairs.stride >> saved.group_shift;
#pragma unroll
  for (int n = 0; n < kPairHeads; ++n) {
    const bool wanted = pairs.has(n, shape);
    if (!__any_sync(kFullWarp, wanted)) return;  // and so for all later heads of the warp
    float low[kWidth], high[kWidth];
    pairs.rotate(n, shape, low, high);
    const GroupScales scale =
        scales_for_groups<F8, S>(max_magnitude_of(0.0f, low), max_magnitude_of(0.0f, high), saved.lanes);
    const Codes low_codes = encode_and_decode<F8>(scale.first, low);
    const Codes high_codes = encode_and_decode<F8>(scale.second, high);
    if (!wanted) continue;
    const int start = n * pairs.stride;
    *reinterpret_cast<Codes*>(codes + start) = low_codes;
    *reinterpret_cast<Codes*>(codes + start + shape.half) = high_codes;
    store(qkv + start, low);
    store(qkv + start + shape.half, high);
    if (saved.writes_scale()) scales[n * scale_stride] = from_float<S>(scale.own.scale);  // exact: it was rounded
  }
}

// ---- Any format and shape ----

// The rotated matrix, element by element (as a Source of quantize_tiles.cuh has it).
template <typename T>
struct RopeSource {
  const T* qkv_TW;
  const float* cos_sin_SD;
  int row_width, half;
  Positions positions;
  int rotated_width;  // columns of queries and keys

  RopeSource(const TensorView& qkv, const TensorView& cos_sin, int64_t num_rotated)
      : qkv_TW(qkv.as<T>()),
        cos_sin_SD(cos_sin.as<float>()),
        row_width(static_cast<int>(qkv.dim[1])),
        half(static_cast<int>(cos_sin.dim[1] / 2)),
        positions(cos_sin.dim[0]),
        rotated_width(static_cast<int>(num_rotated * cos_sin.dim[1])) {}

  __device__ float element(int row, int col) const {
    const int column = col % (2 * half);  // of the head
    const bool is_low = column < half;
    const T* const own = qkv_TW + int64_t{row} * row_width + col;
    const float x = to_float(*own);
    if (col >= rotated_width) return x;
    const int pair = is_low ? column : column - half;
    const float* const cos_D = cos_sin_SD + int64_t{positions.of(row)} * 2 * half;
    return is_low ? rotated_low(x, to_float(own[half]), cos_D[pair], cos_D[pair + half])
                  : rotated_high(to_float(own[-half]), x, cos_D[pair], cos_D[pair + half]);
  }
};

// ---- Launches ----

constexpr int kWideBytes = 16;

Shape shape_of(const TensorView& qkv, const TensorView& cos_sin, int64_t num_heads, int64_t num_kv_heads) {
  PARKA_REQUIRE(qkv.dim[0] <= INT32_MAX && qkv.dim[1] <= INT32_MAX && cos_sin.dim[0] <= INT32_MAX);
  return {qkv.dim[1], Positions(cos_sin.dim[0]), static_cast<int>(num_heads + num_kv_heads),
          static_cast<int>(num_heads + 2 * num_kv_heads), static_cast<int>(cos_sin.dim[1] / 2)};
}

bool fits_wide(const TensorView& qkv, const TensorView& cos_sin) {
  return cos_sin.dim[1] / 2 % (kWideBytes / size_of(qkv.dtype)) == 0 && is_aligned(qkv.data, kWideBytes) &&
         is_aligned(cos_sin.data, kWideBytes);
}

// For `heads` heads of each row, with `packs` of pairs each.
Grid grid_for(int64_t rows, int64_t packs, int64_t heads) {
  const int64_t x = std::min<int64_t>(packs, kThreads), head_groups = ceil_div(heads, kHeads);
  const int64_t y = std::min<int64_t>(head_groups, kThreads / x);
  return {dim3(static_cast<unsigned>(rows), static_cast<unsigned>(ceil_div(packs, x)),
               static_cast<unsigned>(ceil_div(head_groups, y))),
          dim3(static_cast<unsigned>(x), static_cast<unsigned>(y))};
}

// The same for Pairs: blocks of whole warps, and of a power of 2 of threads side by side.
Grid grid_for_pairs(int64_t rows, int64_t packs, const Shape& shape) {
  const auto at_least = [](int64_t n) { return static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(n))); };
  const int64_t x = std::min<int64_t>(at_least(packs), kThreads),
                head_groups = ceil_div(shape.num_heads, kPairHeads);
  const int64_t y = std::max<int64_t>(std::min(at_least(head_groups), kThreads / x), kWarpSize / x);
  return {dim3(static_cast<unsigned>(rows), static_cast<unsigned>(ceil_div(packs, x)),
               static_cast<unsigned>(ceil_div(head_groups, y))),
          dim3(static_cast<unsigned>(x), static_cast<unsigned>(y))};
}

void rotate(CudaDevice& device, const TensorView& qkv, const TensorView& cos_sin, const Shape& shape) {
  with_plain_type(qkv.dtype, [&](auto element) {
    using T = decltype(element);
    constexpr int kWidth = kWideBytes / sizeof(T);
    const bool wide = fits_wide(qkv, cos_sin);
    launch(device, "rope_forward", wide ? rope_kernel<T, kWidth> : rope_kernel<T, 1>,
           grid_for(qkv.dim[0], shape.half / (wide ? kWidth : 1), shape.num_rotated), qkv.as<T>(),
           cos_sin.as<float>(), shape.row_width, shape.positions, shape.num_rotated, shape.half);
  });
}

// Rotates and saves in one kernel, if groups hold whole packs of one half of a head and lie within a warp.
bool rotate_and_save(CudaDevice& device, const RopeForward& a, const Shape& shape) {
  using T = BFloat16;
  constexpr int kWidth = kWideBytes / sizeof(T);
  static_assert(kWidth == kGroupCodesWidth);
  if (a.qkv.dtype != DType::kBF16 || !fits_wide(a.qkv, a.cos_sin) || !fits_group_codes(a.saved) ||
      shape.half % a.saved.group != 0) {
    return false;
  }
  with_float8_type(a.saved.data.dtype, [&](auto f8) {
    with_plain_type(a.saved.scale.dtype, [&](auto scale) {
      using F8 = decltype(f8);
      using S = decltype(scale);
      launch(device, "rope_forward", rope_save_kernel<T, kWidth, F8, S>,
             grid_for_pairs(a.qkv.dim[0], shape.half / kWidth, shape), a.qkv.as<T>(), a.cos_sin.as<float>(),
             GroupCodesOutput<F8, S>(a.saved), shape);
    });
  });
  return true;
}

// The same for any shape: the rotated matrix is saved first, then read back.
template <typename T>
void save_and_read_back(CudaDevice& device, const RopeForward& a, const Shape& shape) {
  const int64_t rows = a.qkv.dim[0], cols = a.qkv.dim[1];
  const RopeSource<T> rotated(a.qkv, a.cos_sin, shape.num_rotated);
  tiles::write_pieces(device, rotated, rows, cols, a.saved, /*transposed=*/false, /*amax=*/nullptr);
  cuda::quantize(device, Quantize{.x = a.saved, .out = a.qkv});
}

}  // namespace

void rope_forward(Device& any_device, const RopeForward& a) {
  CudaDevice& device = as_cuda(any_device);
  const Shape shape = shape_of(a.qkv, a.cos_sin, a.num_heads, a.num_kv_heads);
  if (a.saved.empty()) {
    rotate(device, a.qkv, a.cos_sin, shape);
  } else if (!rotate_and_save(device, a, shape)) {
    with_plain_type(a.qkv.dtype, [&](auto type) { save_and_read_back<decltype(type)>(device, a, shape); });
  }
}

}  // namespace parka::cuda
