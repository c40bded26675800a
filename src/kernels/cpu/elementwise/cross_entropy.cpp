#include "kernels/ops/elementwise/cross_entropy.h"

#include <algorithm>
#include <cmath>

#include "core/parallel.h"
#include "kernels/cpu/codec.h"
#include "kernels/cpu/eigen.h"
#include "kernels/cpu/math/exp.h"

namespace parka::cpu {
namespace {

constexpr int64_t kRowGrain = 8;

// Before any row is touched, so that a refused call leaves the logits as they were.
void check_targets(const TensorView& targets, int64_t V) {
  const int32_t* target = targets.as<int32_t>();
  for (int64_t t = 0; t < targets.dim[0]; ++t) {
    if (target[t] != kIgnoreTarget && (target[t] < 0 || target[t] >= V)) {
      throw_bad_input(
          "cross_entropy: row {} has target {}, outside the vocabulary of {}: use data made with a "
          "tokenizer that fits",
          t, target[t], V);
    }
  }
}

struct RowLoss {
  float loss, z_loss;
};

// x holds the logits and becomes their gradient.
RowLoss row_loss(const CrossEntropy& a, float grad_scale, int32_t target, Eigen::ArrayXf& x) {
  const float max = x.maxCoeff();
  x -= max;
  const float target_logit = x[target];
  exp_elements(x.data(), x.size(), x.data());
  const float sum = x.sum();
  const float lse = max + std::log(sum);
  // p as a quotient of exponentials, and the loss without lse: exp(logit - lse) and lse - logit would carry the
  // rounding error of lse, which is large when the logits are.
  x *= grad_scale * (1.0f + 2.0f * a.z_loss * lse) / sum;
  x[target] -= grad_scale;
  return {std::log(sum) - target_logit, a.z_loss * lse * lse};
}

// The factor of a row whose gradient at the target is `at_target`.
float row_factor_of(float at_target, const ScaledView& codes) {
  const float scale = codes.scale.as<float>()[0], code = at_target * (1.0f / scale);
  const float rounded =
      codes.data.dtype == DType::kE4M3 ? decode_e4m3(encode_e4m3(code)) : decode_e5m2(encode_e5m2(code));
  return row_factor(at_target, rounded * scale);
}

// Stores the gradient in FP8, with the scale that is there if there is one.
void encode_gradient(const CrossEntropy& a, const Matrix& gradient, bool has_tensor_scale) {
  encode_with_transpose(gradient, a.d_logits, a.d_logits_t,
                        has_tensor_scale ? ScaleSource::kGiven : ScaleSource::kCompute);
}

}  // namespace

void cross_entropy(Device&, const CrossEntropy& a) {
  const int64_t T = a.logits.dim[0], stride = a.logits.dim[1], V = stride - a.padding;
  const bool makes_codes = !a.d_logits.empty() || !a.d_logits_t.empty();
  const ScaledView& codes = a.d_logits.empty() ? a.d_logits_t : a.d_logits;
  const bool has_tensor_scale = makes_codes && codes.scaling == Scaling::kTensor;
  Matrix gradient(makes_codes ? T : 0, stride);
  check_targets(a.targets, V);
  const int32_t* targets = a.targets.as<int32_t>();
  const float grad_scale = a.grad_factor.empty() ? a.grad_scale : a.grad_scale * a.grad_factor.as<float>()[0];
  if (has_tensor_scale) {
    codes.scale.as<float>()[0] = logits_gradient_scale(grad_scale, float8_traits(codes.data.dtype).max);
  }
  parallel_for(T, kRowGrain, [&](int64_t begin, int64_t end) {
    Eigen::ArrayXf x(V);
    for (int64_t t = begin; t < end; ++t) {
      RowLoss row{0.0f, 0.0f};
      if (targets[t] == kIgnoreTarget) {
        x.setZero();
      } else {
        decode_elements(a.logits, t * stride, V, x.data());
        row = row_loss(a, grad_scale, targets[t], x);
        if (has_tensor_scale) x *= row_factor_of(x[targets[t]], codes);
      }
      a.loss.as<float>()[t] = row.loss;
      if (!a.z_loss_value.empty()) a.z_loss_value.as<float>()[t] = row.z_loss;
      if (makes_codes) {
        std::copy_n(x.data(), V, gradient.row(t));
        std::fill_n(gradient.row(t) + V, a.padding, 0.0f);
      } else if (a.write_gradient) {
        encode_elements(x.data(), t * stride, V, a.logits);
      }
    }
  });
  if (makes_codes) encode_gradient(a, gradient, has_tensor_scale);
}

}  // namespace parka::cpu
