#include "kernels/ops/elementwise/pointwise.h"

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

#include "core/number_formats.h"
#include "core/parallel.h"
#include "kernels/cpu/codec.h"
#include "kernels/cpu/math/exp.h"
#include "kernels/ops/swiglu/swiglu.h"

namespace parka::cpu {

void add(Device&, const Add& a) {
  constexpr int64_t kPiece = 16384;
  parallel_for(a.x.numel(), kPiece, [&](int64_t begin, int64_t end) {
    if (a.x.dtype == DType::kF32) {
      const float* x = a.x.as<float>();
      float* total = a.total.as<float>();
      for (int64_t i = begin; i < end; ++i) total[i] += x[i];
    } else {
      const BFloat16* x = a.x.as<BFloat16>();
      BFloat16* total = a.total.as<BFloat16>();
      for (int64_t i = begin; i < end; ++i) total[i] = encode_bf16(decode_bf16(total[i]) + decode_bf16(x[i]));
    }
  });
}

namespace {

template <typename T>
void add_rows(const AddColumns& a, int64_t begin, int64_t end) {
  const int64_t N = a.x.dim[1];
  for (int64_t r = begin; r < end; ++r) {
    const T* x = a.x.as<T>() + r * (N + a.x_padding);
    T* y = a.y.as<T>() + r * (N + a.y_padding);
    for (int64_t n = 0; n < N; ++n) {
      if constexpr (std::is_same_v<T, float>) {
        y[n] = (a.accumulate ? y[n] : 0.0f) + a.factor * x[n];
      } else {
        y[n] = encode_bf16((a.accumulate ? decode_bf16(y[n]) : 0.0f) + a.factor * decode_bf16(x[n]));
      }
    }
  }
}

}  // namespace

void add_columns(Device&, const AddColumns& a) {
  parallel_for(a.x.dim[0], 16, [&](int64_t begin, int64_t end) {
    a.x.dtype == DType::kF32 ? add_rows<float>(a, begin, end) : add_rows<BFloat16>(a, begin, end);
  });
}

namespace {

constexpr int64_t kRowGrain = 16;

// Both passes make this of a row of x: act(x) = x factor(x), and act'(x).
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

namespace {

std::vector<float> decoded_vector(const TensorView& x) {
  std::vector<float> values(static_cast<size_t>(x.numel()));
  decode_elements(x, 0, x.numel(), values.data());
  return values;
}

}  // namespace

void bias_forward(Device&, const BiasForward& a) {
  const int64_t T = a.x.dim[0], N = a.x.dim[1];
  const std::vector<float> bias = decoded_vector(a.bias);
  constexpr int64_t kRows = 16;
  parallel_for(T, kRows, [&](int64_t begin, int64_t end) {
    std::vector<float> row(static_cast<size_t>(N));
    for (int64_t t = begin; t < end; ++t) {
      decode_elements(a.x, t * N, N, row.data());
      for (int64_t c = 0; c < N; ++c) row[c] += bias[c];
      encode_elements(row.data(), t * N, N, a.x);
    }
  });
}

void bias_backward(Device&, const BiasBackward& a) {
  const int64_t T = a.d_y.dim[0], N = a.d_y.dim[1];
  constexpr int64_t kTile = 64;  // rows that are summed together
  Matrix parts(ceil_div(T, kTile), N);
  parallel_for(T, kTile, [&](int64_t begin, int64_t end) {
    std::vector<float> row(static_cast<size_t>(N)), sum(row);
    for (int64_t t = begin; t < end; ++t) {
      decode_elements(a.d_y, t * N, N, row.data());
      for (int64_t c = 0; c < N; ++c) sum[c] += row[c];
    }
    std::copy(sum.begin(), sum.end(), parts.row(begin / kTile));
  });
  std::vector<float> total(static_cast<size_t>(N)), d_bias = decoded_vector(a.d_bias);
  for (int64_t i = 0; i < parts.rows(); ++i) {
    for (int64_t c = 0; c < N; ++c) total[c] += parts.row(i)[c];
  }
  for (int64_t c = 0; c < N; ++c) d_bias[c] += total[c];
  encode_elements(d_bias.data(), 0, N, a.d_bias);
}

namespace {

float read(float x) { return x; }
float read(BFloat16 x) { return decode_bf16(x); }
void write(float& y, float x) { y = x; }
void write(BFloat16& y, float x) { y = encode_bf16(x); }

template <typename T>
void run(const Dropout& a) {
  const int64_t rows = a.x.dim[a.transposed ? 1 : 0], cols = a.x.dim[a.transposed ? 0 : 1];
  const int64_t S = a.sequence_length, chunks = ceil_div(cols, 4);
  const int32_t* const position = a.position.as<int32_t>();
  const auto step = static_cast<uint32_t>(position[0]);
  const int64_t first = position[1], stride = position[2];
  const uint32_t threshold = dropout_threshold(a.probability);
  const float factor = dropout_factor(a.probability);
  const T* const x = a.x.as<T>();
  T* const y = a.y.as<T>();
  parallel_for(rows, 16, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const int64_t place = (first + t / S * stride) * S + t % S;
      for (int64_t c = 0; c < chunks; ++c) {
        const auto words = dropout_words(a.seed, a.stream, step, static_cast<uint64_t>(place),
                                         static_cast<uint64_t>(chunks), static_cast<uint64_t>(c));
        for (int64_t k = 4 * c; k < std::min(4 * c + 4, cols); ++k) {
          const int64_t i = a.transposed ? k * rows + t : t * cols + k;
          const float kept = words[static_cast<size_t>(k % 4)] < threshold ? 0.0f : read(x[i]) * factor;
          write(y[i], a.accumulate ? read(y[i]) + kept : kept);
        }
      }
    }
  });
}

}  // namespace

void dropout(Device&, const Dropout& a) {
  if (a.x.dtype == DType::kF32) {
    run<float>(a);
  } else {
    run<BFloat16>(a);
  }
}

}  // namespace parka::cpu
