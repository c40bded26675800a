#include "kernels/ops/elementwise/activation.h"

#include <cmath>
#include <vector>

#include "core/parallel.h"
#include "kernels/cpu/codec.h"
#include "kernels/cpu/math/exp.h"
#include "kernels/ops/swiglu/swiglu.h"

namespace parka::cpu {
namespace {

constexpr int64_t kRowGrain = 16;

// What both passes make of a row of x: act(x) = x factor(x), and act'(x).
struct ActivatedRow {
  explicit ActivatedRow(int64_t width) : x(static_cast<size_t>(width)), factor(x), slope(x), argument(x) {}

  void load(Activation kind, const TensorView& from, int64_t t) {
    const auto width = static_cast<int64_t>(x.size());
    decode_elements(from, t * width, width, x.data());
    switch (kind) {
      case Activation::kGelu: gelu(); return;
      case Activation::kGeluTanh: gelu_tanh(); return;
      case Activation::kQuickGelu:
      case Activation::kSilu: sigmoid_linear(sigmoid_factor(kind)); return;
    }
  }

  std::vector<float> x, factor, slope;

 private:
  void gelu() {
    constexpr float kSqrtHalf = 0.70710678f, kInverseSqrtTwoPi = 0.39894228f;
    const size_t width = x.size();
    for (size_t f = 0; f < width; ++f) argument[f] = -0.5f * x[f] * x[f];
    exp_elements(argument.data(), static_cast<int64_t>(width), slope.data());
    for (size_t f = 0; f < width; ++f) factor[f] = 0.5f * std::erfc(-kSqrtHalf * x[f]);
    for (size_t f = 0; f < width; ++f) slope[f] = factor[f] + x[f] * (kInverseSqrtTwoPi * slope[f]);
  }

  void gelu_tanh() {
    for (size_t f = 0; f < x.size(); ++f) argument[f] = x[f] * (kGeluLinear + kGeluCubic * x[f] * x[f]);
    of_sigmoid();
    for (size_t f = 0; f < x.size(); ++f) slope[f] *= kGeluLinear + 3 * kGeluCubic * x[f] * x[f];
    for (size_t f = 0; f < x.size(); ++f) slope[f] += factor[f];
  }

  // x sig(scale x)
  void sigmoid_linear(float scale) {
    for (size_t f = 0; f < x.size(); ++f) argument[f] = scale * x[f];
    of_sigmoid();
    for (size_t f = 0; f < x.size(); ++f) slope[f] = factor[f] + slope[f] * scale;
  }

  // factor = sig(argument), and what the argument's derivative is multiplied by: x sig'(argument).
  void of_sigmoid() {
    sigmoid_elements(argument.data(), static_cast<int64_t>(x.size()), factor.data());
    for (size_t f = 0; f < x.size(); ++f) slope[f] = x[f] * factor[f] * (1.0f - factor[f]);
  }

  std::vector<float> argument;
};

}  // namespace

void activation_forward(Device&, const ActivationForward& a) {
  const int64_t T = a.x.dim[0], F = a.x.dim[1];
  parallel_for(T, kRowGrain, [&](int64_t begin, int64_t end) {
    ActivatedRow row(F);
    for (int64_t t = begin; t < end; ++t) {
      row.load(a.kind, a.x, t);
      for (int64_t f = 0; f < F; ++f) row.x[f] *= row.factor[f];
      encode_elements(row.x.data(), t * F, F, a.y);
    }
  });
}

void activation_backward(Device&, const ActivationBackward& a) {
  const int64_t T = a.x.dim[0], F = a.x.dim[1];
  parallel_for(T, kRowGrain, [&](int64_t begin, int64_t end) {
    ActivatedRow row(F);
    std::vector<float> gradient(static_cast<size_t>(F));
    for (int64_t t = begin; t < end; ++t) {
      row.load(a.kind, a.x, t);
      decode_elements(a.d_y, t * F, F, gradient.data());
      for (int64_t f = 0; f < F; ++f) gradient[f] *= row.slope[f];
      encode_elements(gradient.data(), t * F, F, a.d_x);
    }
  });
}

}  // namespace parka::cpu
