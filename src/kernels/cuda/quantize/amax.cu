#include "kernels/ops/quantize/amax.h"

#include "kernels/cuda/quantize/matrix_source.cuh"
#include "kernels/cuda/quantize/quantize_tiles.cuh"
#include "kernels/device/cuda/check.h"
#include "kernels/device/cuda/cuda_device.h"

namespace parka::cuda {

void amax(Device& any_device, const Amax& a) {
  CudaDevice& device = as_cuda(any_device);
  // The shape means nothing to a maximum: one that fills tiles is chosen if there is one.
  constexpr int64_t kCols = tiles::kSize;
  const int64_t numel = a.x.numel(), cols = numel % kCols == 0 ? kCols : 1, rows = numel / cols;
  with_plain_type(a.x.dtype, [&](auto type) {
    const PlainSource<decltype(type)> source(a.x.reshaped({rows, cols}));
    find_amax(device, source, rows, cols, a.result.as<float>());
  });
  check_launch("amax");
}

}  // namespace parka::cuda
