#pragma once
#include "core/tensor.h"
#include "kernels/op/op.h"

namespace parka {

// The activation of an MLP without a gate, or of an adapter.
enum class Activation : uint8_t {
  kGelu,       // x Phi(x), Phi(x) = erfc(-x / sqrt(2)) / 2, the distribution function of the normal distribution
  kGeluTanh,   // x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2 = x sig(v(x)), v as in ops/swiglu/swiglu.h
  kQuickGelu,  // x sig(1.702 x),  sig(v) = 1 / (1 + exp(-v))
  kSilu,       // x sig(x)
};
inline constexpr float kQuickGeluFactor = 1.702f;
// The factor of activations of the form x sig(factor x).
constexpr float sigmoid_factor(Activation kind) { return kind == Activation::kSilu ? 1.0f : kQuickGeluFactor; }

// y = act(x)
struct ActivationForward {
  Activation kind;
  TensorView x;  // [T, F] fp32 or bf16, in
  TensorView y;  // [T, F] as x, out; may be the memory of x
};
PARKA_OP(activation_forward, ActivationForward);

// d_x = d_y act'(x)
struct ActivationBackward {
  Activation kind;
  TensorView x;    // [T, F] fp32 or bf16, in: as forward read it
  TensorView d_y;  // [T, F] as x, in
  TensorView d_x;  // [T, F] as x, out; may be the memory of d_y or x
};
PARKA_OP(activation_backward, ActivationBackward);

}  // namespace parka
