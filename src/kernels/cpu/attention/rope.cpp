#include "kernels/ops/attention/rope.h"

#include "core/parallel.h"
#include "kernels/cpu/attention/rope.h"
#include "kernels/cpu/codec.h"

namespace parka::cpu {
namespace {

constexpr int64_t kRowGrain = 16;

// The rows of a fused QKV matrix with their first `num_rotated` heads (queries and keys) rotated, in fp32.
Matrix rotated(const TensorView& qkv, const TensorView& cos_sin, int64_t num_rotated) {
  const int64_t S = cos_sin.dim[0], D = cos_sin.dim[1];
  Matrix x = decode(qkv);
  parallel_for(x.rows(), kRowGrain, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const float* cos_sin_D = cos_sin.as<float>() + t % S * D;
      for (int64_t h = 0; h < num_rotated; ++h) rotate_head(x.row(t) + h * D, cos_sin_D, 1.0f, D);
    }
  });
  return x;
}

}  // namespace

void rope_forward(Device&, const RopeForward& a) {
  const Matrix x = rotated(a.qkv, a.cos_sin, a.num_heads + a.num_kv_heads);
  if (a.saved.empty()) {
    encode(x, a.qkv);
  } else {
    encode(x, a.saved);
    encode(decode(a.saved), a.qkv);
  }
}

void rotate_head(float* head, const float* cos_sin_D, float sign, int64_t D) {
  const int64_t half = D / 2;
  for (int64_t i = 0; i < half; ++i) {
    const float low = head[i], high = head[i + half], cos = cos_sin_D[i], sin = sign * cos_sin_D[i + half];
    head[i] = low * cos - high * sin;
    head[i + half] = high * cos + low * sin;
  }
}

void rope_projection(Device& device, const RopeProjection& a) {
  cpu::gemm(device, a.projection);
  cpu::rope_forward(device, a.rope);
}

}  // namespace parka::cpu
