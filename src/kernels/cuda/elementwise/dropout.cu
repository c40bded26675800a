#include "kernels/ops/elementwise/dropout.h"

#include "kernels/cuda/vector.cuh"
#include "kernels/device/cuda/check.h"
#include "kernels/device/cuda/cuda_device.h"

namespace parka::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kChunk = 4;  // columns that share a draw

struct Mask {
  const int32_t* position;
  int64_t rows, cols, sequence_length;
  uint64_t seed;
  uint32_t stream, threshold;
  float factor;

  __device__ std::array<uint32_t, 4> words(int64_t t, int64_t chunks, int64_t c) const {
    const int64_t sequence = int64_t{position[1]} + t / sequence_length * position[2];
    return dropout_words(seed, stream, static_cast<uint32_t>(position[0]),
                         static_cast<uint64_t>(sequence * sequence_length + t % sequence_length),
                         static_cast<uint64_t>(chunks), static_cast<uint64_t>(c));
  }
  __device__ float apply(uint32_t word, float x) const { return word < threshold ? 0.0f : __fmul_rn(x, factor); }
};

// A thread has the four columns of a draw: side by side in memory where they are `kWide`. Neighbours have the next
// columns, or with kTransposed the next rows, which lie side by side there.
template <typename T, bool kWide, bool kTransposed, bool kAccumulate>
__global__ void __launch_bounds__(kThreads) dropout_kernel(const T* x, T* y, Mask mask) {
  const int64_t chunks = (mask.cols + kChunk - 1) / kChunk;
  const int64_t n = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (n >= mask.rows * chunks) return;
  const int64_t t = kTransposed ? n % mask.rows : n / chunks, c = kTransposed ? n / mask.rows : n % chunks;
  const std::array<uint32_t, 4> words = mask.words(t, chunks, c);
  if constexpr (kWide) {
    const int64_t at = t * mask.cols + c * kChunk;
    float values[kChunk], sum[kChunk] = {};
    load(x + at, values);
    if constexpr (kAccumulate) load(y + at, sum);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) sum[i] = __fadd_rn(sum[i], mask.apply(words[i], values[i]));
    store(y + at, sum);
  } else {
    for (int i = 0; i < kChunk && c * kChunk + i < mask.cols; ++i) {
      const int64_t k = c * kChunk + i, at = kTransposed ? k * mask.rows + t : t * mask.cols + k;
      const float kept = mask.apply(words[i], to_float(x[at]));
      y[at] = from_float<T>(kAccumulate ? __fadd_rn(to_float(y[at]), kept) : kept);
    }
  }
}

template <typename T, bool kAccumulate>
void launch(cudaStream_t stream, const Dropout& a, const Mask& mask) {
  constexpr size_t kBytes = kChunk * sizeof(T);
  const bool wide = mask.cols % kChunk == 0 && is_aligned(a.x.data, kBytes) && is_aligned(a.y.data, kBytes);
  const auto kernel = a.transposed ? dropout_kernel<T, false, true, kAccumulate>
                      : wide       ? dropout_kernel<T, true, false, kAccumulate>
                                   : dropout_kernel<T, false, false, kAccumulate>;
  const int64_t blocks = ceil_div(mask.rows * ceil_div(mask.cols, int64_t{kChunk}), int64_t{kThreads});
  PARKA_REQUIRE(blocks <= INT32_MAX);
  kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(a.x.as<T>(), a.y.as<T>(), mask);
}

}  // namespace

void dropout(Device& device, const Dropout& a) {
  const Mask mask = {a.position.as<int32_t>(),
                     a.x.dim[a.transposed ? 1 : 0],
                     a.x.dim[a.transposed ? 0 : 1],
                     a.sequence_length,
                     a.seed,
                     a.stream,
                     dropout_threshold(a.probability),
                     dropout_factor(a.probability)};
  with_plain_type(a.x.dtype, [&](auto type) {
    using T = decltype(type);
    if (a.accumulate) {
      launch<T, true>(as_cuda(device).stream(), a, mask);
    } else {
      launch<T, false>(as_cuda(device).stream(), a, mask);
    }
  });
  check_launch("dropout");
}

}  // namespace parka::cuda
