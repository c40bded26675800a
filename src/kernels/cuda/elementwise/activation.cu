#include "kernels/ops/elementwise/activation.h"

#include "kernels/cuda/swiglu/swiglu_elements.cuh"
#include "kernels/cuda/vector.cuh"
#include "kernels/device/cuda/check.h"
#include "kernels/device/cuda/cuda_device.h"

namespace parka::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kPacks = 2;  // of each tensor, which a thread loads before it computes

struct Activated {
  float y, slope;
};

// Of kGelu the normal distribution function by erfc, which keeps its digits where it is nearly 0.
__device__ Activated activated(Activation kind, float x) {
  if (kind == Activation::kGelu) {
    constexpr float kSqrtHalf = 0.70710678f, kInverseSqrtTwoPi = 0.39894228f;
    const float probability = 0.5f * erfcf(-kSqrtHalf * x);
    const float density = kInverseSqrtTwoPi * expf(-0.5f * x * x);
    return {x * probability, fmaf(x, density, probability)};
  }
  const bool linear = kind == Activation::kQuickGelu || kind == Activation::kSilu;
  const float factor = kind == Activation::kSilu ? 1.0f : kQuickGeluFactor;
  const float s = sigmoid(linear ? factor * x : gelu_argument(x));
  const float y = x * s, change = y * (1.0f - s);
  return {y, fmaf(change, linear ? factor : gelu_argument_slope(x), s)};
}

// out = act(x), or act'(x) d_y with kBackward. Each thread computes kPacks packs of kWidth elements, and one thread
// the elements that fill no pack.
template <bool kBackward, int kWidth, typename T>
__global__ void __launch_bounds__(kThreads)
    activation_kernel(Activation kind, const T* x, const T* d_y, T* out, int64_t count) {
  constexpr int64_t kStride = int64_t{kThreads} * kWidth;
  const int64_t first = blockIdx.x * kPacks * kStride + int64_t{threadIdx.x} * kWidth;
  const auto result = [&](float of, float gradient) {
    const Activated a = activated(kind, of);
    return kBackward ? gradient * a.slope : a.y;
  };
  Stored<T, kWidth> inputs[kPacks], gradients[kPacks] = {};
#pragma unroll
  for (int n = 0; n < kPacks; ++n) {
    const int64_t at = first + n * kStride;
    inputs[n] = load_stored<kWidth>(x + at, at + kWidth <= count);
    if constexpr (kBackward) gradients[n] = load_stored<kWidth>(d_y + at, at + kWidth <= count);
  }
#pragma unroll
  for (int n = 0; n < kPacks; ++n) {
    const int64_t at = first + n * kStride;
    if (at + kWidth <= count) {
      float results[kWidth];
#pragma unroll
      for (int i = 0; i < kWidth; ++i) results[i] = result(inputs[n][i], gradients[n][i]);
      store(out + at, results);
    } else {
      for (int64_t i = at; i < count; ++i) {
        out[i] = from_float<T>(result(to_float(x[i]), kBackward ? to_float(d_y[i]) : 0.0f));
      }
    }
  }
}

template <bool kBackward>
void launch(Device& device, Activation kind, const TensorView& x, const TensorView& d_y, const TensorView& out,
            const char* op) {
  with_plain_type(x.dtype, [&](auto type) {
    using T = decltype(type);
    constexpr int kWide = 16 / sizeof(T);
    const bool wide = is_aligned(x.data, 16) && is_aligned(d_y.data, 16) && is_aligned(out.data, 16);
    const auto kernel = wide ? activation_kernel<kBackward, kWide, T> : activation_kernel<kBackward, 1, T>;
    const int64_t count = x.numel(), blocks = ceil_div(count, int64_t{kThreads} * kPacks * (wide ? kWide : 1));
    PARKA_REQUIRE(blocks <= INT32_MAX);
    kernel<<<static_cast<unsigned>(blocks), kThreads, 0, as_cuda(device).stream()>>>(
        kind, x.as<T>(), kBackward ? d_y.as<T>() : nullptr, out.as<T>(), count);
  });
  check_launch(op);
}

}  // namespace

void activation_forward(Device& device, const ActivationForward& a) {
  launch<false>(device, a.kind, a.x, {}, a.y, "activation_forward");
}

void activation_backward(Device& device, const ActivationBackward& a) {
  launch<true>(device, a.kind, a.x, a.d_y, a.d_x, "activation_backward");
}

}  // namespace parka::cuda
