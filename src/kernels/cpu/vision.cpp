#include "kernels/ops/vision.h"

#include <vector>

#include "core/parallel.h"
#include "kernels/cpu/codec.h"

namespace parka::cpu {
namespace {

constexpr int64_t kRowGrain = 16;

}  // namespace

void gather_patches(Device&, const GatherPatches& a) {
  const int64_t H = a.pixels.dim[2], W = a.pixels.dim[3], P = a.patch_size, across = W / P,
                of_image = H / P * across;
  const int64_t rows = a.patches.dim[0], cols = a.patches.dim[1];
  const bool is_byte = a.pixels.dtype == DType::kU8;
  const auto value = [&](int64_t channel, int64_t at) {
    if (!is_byte) return a.pixels.as<float>()[at];
    return (static_cast<float>(a.pixels.as<uint8_t>()[at]) / 255.0f - a.mean[channel]) / a.deviation[channel];
  };
  parallel_for(rows, kRowGrain, [&](int64_t begin, int64_t end) {
    std::vector<float> row(static_cast<size_t>(cols));
    for (int64_t r = begin; r < end; ++r) {
      const int64_t image = r / of_image, y = r % of_image / across * P, x = r % across * P;
      for (int64_t c = 0; c < GatherPatches::kChannels; ++c) {
        for (int64_t i = 0; i < P; ++i) {
          const int64_t from = ((image * GatherPatches::kChannels + c) * H + y + i) * W + x;
          for (int64_t j = 0; j < P; ++j) row[(c * P + i) * P + j] = value(c, from + j);
        }
      }
      encode_elements(row.data(), r * cols, cols, a.patches);
    }
  });
}

}  // namespace parka::cpu
