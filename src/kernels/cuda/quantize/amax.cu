#include <algorithm>

#include "kernels/ops/quantize/amax.h"

#include "kernels/cuda/quantize/matrix_source.cuh"
#include "kernels/cuda/quantize/quantize_tiles.cuh"
#include "kernels/device/cuda/check.h"
#include "kernels/device/cuda/cuda_device.h"

namespace parka::cuda {

void amax(Device& any_device, const Amax& a) {
  CudaDevice& device = as_cuda(any_device);
  // The shape means nothing to a maximum: rows that fill tiles, as many as a launch takes, and what is left of one.
  constexpr int64_t kCols = tiles::kSize, kMostElements = int64_t{1} << 29;
  const int64_t numel = a.x.numel();
  const TensorView flat = a.x.reshaped({numel});
  for (int64_t begin = 0, count = 0; begin < numel; begin += count) {
    const int64_t left = numel - begin, whole = std::min(left / kCols * kCols, kMostElements);
    const int64_t cols = whole > 0 ? kCols : 1;
    count = whole > 0 ? whole : left;
    with_plain_type(a.x.dtype, [&](auto type) {
      const PlainSource<decltype(type)> source(flat.rows(begin, count).reshaped({count / cols, cols}));
      find_amax(device, source, count / cols, cols, a.result.as<float>());
    });
  }
  check_launch("amax");
}

}  // namespace parka::cuda
