#include "kernels/ops/quantize/quantize.h"

#include <cstring>

#include "kernels/cpu/codec.h"

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

}  // namespace parka::cpu
