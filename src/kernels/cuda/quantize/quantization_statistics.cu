#include "kernels/ops/quantize/quantization_statistics.h"

#include <algorithm>
#include <cstdint>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/quantize/matrix_source.cuh"
#include "kernels/op/workspace.h"

// Totals of a matrix beside its quantized copy, for telemetry: blocks leave theirs, and one kernel adds them up.
namespace parka::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;

// ---- Totals, added up in a fixed order ----

struct Totals {
  double squares, error_squares;
  float amax;
  uint32_t saturated, underflowed, not_finite;

  __device__ void add(const Totals& other) {
    squares += other.squares;
    error_squares += other.error_squares;
    amax = fmaxf(amax, other.amax);
    saturated += other.saturated;
    underflowed += other.underflowed;
    not_finite += other.not_finite;
  }
  // The totals of the lane `offset` away.
  __device__ Totals of_lane(int offset) const {
    return {__shfl_xor_sync(kFullWarp, squares, offset),     __shfl_xor_sync(kFullWarp, error_squares, offset),
            __shfl_xor_sync(kFullWarp, amax, offset),        __shfl_xor_sync(kFullWarp, saturated, offset),
            __shfl_xor_sync(kFullWarp, underflowed, offset), __shfl_xor_sync(kFullWarp, not_finite, offset)};
  }
};

// The blocks of a matrix leave these to the kernel that adds them up, in the workspace.
constexpr int64_t kMaxBlocks = kStatisticsBlocks;
static_assert(kMaxBlocks * sizeof(Totals) == kStatisticsWorkspaceBytes);

// The sum over a block, in thread 0.
__device__ Totals block_totals(Totals totals) {
  __shared__ Totals of_warp[kWarps];
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) totals.add(totals.of_lane(offset));
  if (threadIdx.x % kWarpSize == 0) of_warp[threadIdx.x / kWarpSize] = totals;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int warp = 1; warp < kWarps; ++warp) totals.add(of_warp[warp]);
  }
  return totals;
}

// ---- Matrices ----

// Numbers [R, C] in rows of `stride`, and the codes [R, C] that they became.
template <typename X, typename F8>
struct Compared {
  const X* x;
  const uint8_t* codes_RC;
  PieceScales scales;
  int rows, cols;
  int64_t stride;
  double threshold;  // saturation_threshold

  bool fits_wide() const {
    return cols % kSourceWidth == 0 && stride % kSourceWidth == 0 && is_aligned(x, 16) &&
           is_aligned(codes_RC, 16) && scales.fits_wide();
  }

  __device__ void add(float number, uint32_t code, float value, Totals& totals) const {
    if (!isfinite(number) || !isfinite(value)) {
      ++totals.not_finite;
      return;
    }
    const float magnitude = fabsf(number);
    const double exact = number, error = exact - static_cast<double>(value);
    totals.squares = fma(exact, exact, totals.squares);
    totals.error_squares = fma(error, error, totals.error_squares);
    totals.amax = fmaxf(totals.amax, magnitude);
    code &= 0x7f;
    if (code == 0 && magnitude > 0.0f) ++totals.underflowed;
    if (code == kFloat8Traits<F8>.max_code) {
      // Both products are exact.
      const double largest = kFloat8Traits<F8>.max;
      if (static_cast<double>(magnitude) * largest > threshold * static_cast<double>(fabsf(value))) {
        ++totals.saturated;
      }
    }
  }

  __device__ void add_16(int row, int col, Totals& totals) const {
    const auto numbers = load_stored<kSourceWidth>(x + row * stride + col);
    const auto codes = load_stored<kSourceWidth>(codes_RC + int64_t{row} * cols + col);
    float values[kSourceWidth];
    decode_16<F8>(codes.word, scales.wide_at(row, col), values);
#pragma unroll
    for (int i = 0; i < kSourceWidth; ++i) {
      add(numbers[i], codes.word[i / 4] >> 8 * (i % 4), values[i], totals);
    }
  }

  __device__ void add_1(int row, int col, Totals& totals) const {
    const uint8_t code = codes_RC[int64_t{row} * cols + col];
    add(to_float(x[row * stride + col]), code, decode_1<F8>(code, scales.at(row, col)), totals);
  }
};

// Block b has rows b, b + number of blocks, ...
template <bool kWide, typename X, typename F8>
__global__ void __launch_bounds__(kThreads) partial_kernel(const Compared<X, F8> a, Totals* partial) {
  constexpr int kStep = kThreads * (kWide ? kSourceWidth : 1);
  Totals totals = {};
  for (int row = static_cast<int>(blockIdx.x); row < a.rows; row += static_cast<int>(gridDim.x)) {
    for (int64_t col = int64_t{threadIdx.x} * (kWide ? kSourceWidth : 1); col < a.cols; col += kStep) {
      if constexpr (kWide) {
        a.add_16(row, static_cast<int>(col), totals);
      } else {
        a.add_1(row, static_cast<int>(col), totals);
      }
    }
  }
  totals = block_totals(totals);
  if (threadIdx.x == 0) partial[blockIdx.x] = totals;
}

// One block.
__global__ void __launch_bounds__(kThreads) total_kernel(const Totals* partial, int num_partial, float elements,
                                                         const float* scale, bool accumulate, float* out) {
  Totals totals = {};
  for (int i = static_cast<int>(threadIdx.x); i < num_partial; i += kThreads) totals.add(partial[i]);
  totals = block_totals(totals);
  if (threadIdx.x != 0) return;
  auto& to = *reinterpret_cast<QuantizationTotals*>(out);
  const QuantizationTotals before = accumulate ? to : QuantizationTotals{};
  const auto joined = [](float norm, double squares) {
    return static_cast<float>(sqrt(fma(static_cast<double>(norm), static_cast<double>(norm), squares)));
  };
  to = {
      .elements = before.elements + elements,
      .amax = fmaxf(before.amax, totals.amax),
      .scale = fmaxf(before.scale, scale == nullptr ? 0.0f : *scale),
      .saturated = before.saturated + static_cast<float>(totals.saturated),
      .underflowed = before.underflowed + static_cast<float>(totals.underflowed),
      .not_finite = before.not_finite + static_cast<float>(totals.not_finite),
      .norm = joined(before.norm, totals.squares),
      .error_norm = joined(before.error_norm, totals.error_squares),
  };
}

template <typename X, typename F8>
void add_up(CudaDevice& device, const QuantizationStatistics& a, int64_t num_blocks, Totals* partial) {
  const Compared<X, F8> compared{.x = a.x.as<X>(),
                                 .codes_RC = reinterpret_cast<const uint8_t*>(a.q.data.as<F8>()),
                                 .scales = PieceScales(a.q),
                                 .rows = static_cast<int>(a.q.num_rows()),
                                 .cols = static_cast<int>(a.q.num_cols()),
                                 .stride = a.x.dim[1],
                                 .threshold = saturation_threshold(a.q.data.dtype)};
  launch(device, "quantization_statistics",
         compared.fits_wide() ? partial_kernel<true, X, F8> : partial_kernel<false, X, F8>, {num_blocks, kThreads},
         compared, partial);
}

// ---- Moments ----

__global__ void clear_moment_statistics_kernel(int* counts, float* amax) {
  counts[threadIdx.x] = 0;
  if (threadIdx.x == 0) amax[0] = __int_as_float(0x7f800000);
  if (threadIdx.x == 1) amax[1] = 0.0f;
}

// Counts are whole numbers and an amax's bits are ordered as it is: atomic operations are exact in any order.
__global__ void __launch_bounds__(kThreads) moment_statistics_kernel(const uint8_t* exponent, const float* amax,
                                                                     int64_t num_groups, int* counts, int* range) {
  static_assert(kThreads == kNumMomentExponents);
  __shared__ int of_block[kNumMomentExponents];
  of_block[threadIdx.x] = 0;
  __syncthreads();
  int smallest = 0x7f800000, largest = 0;
  for (int64_t g = int64_t{blockIdx.x} * kThreads + threadIdx.x; g < num_groups;
       g += int64_t{gridDim.x} * kThreads) {
    const int bits = __float_as_int(amax[g]);
    if (bits == 0) continue;
    atomicAdd(&of_block[exponent[g]], 1);
    smallest = min(smallest, bits);
    largest = max(largest, bits);
  }
  __syncthreads();
  if (of_block[threadIdx.x] != 0) atomicAdd(&counts[threadIdx.x], of_block[threadIdx.x]);
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    smallest = min(smallest, __shfl_xor_sync(kFullWarp, smallest, offset));
    largest = max(largest, __shfl_xor_sync(kFullWarp, largest, offset));
  }
  if (threadIdx.x % kWarpSize != 0) return;
  atomicMin(&range[0], smallest);
  atomicMax(&range[1], largest);
}

}  // namespace

void quantization_statistics(Device& any_device, const QuantizationStatistics& a) {
  CudaDevice& device = as_cuda(any_device);
  const int64_t rows = a.q.num_rows(), cols = a.q.num_cols();
  PARKA_REQUIRE(rows <= INT32_MAX && cols <= INT32_MAX && rows * cols <= UINT32_MAX);
  const int64_t num_blocks = std::clamp<int64_t>(rows, 1, kMaxBlocks);
  auto* const partial = static_cast<Totals*>(device.workspace("quantization_statistics", workspace_of(a)));
  with_plain_type(a.x.dtype, [&](auto x) {
    with_float8_type(a.q.data.dtype,
                     [&](auto f8) { add_up<decltype(x), decltype(f8)>(device, a, num_blocks, partial); });
  });
  const bool has_scale = rows * cols > 0 && a.q.scaling == Scaling::kTensor;
  const float* const scale = has_scale ? a.q.scale.as<float>() : nullptr;
  launch(device, "quantization_statistics", total_kernel, {1, kThreads}, partial, static_cast<int>(num_blocks),
         static_cast<float>(rows * cols), scale, a.accumulate, a.totals.as<float>());
}

void moment_statistics(Device& any_device, const MomentStatistics& a) {
  const CudaDevice& device = as_cuda(any_device);
  const int64_t num_groups = a.moment.amax.numel();
  auto* const counts = a.counts.as<int32_t>();
  auto* const amax = a.amax.as<float>();
  launch(device, "moment_statistics", clear_moment_statistics_kernel, {1, kNumMomentExponents}, counts, amax);
  if (num_groups == 0) return;
  launch(device, "moment_statistics", moment_statistics_kernel,
         {std::min(ceil_div(num_groups, kThreads), kMaxBlocks), kThreads}, a.moment.exponent.as<uint8_t>(),
         a.moment.amax.as<float>(), num_groups, counts, reinterpret_cast<int*>(amax));
}

}  // namespace parka::cuda
