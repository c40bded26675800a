#pragma once
#include <algorithm>
#include <iterator>

#include "kernels/cuda/launch.cuh"

// out[n] = f(x), x[k] = inputs[k][n]: computed in fp32 and rounded once. `out` may be an input.
namespace parka::cuda {

constexpr int kMapThreads = 256;
constexpr int kMapPacks = 4;  // of each input, which a thread loads before it uses the first

template <typename X, int kInputs>
struct MapInputs {
  const X* x[kInputs];
};

// Each thread has kMapPacks packs of kWidth elements, and one thread the elements that fill no pack.
template <int kWidth, typename F, typename X, typename Y, int kInputs>
__global__ void __launch_bounds__(kMapThreads) map_kernel(F f, MapInputs<X, kInputs> in, Y* out, int64_t count) {
  constexpr int64_t kStride = int64_t{kMapThreads} * kWidth;
  const int64_t first = blockIdx.x * kMapPacks * kStride + int64_t{threadIdx.x} * kWidth;
  Stored<X, kWidth> packs[kMapPacks][kInputs];
#pragma unroll
  for (int n = 0; n < kMapPacks; ++n) {
    const int64_t at = first + n * kStride;
#pragma unroll
    for (int k = 0; k < kInputs; ++k) packs[n][k] = load_stored<kWidth>(in.x[k] + at, at + kWidth <= count);
  }
#pragma unroll
  for (int n = 0; n < kMapPacks; ++n) {
    const int64_t at = first + n * kStride;
    float x[kInputs], y[kWidth];
    if (at + kWidth <= count) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
#pragma unroll
        for (int k = 0; k < kInputs; ++k) x[k] = packs[n][k][i];
        y[i] = f(x);
      }
      store(out + at, y);
    } else {
      for (int64_t i = at; i < count; ++i) {
        for (int k = 0; k < kInputs; ++k) x[k] = to_float(in.x[k][i]);
        out[i] = from_float<Y>(f(x));
      }
    }
  }
}

template <typename F, typename X, typename Y, int kInputs>
void map_elements(const CudaDevice& device, std::string_view op, const F& f, const X* const (&inputs)[kInputs],
                  Y* out, int64_t count) {
  constexpr int kWide = 16 / sizeof(X);
  MapInputs<X, kInputs> in;
  std::copy(std::begin(inputs), std::end(inputs), in.x);
  const bool wide = is_aligned(out, 16) &&
                    std::all_of(std::begin(inputs), std::end(inputs), [](const X* x) { return is_aligned(x, 16); });
  launch(device, op, wide ? map_kernel<kWide, F, X, Y, kInputs> : map_kernel<1, F, X, Y, kInputs>,
         {ceil_div(count, int64_t{kMapThreads} * kMapPacks * (wide ? kWide : 1)), kMapThreads}, f, in, out, count);
}

}  // namespace parka::cuda
