#include "kernels/cpu/rope.h"

#include "core/parallel.h"
#include "kernels/cpu/codec.h"

namespace parka::cpu {
namespace {

constexpr int64_t kRowGrain = 16;

// Turns one head by the angles of its position; sign -1 turns it back.
void turn(float* head, const float* cos, const float* sin, float sign, int64_t half) {
  for (int64_t i = 0; i < half; ++i) {
    const float low = head[i], high = head[i + half], s = sign * sin[i];
    head[i] = low * cos[i] - high * s;
    head[i + half] = high * cos[i] + low * s;
  }
}

// The rows of a fused QKV matrix with their first `num_turned` heads (queries and keys) turned, in fp32.
Matrix turned(const TensorView& qkv, const TensorView& cos_sin, int64_t num_turned, float sign) {
  const int64_t S = cos_sin.dim[0], D = cos_sin.dim[1];
  Matrix x = decode(qkv);
  parallel_for(x.rows(), kRowGrain, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const float* cos = cos_sin.as<float>() + t % S * D;
      for (int64_t h = 0; h < num_turned; ++h) turn(x.row(t) + h * D, cos, cos + D / 2, sign, D / 2);
    }
  });
  return x;
}

}  // namespace

void rope_forward(Device&, const RopeForward& a) {
  const Matrix x = turned(a.qkv, a.cos_sin, a.num_heads + a.num_kv_heads, 1.0f);
  if (a.saved.empty()) {
    encode(x, a.qkv);
  } else {
    encode(x, a.saved);
    encode(decode(a.saved), a.qkv);
  }
}

void rope_backward(Device&, const RopeBackward& a) {
  Matrix x = turned(a.d_qkv, a.cos_sin, a.num_heads + a.num_kv_heads, -1.0f);
  round_to(a.d_qkv.dtype, x);
  encode(x, a.d_qkv);
  encode_with_transpose(x, a.d_quantized, a.d_quantized_t);
}

}  // namespace parka::cpu
