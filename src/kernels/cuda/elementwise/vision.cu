#include "kernels/ops/vision.h"

#include "kernels/cuda/vector.cuh"
#include "kernels/device/cuda/check.h"
#include "kernels/device/cuda/cuda_device.h"

namespace parka::cuda {
namespace {

constexpr int kThreads = 256;

// ---- Patches ----

struct Pixels {
  int height, width, patch, across, of_image;  // across, of_image: patches in a row of the grid, and in an image
  std::array<float, GatherPatches::kChannels> mean, deviation;

  explicit Pixels(const GatherPatches& a)
      : height(static_cast<int>(a.pixels.dim[2])),
        width(static_cast<int>(a.pixels.dim[3])),
        patch(static_cast<int>(a.patch_size)),
        across(width / patch),
        of_image(height / patch * across),
        mean(a.mean),
        deviation(a.deviation) {}

  __device__ float value(float pixel, int) const { return pixel; }
  __device__ float value(uint8_t pixel, int channel) const {
    return __fdiv_rn(__fsub_rn(__fdiv_rn(static_cast<float>(pixel), 255.0f), mean[channel]), deviation[channel]);
  }
};

// A block has a row.
template <typename X, typename Y>
__global__ void __launch_bounds__(kThreads)
    gather_patches_kernel(const X* pixels, Y* patches, const Pixels p, int cols) {
  const int image = static_cast<int>(blockIdx.x) / p.of_image, n = static_cast<int>(blockIdx.x) % p.of_image;
  const int first_y = n / p.across * p.patch, first_x = n % p.across * p.patch;
  const X* const of_image = pixels + int64_t{image} * GatherPatches::kChannels * p.height * p.width;
  Y* const row = patches + int64_t{blockIdx.x} * cols;
  for (int column = static_cast<int>(threadIdx.x); column < cols; column += kThreads) {
    const int j = column % p.patch, line = column / p.patch, i = line % p.patch, channel = line / p.patch;
    float value = 0.0f;
    if (channel < GatherPatches::kChannels) {
      const int64_t y = int64_t{channel} * p.height + first_y + i;
      value = p.value(of_image[y * p.width + first_x + j], channel);
    }
    row[column] = from_float<Y>(value);
  }
}

}  // namespace

void gather_patches(Device& device, const GatherPatches& a) {
  const int64_t rows = a.patches.dim[0], cols = a.patches.dim[1];
  PARKA_REQUIRE(rows <= INT32_MAX && cols <= INT32_MAX - kThreads &&
                a.pixels.numel() / a.pixels.dim[0] <= INT32_MAX);
  const auto launch = [&](const auto* pixels) {
    with_plain_type(a.patches.dtype, [&](auto type) {
      gather_patches_kernel<<<static_cast<unsigned>(rows), kThreads, 0, as_cuda(device).stream()>>>(
          pixels, a.patches.as<decltype(type)>(), Pixels(a), static_cast<int>(cols));
    });
  };
  if (a.pixels.dtype == DType::kU8) {
    launch(a.pixels.as<uint8_t>());
  } else {
    launch(a.pixels.as<float>());
  }
  check_launch("gather_patches");
}

}  // namespace parka::cuda
