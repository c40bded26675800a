#include "kernels/ops/swiglu/swiglu.h"

#include <algorithm>
#include <vector>

#include "core/parallel.h"
#include "kernels/cpu/codec.h"
#include "kernels/cpu/math/exp.h"

namespace parka::cpu {
namespace {

constexpr int64_t kRowGrain = 16;

// One token's up and gate, and what both passes make of the gate.
struct GatedRow {
  GatedRow(GateActivation activation_, int64_t width_)
      : activation(activation_),
        width(width_),
        up_gate(static_cast<size_t>(2 * width)),
        sigmoid(static_cast<size_t>(width)),
        activated(sigmoid),
        argument(activation == GateActivation::kSilu ? 0 : sigmoid.size()) {}

  void load(const ScaledView& x, int64_t t) {
    decode_rows(x, t, 1, up_gate.data());
    sigmoid_elements(sigmoid_argument(), width, sigmoid.data());
    for (int64_t f = 0; f < width; ++f) activated[f] = gate()[f] * sigmoid[f];
  }
  const float* up() const { return up_gate.data(); }
  const float* gate() const { return up_gate.data() + width; }
  void multiply(float* product) const {
    for (int64_t f = 0; f < width; ++f) product[f] = up()[f] * activated[f];
  }
  // act', with `activated` as it is now: decoded, where it was saved.
  void differentiate(float* slope) const {
    for (int64_t f = 0; f < width; ++f) {
      float change = activated[f] * (1.0f - sigmoid[f]);
      if (activation == GateActivation::kGeluTanh) change *= kGeluLinear + 3 * kGeluCubic * gate()[f] * gate()[f];
      slope[f] = sigmoid[f] + change;
    }
  }

  GateActivation activation;
  int64_t width;
  std::vector<float> up_gate, sigmoid, activated;

 private:
  const float* sigmoid_argument() {
    if (activation == GateActivation::kSilu) return gate();
    for (int64_t f = 0; f < width; ++f) {
      const float g = gate()[f];
      argument[f] = g * (kGeluLinear + kGeluCubic * g * g);
    }
    return argument.data();
  }

  std::vector<float> argument;  // empty where it is the gate
};

// x times the factor of row t, if rows have one. Zeros for 0, whatever x is.
void scale_row(const TensorView& row_factor, int64_t t, int64_t count, float* x) {
  if (row_factor.empty()) return;
  const float factor = row_factor.as<float>()[t];
  for (int64_t i = 0; i < count; ++i) x[i] = factor == 0 ? 0.0f : x[i] * factor;
}

// The maximum that SwigluBackward::samples_amax describes.
float sampled_amax(const Matrix& x) {
  float sampled = 0;
  for (int64_t t = 0; t < x.rows(); t += kAmaxSampling) sampled = std::max(sampled, max_abs(x.row(t), x.cols()));
  return std::max(kAmaxRoom * sampled, max_abs(x));
}

void encode_gradient(const Matrix& d_up_gate, const SwigluBackward& a) {
  if (!a.samples_amax) {
    encode_with_transpose(d_up_gate, a.d_up_gate, a.d_up_gate_t);
    return;
  }
  const ScaledView& any = a.d_up_gate.empty() ? a.d_up_gate_t : a.d_up_gate;
  any.scale.as<float>()[0] = tensor_scale(sampled_amax(d_up_gate), any.data.dtype);
  encode_with_transpose(d_up_gate, a.d_up_gate, a.d_up_gate_t, ScaleSource::kGiven);
}

}  // namespace

void swiglu_forward(Device&, const SwigluForward& a) {
  if (!a.up_gate_plain.empty()) encode(decode(a.up_gate_plain), a.up_gate);
  const int64_t rows = a.product.num_rows(), width = a.product.num_cols();
  Matrix product(rows, width);
  parallel_for(rows, kRowGrain, [&](int64_t begin, int64_t end) {
    GatedRow row(a.activation, width);
    for (int64_t t = begin; t < end; ++t) {
      row.load(a.up_gate, t);
      if (!a.silu.empty()) {
        encode_row(row.activated.data(), t, a.silu);
        decode_rows(a.silu, t, 1, row.activated.data());
      }
      row.multiply(product.row(t));
      scale_row(a.row_factor, t, width, product.row(t));
    }
  });
  encode_with_transpose(product, a.product, a.product_t);
}

void swiglu_backward(Device&, const SwigluBackward& a) {
  const int64_t rows = a.up_gate.num_rows(), width = a.up_gate.num_cols() / 2;
  const bool wants_gradient = !a.d_up_gate.empty() || !a.d_up_gate_t.empty();
  const bool wants_product = !a.product.empty() || !a.product_t.empty();
  Matrix product(wants_product ? rows : 0, width), d_up_gate(wants_gradient ? rows : 0, 2 * width);
  parallel_for(rows, kRowGrain, [&](int64_t begin, int64_t end) {
    GatedRow row(a.activation, width);
    std::vector<float> d_product(static_cast<size_t>(width)), slope(d_product);
    for (int64_t t = begin; t < end; ++t) {
      row.load(a.up_gate, t);
      if (!a.silu.empty()) decode_rows(a.silu, t, 1, row.activated.data());
      if (wants_product) {
        row.multiply(product.row(t));
        scale_row(a.row_factor, t, width, product.row(t));
      }
      if (!wants_gradient) continue;
      decode_elements(a.d_product, t * width, width, d_product.data());
      float *d_up = d_up_gate.row(t), *d_gate = d_up + width;
      row.differentiate(slope.data());
      for (int64_t f = 0; f < width; ++f) d_up[f] = d_product[f] * row.activated[f];
      for (int64_t f = 0; f < width; ++f) d_gate[f] = d_product[f] * row.up()[f] * slope[f];
      scale_row(a.row_factor, t, 2 * width, d_up);
    }
  });
  if (wants_gradient) encode_gradient(d_up_gate, a);
  if (wants_product) encode_with_transpose(product, a.product, a.product_t, ScaleSource::kGiven);
}

void swiglu_row_gradient(Device&, const SwigluRowGradient& a) {
  const int64_t rows = a.up_gate.num_rows(), width = a.up_gate.num_cols() / 2;
  parallel_for(rows, kRowGrain, [&](int64_t begin, int64_t end) {
    GatedRow row(a.activation, width);
    std::vector<float> d_product(static_cast<size_t>(width)), product(d_product);
    for (int64_t t = begin; t < end; ++t) {
      row.load(a.up_gate, t);
      if (!a.silu.empty()) decode_rows(a.silu, t, 1, row.activated.data());
      row.multiply(product.data());
      decode_elements(a.d_product, t * width, width, d_product.data());
      float sum = 0;
      for (int64_t f = 0; f < width; ++f) sum += d_product[f] * product[f];
      a.d_row_factor.as<float>()[t] = sum;
    }
  });
}

void swiglu_projection(Device& device, const SwigluProjection& a) {
  cpu::gemm(device, a.projection);
  cpu::swiglu_forward(device, a.swiglu);
}

}  // namespace parka::cpu
