#include "kernels/ops/norm/norm.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "core/parallel.h"
#include "kernels/cpu/codec.h"

namespace parka::cpu {
namespace {

constexpr int64_t kRowGrain = 16;

// term(0) + ... + term(count - 1) in an order that fits vector registers: 32 interleaved sums, then their sum.
// Short chains of additions also keep the rounding error of long rows small.
template <typename Term>
float sum_of(int64_t count, const Term& term) {
  constexpr int64_t kLanes = 32;
  std::array<float, kLanes> lanes{};
  const int64_t whole = count - count % kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] += term(i + lane);
  }
  for (int64_t i = whole; i < count; ++i) lanes[i - whole] += term(i);
  for (int64_t width = kLanes / 2; width > 0; width /= 2) {
    for (int64_t lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  }
  return lanes[0];
}

template <typename Term>
float mean_of(int64_t count, const Term& term) {
  return sum_of(count, term) / static_cast<float>(count);
}

struct Statistics {
  float mean = 0;  // stays 0 for RMSNorm, which is LayerNorm without the mean
  float rstd = 1;  // stays 1 for no norm
};

Statistics statistics_of(NormKind kind, float eps, const float* x, int64_t cols) {
  Statistics s;
  if (kind == NormKind::kNone) return s;
  if (has_mean(kind)) s.mean = mean_of(cols, [&](int64_t c) { return x[c]; });
  const float variance = mean_of(cols, [&](int64_t c) { return (x[c] - s.mean) * (x[c] - s.mean); });
  s.rstd = 1.0f / std::sqrt(variance + eps);
  return s;
}

Statistics saved_statistics(const TensorView& mean, const TensorView& rstd, int64_t t) {
  return {mean.empty() ? 0.0f : mean.as<float>()[t], rstd.empty() ? 1.0f : rstd.as<float>()[t]};
}

// Ones for a norm without a weight: multiplying by them changes nothing.
std::vector<float> weight_or_ones(const TensorView& weight, float offset, int64_t cols) {
  std::vector<float> values(static_cast<size_t>(cols), 1.0f);
  if (weight.empty()) return values;
  decode_elements(weight, 0, cols, values.data());
  for (float& w : values) w += offset;
  return values;
}

std::vector<float> decoded_vector(const TensorView& x) {
  if (x.empty()) return {};
  std::vector<float> values(static_cast<size_t>(x.numel()));
  decode_elements(x, 0, x.numel(), values.data());
  return values;
}

// The one place where y is computed, so norm_recompute repeats its bits. An empty bias is not added: -0 + 0 = 0.
void normalize(const float* x, const Statistics& s, const std::vector<float>& weight,
               const std::vector<float>& bias, int64_t cols, float* y) {
  for (int64_t c = 0; c < cols; ++c) y[c] = (x[c] - s.mean) * s.rstd * weight[c];
  for (size_t c = 0; c < bias.size(); ++c) y[c] += bias[c];
}

}  // namespace

void norm_forward(Device&, const NormForward& a) {
  const int64_t rows = a.residual.dim[0], cols = a.residual.dim[1];
  const std::vector<float> weight = weight_or_ones(a.weight, a.weight_offset, cols), bias = decoded_vector(a.bias);
  Matrix y(rows, cols);
  parallel_for(rows, kRowGrain, [&](int64_t begin, int64_t end) {
    std::vector<float> x(static_cast<size_t>(cols)), branch(static_cast<size_t>(cols));
    for (int64_t t = begin; t < end; ++t) {
      decode_elements(a.residual, t * cols, cols, x.data());
      if (!a.branch.empty()) {
        decode_elements(a.branch, t * cols, cols, branch.data());
        for (int64_t c = 0; c < cols; ++c) x[c] += branch[c];
      }
      // The norm reads what backward will read: the sum as stored, or its quantized copy.
      encode_elements(x.data(), t * cols, cols, a.residual_out);
      decode_elements(a.residual_out, t * cols, cols, x.data());
      if (!a.x.empty()) {
        encode_row(x.data(), t, a.x);
        decode_rows(a.x, t, 1, x.data());
      }
      const Statistics s = statistics_of(a.kind, a.eps, x.data(), cols);
      if (!a.mean.empty()) a.mean.as<float>()[t] = s.mean;
      if (!a.rstd.empty()) a.rstd.as<float>()[t] = s.rstd;
      normalize(x.data(), s, weight, bias, cols, y.row(t));
    }
  });
  encode_with_transpose(y, a.y, a.y_t);
}

void norm_recompute(Device&, const NormRecompute& a) {
  const int64_t rows = a.x.num_rows(), cols = a.x.num_cols();
  const std::vector<float> weight = weight_or_ones(a.weight, a.weight_offset, cols), bias = decoded_vector(a.bias);
  Matrix y(rows, cols);
  parallel_for(rows, kRowGrain, [&](int64_t begin, int64_t end) {
    std::vector<float> x(static_cast<size_t>(cols));
    for (int64_t t = begin; t < end; ++t) {
      decode_rows(a.x, t, 1, x.data());
      normalize(x.data(), saved_statistics(a.mean, a.rstd, t), weight, bias, cols, y.row(t));
    }
  });
  encode_with_transpose(y, a.y, a.y_t, ScaleSource::kGiven);
}

namespace {

// kNone: d_residual_out = d_residual + d_y
void add_gradients(const NormBackward& a) {
  const int64_t rows = a.d_y.dim[0], cols = a.d_y.dim[1];
  parallel_for(rows, kRowGrain, [&](int64_t begin, int64_t end) {
    std::vector<float> d_x(static_cast<size_t>(cols)), d_residual(d_x);
    for (int64_t t = begin; t < end; ++t) {
      decode_elements(a.d_y, t * cols, cols, d_x.data());
      if (!a.d_residual.empty()) {
        decode_elements(a.d_residual, t * cols, cols, d_residual.data());
        for (int64_t c = 0; c < cols; ++c) d_x[c] += d_residual[c];
      }
      encode_elements(d_x.data(), t * cols, cols, a.d_residual_out);
    }
  });
}

// target += the sum of the rows of `parts`, added once
void add_column_sums(const Matrix& parts, const TensorView& target) {
  std::vector<float> total(static_cast<size_t>(parts.cols())), values = decoded_vector(target);
  for (int64_t i = 0; i < parts.rows(); ++i) {
    for (int64_t c = 0; c < parts.cols(); ++c) total[c] += parts.row(i)[c];
  }
  for (int64_t c = 0; c < parts.cols(); ++c) values[c] += total[c];
  encode_elements(values.data(), 0, parts.cols(), target);
}

// With xhat = (x - mean) * rstd and g = d_y * weight, both functions of the row:
//   d_x = rstd * (g - mean(g) - xhat * mean(g * xhat)),   without mean(g) for RMSNorm
// which is d y / d x applied to d_y: xhat changes with x directly, through the mean, and through rstd.
void add_norm_gradient(const NormBackward& a) {
  const int64_t rows = a.x.num_rows(), cols = a.x.num_cols();
  const std::vector<float> weight = weight_or_ones(a.weight, a.weight_offset, cols);
  constexpr int64_t kTile = 64;  // rows whose part of d_weight is summed together
  Matrix d_weight_part(ceil_div(rows, kTile), cols),
      d_bias_part(a.d_bias.empty() ? 0 : ceil_div(rows, kTile), cols);
  parallel_for(rows, kTile, [&](int64_t begin, int64_t end) {
    std::vector<float> xhat(static_cast<size_t>(cols)), d_y(xhat), g(xhat), d_x(xhat);
    float* d_weight = d_weight_part.row(begin / kTile);
    std::fill_n(d_weight, cols, 0.0f);
    float* d_bias = a.d_bias.empty() ? nullptr : d_bias_part.row(begin / kTile);
    if (d_bias != nullptr) std::fill_n(d_bias, cols, 0.0f);
    for (int64_t t = begin; t < end; ++t) {
      const Statistics s = saved_statistics(a.mean, a.rstd, t);
      decode_rows(a.x, t, 1, xhat.data());
      for (int64_t c = 0; c < cols; ++c) xhat[c] = (xhat[c] - s.mean) * s.rstd;
      decode_elements(a.d_y, t * cols, cols, d_y.data());
      for (int64_t c = 0; c < cols; ++c) d_weight[c] += d_y[c] * xhat[c];
      for (int64_t c = 0; c < cols && d_bias != nullptr; ++c) d_bias[c] += d_y[c];
      for (int64_t c = 0; c < cols; ++c) g[c] = d_y[c] * weight[c];

      const float mean_g = has_mean(a.kind) ? mean_of(cols, [&](int64_t c) { return g[c]; }) : 0.0f;
      const float mean_g_xhat = mean_of(cols, [&](int64_t c) { return g[c] * xhat[c]; });
      std::fill(d_x.begin(), d_x.end(), 0.0f);
      if (!a.d_residual.empty()) decode_elements(a.d_residual, t * cols, cols, d_x.data());
      for (int64_t c = 0; c < cols; ++c) d_x[c] += s.rstd * (g[c] - mean_g - xhat[c] * mean_g_xhat);
      encode_elements(d_x.data(), t * cols, cols, a.d_residual_out);
    }
  });
  if (!a.d_weight.empty()) add_column_sums(d_weight_part, a.d_weight);
  if (!a.d_bias.empty()) add_column_sums(d_bias_part, a.d_bias);
}

}  // namespace

void norm_backward(Device&, const NormBackward& a) {
  if (a.kind == NormKind::kNone) {
    add_gradients(a);
  } else {
    add_norm_gradient(a);
  }
  if (a.d_quantized.empty() && a.d_quantized_t.empty()) return;
  encode_with_transpose(decode(a.d_residual_out), a.d_quantized, a.d_quantized_t);
}

}  // namespace parka::cpu
