#include "kernels/ops/quantize/amax.h"

#include <cmath>

#include "core/number_formats.h"
#include "kernels/device/device.h"

namespace parka::cpu {

void amax(Device&, const Amax& a) {
  float& result = a.result.as<float>()[0];
  const auto raise = [&](const auto* x, const auto& decode) {
    // A comparison with NaN is false, so NaN is skipped.
    for (int64_t i = 0; i < a.x.numel(); ++i) {
      const float magnitude = std::abs(decode(x[i]));
      if (magnitude > result) result = magnitude;
    }
  };
  if (a.x.dtype == DType::kF32) {
    raise(a.x.as<float>(), [](float x) { return x; });
  } else {
    raise(a.x.as<BFloat16>(), [](BFloat16 x) { return decode_bf16(x); });
  }
}

}  // namespace parka::cpu
