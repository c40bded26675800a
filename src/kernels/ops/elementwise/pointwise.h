#pragma once
#include <cmath>
#include <cstdint>

#include "core/philox.h"
#include "core/tensor.h"
#include "kernels/op/op.h"

namespace parka {

// total += x, element by element, added in fp32 and rounded once to their dtype. x and total must not overlap.
struct Add {
  TensorView x;      // [N] fp32 or bf16, in
  TensorView total;  // [N] of the same dtype, in/out
};
PARKA_OP(add, Add);

// y = factor * x, or y += factor * x: computed in fp32 and rounded once. Both may be columns of a wider matrix,
// with so many others after them in each row.
struct AddColumns {
  TensorView x;  // [R, N] fp32 or bf16, in
  TensorView y;  // [R, N] of the same dtype, out or in/out; must not overlap x
  float factor = 1.0f;
  bool accumulate = false;
  int64_t x_padding = 0, y_padding = 0;
};
PARKA_OP(add_columns, AddColumns);

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

// x += bias in every row, added in fp32 and rounded once to their dtype.
struct BiasForward {
  TensorView bias;  // [N] fp32 or bf16, in
  TensorView x;     // [T, N] of the same dtype, in/out
};
PARKA_OP(bias_forward, BiasForward);

// d_bias += sum_t d_y. Sums are fp32, in an order that depends on the shape alone, and are rounded once.
struct BiasBackward {
  TensorView d_y;     // [T, N] fp32 or bf16, in
  TensorView d_bias;  // [N] fp32 or bf16, in/out
};
PARKA_OP(bias_backward, BiasBackward);
int64_t workspace_of(const BiasBackward& a);

// y = x * m, or y += x * m, where m is 0 with probability p and else 1 / (1 - p), rounded to fp32: computed in fp32
// and rounded once to the dtype of y. m is a function of the element's place in the data, which is the same on any
// number of ranks: row t is token t % S of sequence first + (t / S) * stride of step's batch, with the numbers of
// `position`, and m is 0 where its word of dropout_words() is less than dropout_threshold(p).
struct Dropout {
  TensorView x;             // [T, K] fp32 or bf16, or [K, T] if transposed, in
  TensorView y;             // of the same shape and dtype, out or in/out; may be x where it does not accumulate
  TensorView position;      // [3] int32, none of them negative: step, first, stride, in
  int64_t sequence_length;  // S
  double probability;       // p, in [0, 1)
  uint64_t seed = 0;
  uint32_t stream = 0;  // of each use in a step its own
  bool accumulate = false;
  bool transposed = false;
};
PARKA_OP(dropout, Dropout);

inline uint32_t dropout_threshold(double probability) {
  return static_cast<uint32_t>(std::llround(std::ldexp(probability, 32)));
}
inline float dropout_factor(double probability) { return static_cast<float>(1 / (1 - probability)); }

// The random bits of columns [4 c, 4 c + 4) of a row, whose place in the batch is `row` = sequence * S + token, in
// a matrix of `chunks` = ceil(K / 4) such groups of columns.
PARKA_HOST_DEVICE inline std::array<uint32_t, 4> dropout_words(uint64_t seed, uint32_t stream, uint32_t step,
                                                               uint64_t row, uint64_t chunks, uint64_t c) {
  return philox4x32(seed, uint64_t{step} << 32 | stream, row * chunks + c);
}

}  // namespace parka
