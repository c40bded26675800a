#include "kernels/ops/quantize/quantize.h"

#include <cmath>
#include <cstring>

#include "core/number_formats.h"
#include "kernels/cpu/codec.h"
#include "kernels/device/device.h"

namespace parka::cpu {
namespace {

// Codes that keep their scale are moved: decoding and encoding them again could only lose.
bool keeps_codes(const ScaledView& x, const ScaledView& out) {
  return !out.empty() && x.scaling == Scaling::kTensor && out.scaling == Scaling::kTensor &&
         x.data.dtype == out.data.dtype && x.scale.data == out.scale.data;
}

}  // namespace

void quantize(Device&, const Quantize& a) {
  ScaledView out = a.out, out_t = a.out_t;  // what is left to do
  if (keeps_codes(a.x, out)) {
    std::memmove(out.data.data, a.x.data.data, static_cast<size_t>(out.data.bytes()));
    out = {};
  }
  if (keeps_codes(a.x, out_t)) {
    transpose_codes(a.x.data, out_t.data);
    out_t = {};
  }
  if (out.empty() && out_t.empty()) return;
  if (!a.amax.empty()) {
    const ScaledView& scaled = out.empty() ? out_t : out;
    scaled.scale.as<float>()[0] = tensor_scale(a.amax.as<float>()[0], scaled.data.dtype);
  }
  const bool scale_known = a.scale_given || !a.amax.empty();
  encode_with_transpose(decode(a.x), out, out_t, scale_known ? ScaleSource::kGiven : ScaleSource::kCompute);
}

void quantize_matrices(Device& device, const QuantizeMatrices& a) {
  for (int64_t n = 0; n < a.scales.numel(); ++n) cpu::quantize(device, matrix_of(a, n));
}

void amax(Device&, const Amax& a) {
  const bool is_whole = a.result.numel() == 1;
  const auto raise = [&](const auto* x, const auto& decode) {
    // A comparison with NaN is false, so NaN is skipped.
    for (int64_t i = 0; i < a.x.numel(); ++i) {
      float& result = a.result.as<float>()[is_whole ? 0 : (a.first + i) / a.part];
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

void tensor_scales(Device&, const TensorScales& a) {
  for (int64_t i = 0; i < a.amax.numel(); ++i) {
    a.scales.as<float>()[i] = tensor_scale(a.amax.as<float>()[i], a.format);
  }
}

}  // namespace parka::cpu
