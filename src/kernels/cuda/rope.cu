#include "kernels/cuda/rope.h"

#include <algorithm>
#include <bit>

#include "kernels/cuda/check.h"
#include "kernels/cuda/cuda_device.h"
#include "kernels/cuda/matrix_source.cuh"
#include "kernels/cuda/quantize_tiles.cuh"

// Shapes: T rows (tokens), S positions, D elements of a head, W elements of a row of the fused QKV matrix. A block
// works on heads of one row. A thread turns kWidth adjacent pairs of kHeads of them, all by the same angles.
namespace parka::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kHeads = 4;

// Products that nothing can fuse with the sum: the same bits as on the CPU.
__device__ float turned_low(float low, float high, float cos, float sin) {
  return __fsub_rn(__fmul_rn(low, cos), __fmul_rn(high, sin));
}
__device__ float turned_high(float low, float high, float cos, float sin) {
  return __fadd_rn(__fmul_rn(high, cos), __fmul_rn(low, sin));
}

// Turns the first `num_turned` heads of each row (queries and keys); sign -1 turns them back. half: D / 2.
template <typename T, int kWidth>
__global__ void __launch_bounds__(kThreads)
    rope_kernel(T* qkv_TW, const float* cos_sin_SD, int64_t row_width, unsigned num_positions, int num_turned,
                int half, float sign) {
  const int pair = (blockIdx.y * blockDim.x + threadIdx.x) * kWidth;
  if (pair >= half) return;
  const int first_head = blockIdx.z * blockDim.y * kHeads + threadIdx.y;
  const auto head = [&](int n) { return first_head + n * static_cast<int>(blockDim.y); };
  T* const row = qkv_TW + int64_t{blockIdx.x} * row_width + pair;
  Stored<T, kWidth> low[kHeads], high[kHeads];
#pragma unroll
  for (int n = 0; n < kHeads; ++n) {
    low[n] = load_stored<kWidth>(row + head(n) * 2 * half, head(n) < num_turned);
    high[n] = load_stored<kWidth>(row + head(n) * 2 * half + half, head(n) < num_turned);
  }
  const float* const cos_D = cos_sin_SD + int64_t{blockIdx.x % num_positions} * 2 * half + pair;
  const auto cos = load_stored<kWidth>(cos_D), sin = load_stored<kWidth>(cos_D + half);
#pragma unroll
  for (int n = 0; n < kHeads; ++n) {
    if (head(n) >= num_turned) return;
    float new_low[kWidth], new_high[kWidth];
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      new_low[i] = turned_low(low[n][i], high[n][i], cos[i], sign * sin[i]);
      new_high[i] = turned_high(low[n][i], high[n][i], cos[i], sign * sin[i]);
    }
    store(row + head(n) * 2 * half, new_low);
    store(row + head(n) * 2 * half + half, new_high);
  }
}

// What all kernels over pairs have in common.
struct Shape {
  int64_t row_width;
  unsigned num_positions;
  int num_turned, num_heads;  // query and key heads; and value heads, which are not turned
  int half;                   // D / 2
};

// A thread's pairs of one row, as in rope_kernel, of all heads. All threads of a block stay to the end.
template <typename T, int kWidth>
struct Pairs {
  int first_head, pair;
  bool in_head;
  int64_t offset;  // of the pair in head 0
  Stored<T, kWidth> low[kHeads], high[kHeads];
  Stored<float, kWidth> cos, sin;

  __device__ Pairs(const T* qkv_TW, const float* cos_sin_SD, const Shape& shape)
      : first_head(blockIdx.z * blockDim.y * kHeads + threadIdx.y),
        pair((blockIdx.y * blockDim.x + threadIdx.x) * kWidth),
        in_head(pair < shape.half),
        offset(int64_t{blockIdx.x} * shape.row_width + pair) {
#pragma unroll
    for (int n = 0; n < kHeads; ++n) {
      const T* const p = qkv_TW + offset + head(n) * 2 * shape.half;
      low[n] = load_stored<kWidth>(p, has(n, shape));
      high[n] = load_stored<kWidth>(p + shape.half, has(n, shape));
    }
    const float* const cos_D = cos_sin_SD + int64_t{blockIdx.x % shape.num_positions} * 2 * shape.half + pair;
    cos = load_stored<kWidth>(cos_D, in_head);
    sin = load_stored<kWidth>(cos_D + shape.half, in_head);
  }

  __device__ int head(int n) const { return first_head + n * static_cast<int>(blockDim.y); }
  __device__ bool has(int n, const Shape& shape) const { return in_head && head(n) < shape.num_heads; }

  // The pairs of one head, turned if it is a query or a key.
  __device__ void turn(int n, const Shape& shape, float sign, float (&new_low)[kWidth],
                       float (&new_high)[kWidth]) const {
    const bool turns = head(n) < shape.num_turned;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      new_low[i] = turns ? turned_low(low[n][i], high[n][i], cos[i], sign * sin[i]) : low[n][i];
      new_high[i] = turns ? turned_high(low[n][i], high[n][i], cos[i], sign * sin[i]) : high[n][i];
    }
  }
};

// Where rotated values go: codes with scales S for groups of `lanes` neighbouring threads' columns.
template <typename F8, typename S>
struct SavedGroups {
  F8* codes_TW;
  S* scales;
  int across;  // scales in a row
  int lanes;   // a power of 2; of threads side by side there are a multiple
};

// Writes kWidth adjacent columns from `offset` on, and leaves in x what they decode to. To be called by whole
// warps.
template <typename F8, typename S, int kWidth>
__device__ void save(const SavedGroups<F8, S>& saved, int64_t offset, int column, bool wanted, float (&x)[kWidth]) {
  constexpr int kWords = kWidth / 4;
  float amax = 0.0f;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) amax = max_magnitude(amax, x[i]);
  for (int step = saved.lanes / 2; step > 0; step /= 2) amax = fmaxf(amax, __shfl_xor_sync(kFullWarp, amax, step));
  const PieceScale piece = scale_for<F8, S>(amax);
  Pack<uint32_t, kWords> codes;
#pragma unroll
  for (int w = 0; w < kWords; ++w) {
    float four[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) four[i] = __fmul_rn(x[4 * w + i], piece.inverse);
    codes.element[w] = encode_float8x4<F8>(four[0], four[1], four[2], four[3]);
    decode_float8x4<F8>(codes.element[w], four);
#pragma unroll
    for (int i = 0; i < 4; ++i) x[4 * w + i] = __fmul_rn(four[i], piece.scale);
  }
  if (!wanted) return;
  *reinterpret_cast<Pack<uint32_t, kWords>*>(saved.codes_TW + offset) = codes;
  if (threadIdx.x % saved.lanes != 0) return;
  const int group = column / kWidth / saved.lanes;
  saved.scales[int64_t{blockIdx.x} * saved.across + group] = from_float<S>(piece.scale);  // exact: it was rounded
}

// Turns queries and keys, quantizes all heads, and writes what they decode to back.
template <typename T, int kWidth, typename F8, typename S>
__global__ void __launch_bounds__(kThreads)
    rope_save_kernel(T* qkv_TW, const float* cos_sin_SD, const SavedGroups<F8, S> saved, const Shape shape) {
  const Pairs<T, kWidth> pairs(qkv_TW, cos_sin_SD, shape);
#pragma unroll
  for (int n = 0; n < kHeads; ++n) {
    float low[kWidth], high[kWidth];
    pairs.turn(n, shape, 1.0f, low, high);
    const bool wanted = pairs.has(n, shape);
    const int head_start = pairs.head(n) * 2 * shape.half;
    const int64_t offset = pairs.offset + head_start;
    save(saved, offset, pairs.pair + head_start, wanted, low);
    save(saved, offset + shape.half, pairs.pair + head_start + shape.half, wanted, high);
    if (!wanted) continue;
    store(qkv_TW + offset, low);
    store(qkv_TW + offset + shape.half, high);
  }
}

// Raises *amax to the largest magnitude of the matrix with its queries and keys turned back, rounded to T.
template <typename T, int kWidth>
__global__ void __launch_bounds__(kThreads)
    rope_amax_kernel(const T* qkv_TW, const float* cos_sin_SD, float* amax, const Shape shape) {
  __shared__ float shared[kThreads / kWarpSize];
  const Pairs<T, kWidth> pairs(qkv_TW, cos_sin_SD, shape);
  float largest = 0.0f;
#pragma unroll
  for (int n = 0; n < kHeads; ++n) {
    float low[kWidth], high[kWidth];
    pairs.turn(n, shape, -1.0f, low, high);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) largest = max_magnitude(max_magnitude(largest, low[i]), high[i]);
  }
  largest = warp_max(largest);
  const int thread = static_cast<int>(threadIdx.y * blockDim.x + threadIdx.x);
  const int warps = static_cast<int>(blockDim.x * blockDim.y) / kWarpSize;
  if (thread % kWarpSize == 0) shared[thread / kWarpSize] = largest;
  __syncthreads();
  if (thread != 0) return;
  for (int warp = 1; warp < warps; ++warp) largest = fmaxf(largest, shared[warp]);
  // Rounding keeps the order of numbers: the maximum of rounded ones is the maximum, rounded.
  raise_to(amax, to_float(from_float<T>(largest)));
}

// The turned matrix as a Source (quantize_tiles.cuh says what that is); kRounded: to T.
template <typename T, bool kRounded>
struct RopeSource {
  const T* qkv_TW;
  const float* cos_sin_SD;
  int row_width, num_positions, half;
  int turned_width;  // columns of queries and keys
  float sign;

  RopeSource(const TensorView& qkv, const TensorView& cos_sin, int64_t num_turned, float sign_)
      : qkv_TW(qkv.as<T>()),
        cos_sin_SD(cos_sin.as<float>()),
        row_width(static_cast<int>(qkv.dim[1])),
        num_positions(static_cast<int>(cos_sin.dim[0])),
        half(static_cast<int>(cos_sin.dim[1] / 2)),
        turned_width(static_cast<int>(num_turned * cos_sin.dim[1])),
        sign(sign_) {}

  bool fits_wide() const {
    return half % kSourceWidth == 0 && is_aligned(qkv_TW, 16) && is_aligned(cos_sin_SD, 16);
  }
  __device__ void load(int row, int col, float (&x)[kSourceWidth]) const { load_columns(row, col, x); }
  __device__ float element(int row, int col) const {
    float x[1];
    load_columns(row, col, x);
    return x[0];
  }

 private:
  // Columns that lie in one half of a head.
  template <int kWidth>
  __device__ void load_columns(int row, int col, float (&x)[kWidth]) const {
    const int column = col % (2 * half);  // of the head
    const bool is_low = column < half;
    const T* const own_W = qkv_TW + int64_t{row} * row_width + col;
    const float* const cos_D =
        cos_sin_SD + int64_t{row % num_positions} * 2 * half + (is_low ? column : column - half);
    const bool turns = col < turned_width;
    const auto own = load_stored<kWidth>(own_W);
    const auto partner = load_stored<kWidth>(is_low ? own_W + half : own_W - half, turns);
    const auto cos = load_stored<kWidth>(cos_D, turns), sin = load_stored<kWidth>(cos_D + half, turns);
    const float partner_sign = is_low ? -sign : sign;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      // turned_low and turned_high: their difference is a sum with the negated product.
      float value = __fadd_rn(__fmul_rn(own[i], cos[i]), __fmul_rn(partner[i], partner_sign * sin[i]));
      if constexpr (kRounded) value = to_float(from_float<T>(value));
      x[i] = turns ? value : own[i];
    }
  }
};

// ---- Launches ----

constexpr int kWideBytes = 16;

Shape shape_of(const TensorView& qkv, const TensorView& cos_sin, int64_t num_heads, int64_t num_kv_heads) {
  PARKA_REQUIRE(qkv.dim[0] <= INT32_MAX && qkv.dim[1] <= INT32_MAX && cos_sin.dim[0] <= INT32_MAX);
  return {qkv.dim[1], static_cast<unsigned>(cos_sin.dim[0]), static_cast<int>(num_heads + num_kv_heads),
          static_cast<int>(num_heads + 2 * num_kv_heads), static_cast<int>(cos_sin.dim[1] / 2)};
}

bool fits_wide(const TensorView& qkv, const TensorView& cos_sin) {
  return cos_sin.dim[1] / 2 % (kWideBytes / size_of(qkv.dtype)) == 0 && is_aligned(qkv.data, kWideBytes) &&
         is_aligned(cos_sin.data, kWideBytes);
}

struct Launch {
  dim3 blocks, threads;
};

// For `heads` heads of each row, with `packs` of pairs each.
Launch launch_for(int64_t rows, int64_t packs, int64_t heads) {
  const int64_t x = std::min<int64_t>(packs, kThreads), head_groups = ceil_div(heads, kHeads);
  const int64_t y = std::min<int64_t>(head_groups, kThreads / x);
  return {dim3(static_cast<unsigned>(rows), static_cast<unsigned>(ceil_div(packs, x)),
               static_cast<unsigned>(ceil_div(head_groups, y))),
          dim3(static_cast<unsigned>(x), static_cast<unsigned>(y))};
}

// The same for Pairs: blocks of whole warps, and of a power of 2 of threads side by side.
Launch launch_for_pairs(int64_t rows, int64_t packs, const Shape& shape) {
  const auto at_least = [](int64_t n) { return static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(n))); };
  const int64_t x = std::min<int64_t>(at_least(packs), kThreads), head_groups = ceil_div(shape.num_heads, kHeads);
  const int64_t y = std::max<int64_t>(std::min(at_least(head_groups), kThreads / x), kWarpSize / x);
  return {dim3(static_cast<unsigned>(rows), static_cast<unsigned>(ceil_div(packs, x)),
               static_cast<unsigned>(ceil_div(head_groups, y))),
          dim3(static_cast<unsigned>(x), static_cast<unsigned>(y))};
}

void turn(CudaDevice& device, const TensorView& qkv, const TensorView& cos_sin, const Shape& shape, float sign) {
  with_plain_type(qkv.dtype, [&](auto element) {
    using T = decltype(element);
    constexpr int kWidth = kWideBytes / sizeof(T);
    const bool wide = fits_wide(qkv, cos_sin);
    const auto kernel = wide ? rope_kernel<T, kWidth> : rope_kernel<T, 1>;
    const Launch launch = launch_for(qkv.dim[0], shape.half / (wide ? kWidth : 1), shape.num_turned);
    kernel<<<launch.blocks, launch.threads, 0, device.stream()>>>(
        qkv.as<T>(), cos_sin.as<float>(), shape.row_width, shape.num_positions, shape.num_turned, shape.half, sign);
  });
}

// Turns and saves in one kernel, if groups hold whole packs of one half of a head and lie within a warp.
bool turn_and_save(CudaDevice& device, const RopeForward& a, const Shape& shape) {
  using T = BFloat16;
  constexpr int kWidth = kWideBytes / sizeof(T);
  const auto group = static_cast<uint64_t>(a.saved.group);
  if (a.qkv.dtype != DType::kBF16 || !fits_wide(a.qkv, a.cos_sin) || !is_aligned(a.saved.data.data, kWidth) ||
      !std::has_single_bit(group) || group < kWidth || group > uint64_t{kWidth} * kWarpSize ||
      shape.half % static_cast<int>(group) != 0) {
    return false;
  }
  const Launch launch = launch_for_pairs(a.qkv.dim[0], shape.half / kWidth, shape);
  with_float8_type(a.saved.data.dtype, [&](auto f8) {
    with_plain_type(a.saved.scale.dtype, [&](auto scale) {
      using F8 = decltype(f8);
      using S = decltype(scale);
      const SavedGroups<F8, S> saved{.codes_TW = a.saved.data.as<F8>(),
                                     .scales = a.saved.scale.as<S>(),
                                     .across = static_cast<int>(a.saved.scale.dim[1]),
                                     .lanes = static_cast<int>(group) / kWidth};
      rope_save_kernel<T, kWidth, F8, S><<<launch.blocks, launch.threads, 0, device.stream()>>>(
          a.qkv.as<T>(), a.cos_sin.as<float>(), saved, shape);
    });
  });
  return true;
}

// The same of any shape: the turned matrix is saved first, then read back.
template <typename T>
void save_and_read_back(CudaDevice& device, const RopeForward& a, const Shape& shape) {
  const int64_t rows = a.qkv.dim[0], cols = a.qkv.dim[1];
  const RopeSource<T, false> turned(a.qkv, a.cos_sin, shape.num_turned, 1.0f);
  write_tiles(device, turned, rows, cols, a.saved, {}, nullptr);
  write_tiles(device, AnySource(a.saved), rows, cols, a.qkv, {}, nullptr);
}

bool is_tensor_scaled(const ScaledView& t) { return !t.empty() && t.scaling == Scaling::kTensor; }

// Quantizes the matrix with its queries and keys turned back, which are written nowhere else.
template <typename T>
void quantize_turned_back(CudaDevice& device, const RopeBackward& a, const Shape& shape) {
  constexpr int kWidth = kWideBytes / sizeof(T);
  const int64_t rows = a.d_qkv.dim[0], cols = a.d_qkv.dim[1];
  const RopeSource<T, true> source(a.d_qkv, a.cos_sin, shape.num_turned, -1.0f);
  float* amax = nullptr;
  if (is_tensor_scaled(a.d_quantized) || is_tensor_scaled(a.d_quantized_t)) {
    amax = static_cast<float*>(device.workspace("rope_backward", sizeof(float)));
    check(cudaMemsetAsync(amax, 0, sizeof(float), device.stream()), "rope_backward");
    const bool wide = fits_wide(a.d_qkv, a.cos_sin);
    const auto kernel = wide ? rope_amax_kernel<T, kWidth> : rope_amax_kernel<T, 1>;
    const Launch launch = launch_for_pairs(rows, shape.half / (wide ? kWidth : 1), shape);
    kernel<<<launch.blocks, launch.threads, 0, device.stream()>>>(a.d_qkv.as<T>(), a.cos_sin.as<float>(), amax,
                                                                  shape);
  }
  write_tiles(device, source, rows, cols, a.d_quantized, a.d_quantized_t, amax);
}

}  // namespace

void rope_forward(Device& any_device, const RopeForward& a) {
  CudaDevice& device = as_cuda(any_device);
  const Shape shape = shape_of(a.qkv, a.cos_sin, a.num_heads, a.num_kv_heads);
  if (a.saved.empty()) {
    turn(device, a.qkv, a.cos_sin, shape, 1.0f);
  } else if (!turn_and_save(device, a, shape)) {
    with_plain_type(a.qkv.dtype, [&](auto type) { save_and_read_back<decltype(type)>(device, a, shape); });
  }
  check_launch("rope_forward");
}

void rope_backward(Device& any_device, const RopeBackward& a) {
  CudaDevice& device = as_cuda(any_device);
  const Shape shape = shape_of(a.d_qkv, a.cos_sin, a.num_heads, a.num_kv_heads);
  if (a.d_quantized.empty() && a.d_quantized_t.empty()) {
    turn(device, a.d_qkv, a.cos_sin, shape, -1.0f);
  } else {
    with_plain_type(a.d_qkv.dtype, [&](auto type) { quantize_turned_back<decltype(type)>(device, a, shape); });
  }
  check_launch("rope_backward");
}

}  // namespace parka::cuda
