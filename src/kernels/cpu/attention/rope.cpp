#include "kernels/cpu/attention/rope.h"

#include <algorithm>
#include <vector>

#include "core/parallel.h"
#include "kernels/cpu/codec.h"
#include "kernels/ops/attention/rope.h"

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

// The joint scales of the first `heads` heads of D columns: [ceil(T / kJointRows), heads].
Matrix joint_scales_of(const TensorView& qkv, int64_t heads, int64_t D) {
  const Matrix x = decode(qkv);
  Matrix scales(ceil_div(x.rows(), kJointRows), heads);
  for (int64_t r = 0; r < scales.rows(); ++r) {
    for (int64_t h = 0; h < heads; ++h) {
      float amax = 0.0f;
      for (int64_t t = r * kJointRows; t < std::min((r + 1) * kJointRows, x.rows()); ++t) {
        amax = std::max(amax, max_abs(x.row(t) + h * D, D));
      }
      scales.row(r)[h] = joint_scale(amax);
    }
  }
  return scales;
}

// Gives the queries and keys of `saved` codes with joint scales.
void encode_jointly(const Matrix& x, const Matrix& scales, int64_t D, const ScaledView& saved) {
  const int64_t cols = x.cols(), groups = D / saved.group, across = saved.scale.dim[1];
  parallel_for(x.rows(), kRowGrain, [&](int64_t begin, int64_t end) {
    std::vector<float> head(static_cast<size_t>(D));
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t h = 0; h < scales.cols(); ++h) {
        const float scale = scales.row(t / kJointRows)[h], inverse = inverse_of_joint_scale(scale);
        for (int64_t i = 0; i < D; ++i) head[i] = x.row(t)[h * D + i] * inverse;
        encode_elements(head.data(), t * cols + h * D, D, saved.data);
        const std::vector<float> of_groups(static_cast<size_t>(groups), scale);
        encode_elements(of_groups.data(), t * across + h * groups, groups, saved.scale);
      }
    }
  });
}

}  // namespace

void rope_forward(Device&, const RopeForward& a) {
  const int64_t num_rotated = a.num_heads + a.num_kv_heads, D = a.cos_sin.dim[1];
  const Matrix x = rotated(a.qkv, a.cos_sin, num_rotated);
  if (a.saved.empty()) {
    encode(x, a.qkv);
  } else {
    encode(x, a.saved);
    if (a.joint_scales) encode_jointly(x, joint_scales_of(a.qkv, num_rotated, D), D, a.saved);
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

}  // namespace parka::cpu
