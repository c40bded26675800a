#include "kernels/ops/quantize/quantize_4bit.h"

#include <algorithm>
#include <bit>

#include "kernels/cuda/launch.cuh"

// 4-bit codes of N elements in blocks that share a scale, and their decoding. A lane has 8 elements of 256 that a
// warp takes at once; the first of two elements is a byte's upper half.
namespace parka::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kChunk = 8 * kWarpSize;  // elements that a warp quantizes at once, 8 in each lane
constexpr uint32_t kMagnitudeBits = 0x7fffffffu, kInfinityBits = 0x7f800000u, kNanBits = 0x7fc00000u;

// The inverse of a scale; 0 where it is infinite.
__device__ inline float inverse_of(float absmax) {
  const float inverse = __frcp_rn(absmax);
  return isinf(inverse) ? 0.0f : inverse;
}

// Elements at, at + 1... of x; zeros behind its end.
template <typename T>
__device__ inline void load_eight(const T* x, int64_t at, int64_t count, float (&v)[8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) v[i] = at + i < count ? to_float(x[at + i]) : 0.0f;
}

// The codes of 8 elements, of which the first is element `at`.
template <Format4Bit kFormat>
__device__ inline void store_codes(const float (&v)[8], float inverse, uint8_t* codes, int64_t at, int64_t count) {
  uint32_t packed = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float t = inverse > 0.0f && at + i < count ? __fmul_rn(v[i], inverse) : 0.0f;
    packed |= encode_4bit<kFormat>(t) << (4 * (i ^ 1));
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (at + 2 * i < count) codes[at / 2 + i] = static_cast<uint8_t>(packed >> (8 * i));
  }
}

// A warp quantizes `span` elements: one block of at least kChunk elements, which it reads twice, or kChunk elements
// in several blocks. Infinities and NaNs have the largest magnitudes as integers, too.
template <Format4Bit kFormat, typename T>
__global__ void __launch_bounds__(kThreads)
    quantize_kernel(const T* x, uint8_t* codes, float* absmax, int64_t count, int block_size) {
  const int lane = threadIdx.x % kWarpSize;
  const int64_t warp = int64_t{blockIdx.x} * (kThreads / kWarpSize) + threadIdx.x / kWarpSize;
  const int64_t span = max(block_size, kChunk), first = warp * span + 8 * lane;
  if (warp * span >= count) return;
  float v[8];
  uint32_t largest = 0;
  for (int64_t done = 0; done < span; done += kChunk) {
    load_eight(x, first + done, count, v);
#pragma unroll
    for (int i = 0; i < 8; ++i) largest = max(largest, __float_as_uint(v[i]) & kMagnitudeBits);
  }
  const int lanes = min(block_size / 8, kWarpSize);  // that share a block
  for (int offset = lanes / 2; offset > 0; offset /= 2) {
    largest = max(largest, __shfl_xor_sync(kFullWarp, largest, offset));
  }
  const bool finite = largest < kInfinityBits;
  const float scale = __uint_as_float(finite ? largest : kNanBits);
  const float inverse = finite ? inverse_of(scale) : 0.0f;
  if (lane % lanes == 0 && first < count) absmax[first / block_size] = scale;
  for (int64_t done = 0; done < span; done += kChunk) {
    if (span > kChunk) load_eight(x, first + done, count, v);
    store_codes<kFormat>(v, inverse, codes, first + done, count);
  }
}

constexpr int kMeanThreads = 1024;  // as many as the reference has sums

// A block of threads for each of several means.
__global__ void __launch_bounds__(kMeanThreads) mean_kernel(const float* x, int64_t count, float* mean) {
  __shared__ double sums[kMeanThreads];
  x += blockIdx.x * count;
  double sum = 0;
#pragma unroll 8
  for (int64_t i = threadIdx.x; i < count; i += kMeanThreads) sum += x[i];
  sums[threadIdx.x] = sum;
  for (int half = kMeanThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  if (threadIdx.x == 0) mean[blockIdx.x] = static_cast<float>(sums[0] / static_cast<double>(count));
}

// One block of threads for kNestedBlock scales; the second axis is that of tensors.
__global__ void __launch_bounds__(kNestedBlock)
    quantize_absmax_kernel(const float* absmax, int64_t count, const float* map, const float* offset,
                           uint8_t* codes, float* nested_absmax) {
  __shared__ float values[kNestedBlock], shared[kNestedBlock / kWarpSize];
  const int64_t at = int64_t{blockIdx.x} * kNestedBlock + threadIdx.x, first = blockIdx.y * count;
  values[threadIdx.x] = map[threadIdx.x];
  const float y = at < count ? __fsub_rn(absmax[first + at], offset[blockIdx.y]) : 0.0f;
  const float largest = block_max<kNestedBlock>(fmaxf(fabsf(y), 0.0f), shared);  // which synchronises, too
  if (threadIdx.x == 0) nested_absmax[blockIdx.y * gridDim.x + blockIdx.x] = largest;
  if (at >= count) return;
  const float t = __fmul_rn(y, inverse_of(largest));
  int code = 0;  // midpoints below it are below t
#pragma unroll
  for (int step = 128; step > 0; step /= 2) {
    const float midpoint = 0.5f * __fadd_rn(values[code + step - 1], values[code + step]);
    if (midpoint < t) code += step;
  }
  codes[first + at] = static_cast<uint8_t>(code);
}

// The scales of blocks, in either form.
template <bool kNested>
struct Scales {
  const void* absmax;
  const float *map, *nested_absmax, *offset;
};

// Before its map is read.
template <bool kNested>
struct LoadedScale {
  float absmax = 0;
  int code = 0;
};

template <bool kNested>
__device__ inline LoadedScale<kNested> load_scale(const Scales<kNested>& scales, int64_t block) {
  if constexpr (kNested) {
    return {scales.nested_absmax[block / kNestedBlock], static_cast<const uint8_t*>(scales.absmax)[block]};
  } else {
    return {static_cast<const float*>(scales.absmax)[block]};
  }
}

// A pack is what is stored at once: 16 bytes, or two elements one by one.
constexpr int kPacks = 8;  // that a thread loads before it decodes the first
template <typename T, bool kWide>
constexpr int kPackElements = kWide ? 16 / sizeof(T) : 2;

// The codes of a pack in the low bits, the first byte lowest.
template <int kBytes>
__device__ inline uint32_t load_codes(const uint8_t* codes) {
  if constexpr (kBytes == 4) {
    return *reinterpret_cast<const uint32_t*>(codes);
  } else if constexpr (kBytes == 2) {
    return *reinterpret_cast<const uint16_t*>(codes);
  } else {
    return *codes;
  }
}

// Values and map lie in shared memory; 16 values lie in as many banks, so lanes never wait for each other. The
// second axis of thread blocks is that of tensors, of `count` elements each.
template <typename T, bool kWide, bool kNested>
__global__ void __launch_bounds__(kThreads)
    dequantize_kernel(const uint8_t* codes, Scales<kNested> scales, const __grid_constant__ Values4Bit values,
                      T* out, int64_t count, int block_bits) {
  constexpr int kWidth = kPackElements<T, kWide>;
  constexpr int64_t kStride = int64_t{kThreads} * kWidth;
  __shared__ float value[16], map[kNested ? kNestedBlock : 1];
  if constexpr (kNested) {
    const int64_t tensor = blockIdx.y, blocks = count >> block_bits;  // whole ones if there are several tensors
    codes += tensor * (count / 2);
    out += tensor * count;
    scales.absmax = static_cast<const uint8_t*>(scales.absmax) + tensor * blocks;
    scales.nested_absmax += tensor * ((blocks + kNestedBlock - 1) / kNestedBlock);
    scales.offset += tensor;
  }
  if (threadIdx.x < 16) value[threadIdx.x] = values[threadIdx.x];
  if constexpr (kNested) map[threadIdx.x] = scales.map[threadIdx.x];
  const int64_t first = blockIdx.x * kPacks * kStride + int64_t{threadIdx.x} * kWidth;
  uint32_t packed[kPacks];
  LoadedScale<kNested> loaded[kPacks];
#pragma unroll
  for (int n = 0; n < kPacks; ++n) {
    const int64_t at = first + n * kStride;
    if (at < count) loaded[n] = load_scale(scales, at >> block_bits);
    if (at + kWidth <= count) packed[n] = load_codes<kWidth / 2>(codes + at / 2);
  }
  float offset = 0;
  if constexpr (kNested) offset = *scales.offset;
  __syncthreads();
#pragma unroll
  for (int n = 0; n < kPacks; ++n) {
    const int64_t at = first + n * kStride;
    float scale = loaded[n].absmax;
    if constexpr (kNested) scale = __fadd_rn(__fmul_rn(map[loaded[n].code], scale), offset);
    if (at + kWidth <= count) {
      float x[kWidth];
#pragma unroll
      for (int i = 0; i < kWidth; ++i) x[i] = __fmul_rn(value[packed[n] >> (4 * (i ^ 1)) & 15u], scale);
      if constexpr (kWide) {
        store(out + at, x);
      } else {
#pragma unroll
        for (int i = 0; i < kWidth; ++i) out[at + i] = from_float<T>(x[i]);
      }
    } else {
      for (int64_t i = at; i < count; ++i) {
        out[i] = from_float<T>(__fmul_rn(value[codes[i / 2] >> (i % 2 == 0 ? 4 : 0) & 15], scale));
      }
    }
  }
}

template <Format4Bit kFormat, typename T>
void launch_quantize(const CudaDevice& device, const Quantize4Bit& a) {
  const int64_t N = a.x.numel(), span = std::max(a.block_size, int64_t{kChunk});
  launch(device, "quantize_4bit", quantize_kernel<kFormat, T>,
         {ceil_div(ceil_div(N, span), kThreads / kWarpSize), kThreads}, a.x.as<T>(), a.codes.as<uint8_t>(),
         a.absmax.as<float>(), N, static_cast<int>(a.block_size));
}

template <bool kNested>
Scales<kNested> scales_of(const Dequantize4Bit& a) {
  if constexpr (kNested) {
    return {a.absmax.data, a.map.as<float>(), a.nested_absmax.as<float>(), a.offset.as<float>()};
  } else {
    return {a.absmax.data, nullptr, nullptr, nullptr};
  }
}

template <typename T, bool kNested>
void launch_dequantize(const CudaDevice& device, const Dequantize4Bit& a) {
  const bool wide = is_aligned(a.out.data, 16) && is_aligned(a.codes.data, 4);
  const int64_t width = wide ? kPackElements<T, true> : kPackElements<T, false>;
  const int64_t tensors = kNested ? a.offset.numel() : 1, N = a.out.numel() / tensors;
  launch(
      device, "dequantize_4bit", wide ? dequantize_kernel<T, true, kNested> : dequantize_kernel<T, false, kNested>,
      {dim3(static_cast<unsigned>(ceil_div(N, int64_t{kThreads} * kPacks * width)), static_cast<unsigned>(tensors)),
       kThreads},
      a.codes.as<uint8_t>(), scales_of<kNested>(a), values_of(a.format), a.out.as<T>(), N,
      std::countr_zero(static_cast<uint64_t>(a.block_size)));
}

}  // namespace

void quantize_4bit(Device& device, const Quantize4Bit& a) {
  with_plain_type(a.x.dtype, [&](auto type) {
    using T = decltype(type);
    constexpr Format4Bit kNf4 = Format4Bit::kNf4, kFp4 = Format4Bit::kFp4;
    (a.format == kNf4 ? launch_quantize<kNf4, T> : launch_quantize<kFp4, T>)(as_cuda(device), a);
  });
}

void quantize_absmax(Device& any_device, const QuantizeAbsmax& a) {
  const CudaDevice& device = as_cuda(any_device);
  const int64_t tensors = a.offset.numel(), count = a.absmax.numel() / tensors;
  auto* const offset = a.offset.as<float>();
  launch(device, "quantize_absmax", mean_kernel, {tensors, kMeanThreads}, a.absmax.as<float>(), count, offset);
  launch(device, "quantize_absmax", quantize_absmax_kernel,
         {dim3(static_cast<unsigned>(a.nested_absmax.numel() / tensors), static_cast<unsigned>(tensors)),
          kNestedBlock},
         a.absmax.as<float>(), count, a.map.as<float>(), offset, a.codes.as<uint8_t>(),
         a.nested_absmax.as<float>());
}

void dequantize_4bit(Device& device, const Dequantize4Bit& a) {
  with_plain_type(a.out.dtype, [&](auto type) {
    using T = decltype(type);
    (a.absmax.dtype == DType::kU8 ? launch_dequantize<T, true> : launch_dequantize<T, false>)(as_cuda(device), a);
  });
}

}  // namespace parka::cuda
