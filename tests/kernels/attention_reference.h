#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "tests/kernels/op_bounds.h"

// Attention of ops/attention/attention.h in double, with bounds on what fp32 arithmetic may make of the same input.
namespace parka::test {

struct AttentionShape {
  int64_t B, S, H, Hkv, D;
  bool causal = true;

  int64_t key_end(int64_t i) const { return causal ? i + 1 : S; }  // behind the last key that row i attends to
  int64_t T() const { return B * S; }
  int64_t width() const { return (H + 2 * Hkv) * D; }
  int64_t out_width() const { return H * D; }
  int64_t group() const { return H / Hkv; }
  // First element of a head's row in the fused buffer: query head h, key or value head g.
  int64_t q(int64_t b, int64_t i, int64_t h) const { return (b * S + i) * width() + h * D; }
  int64_t k(int64_t b, int64_t i, int64_t g) const { return q(b, i, H + g); }
  int64_t v(int64_t b, int64_t i, int64_t g) const { return q(b, i, H + Hkv + g); }
  int64_t out(int64_t b, int64_t i, int64_t h) const { return (b * S + i) * out_width() + h * D; }
  int64_t lse(int64_t b, int64_t i, int64_t h) const { return (b * H + h) * S + i; }
};

// The first key of each row, [B * S]; empty: 0. A row's first key may not be less than that of the row before.
using FirstKeys = std::vector<int32_t>;
inline int64_t first_key_of(const FirstKeys& first_keys, const AttentionShape& s, int64_t b, int64_t i) {
  return first_keys.empty() ? 0 : first_keys[static_cast<size_t>(b * s.S + i)];
}

// Each row sees `window` keys, its own included, and none before that of `others`.
inline FirstKeys windowed(const AttentionShape& s, int64_t window, const FirstKeys& others = {}) {
  FirstKeys keys;
  for (int64_t row = 0; row < s.T(); ++row) {
    const int64_t other = first_key_of(others, s, row / s.S, row % s.S);
    keys.push_back(static_cast<int32_t>(std::max(row % s.S - window + 1, other)));
  }
  return keys;
}

using Doubles = std::vector<double>;
inline Doubles to_doubles(const std::vector<float>& x) { return Doubles(x.begin(), x.end()); }

// A sum of products and the sum of their magnitudes, which bounds its rounding error.
struct Dot {
  double value = 0, magnitude = 0;
};
inline Dot dot(const double* x, const double* y, int64_t count) {
  Dot sum;
  for (int64_t i = 0; i < count; ++i) {
    sum.value += x[i] * y[i];
    sum.magnitude += std::abs(x[i] * y[i]);
  }
  return sum;
}

constexpr double kUnit = 0x1p-24;      // one fp32 rounding
constexpr double kExpError = 0x1p-20;  // relative error granted to an fp32 exp

struct ForwardReference {
  Doubles out, lse;
  Doubles out_bound, lse_bound;  // fp32 rounding inside; the rounding of the result to its dtype comes on top
};

// `unit_p` is the rounding of the probabilities and of their gradients before they are multiplied with v, k and q:
// 2^-8 where tensor cores take them as bf16, 0 where they stay fp32.
inline ForwardReference forward_reference(const AttentionShape& s, const Doubles& qkv, double scale,
                                          double unit_p = 0, const FirstKeys& first_keys = {}) {
  ForwardReference r;
  r.out.assign(static_cast<size_t>(s.T() * s.out_width()), 0.0);
  r.lse.assign(static_cast<size_t>(s.T() * s.H), 0.0);
  r.out_bound = r.out;
  r.lse_bound = r.lse;
  const double S = static_cast<double>(s.S), D = static_cast<double>(s.D);
  Doubles p(static_cast<size_t>(s.S));
  for (int64_t b = 0; b < s.B; ++b) {
    for (int64_t h = 0; h < s.H; ++h) {
      for (int64_t i = 0; i < s.S; ++i) {
        const int64_t g = h / s.group(), at = s.lse(b, i, h);
        const int64_t first = first_key_of(first_keys, s, b, i);
        double max = -INFINITY, sum = 0, score_error = 0;
        for (int64_t j = first; j < s.key_end(i); ++j) {
          const Dot score = dot(&qkv[s.q(b, i, h)], &qkv[s.k(b, j, g)], s.D);
          p[j] = scale * score.value;
          max = std::max(max, p[j]);
          score_error = std::max(score_error, (D + 2) * kUnit * std::abs(scale) * score.magnitude);
        }
        for (int64_t j = first; j < s.key_end(i); ++j) sum += p[j] = std::exp(p[j] - max);
        r.lse[at] = max + std::log(sum);
        // The score, its distance to the maximum (rounded, so no larger an error than the scores'), exp, the sum.
        const double p_error = 4 * score_error + kExpError + S * kUnit;
        r.lse_bound[at] = p_error + 2 * kUnit * std::abs(r.lse[at]);
        for (int64_t j = first; j < s.key_end(i); ++j) {
          for (int64_t d = 0; d < s.D; ++d) {
            const double term = p[j] / sum * qkv[s.v(b, j, g) + d];
            r.out[s.out(b, i, h) + d] += term;
            r.out_bound[s.out(b, i, h) + d] += (2 * p_error + S * kUnit + unit_p) * std::abs(term);
          }
        }
      }
    }
  }
  return r;
}

struct BackwardReference {
  Doubles d_qkv, bound;
};

// The gradient for out and lse as given, which may be rounded: that is what the op is asked for.
inline BackwardReference backward_reference(const AttentionShape& s, const Doubles& qkv, const Doubles& out,
                                            const Doubles& d_out, const Doubles& lse, double scale,
                                            double unit_p = 0, const FirstKeys& first_keys = {}) {
  BackwardReference r{Doubles(qkv.size()), Doubles(qkv.size())};
  const double terms = static_cast<double>(s.S * s.group()), D = static_cast<double>(s.D);
  const auto add = [&](int64_t at, double term, double magnitude, double relative_error) {
    r.d_qkv[at] += term;
    r.bound[at] += magnitude * (relative_error + (terms + D + 4) * kUnit);
  };
  for (int64_t b = 0; b < s.B; ++b) {
    for (int64_t h = 0; h < s.H; ++h) {
      for (int64_t i = 0; i < s.S; ++i) {
        const int64_t g = h / s.group(), q = s.q(b, i, h), row = s.out(b, i, h);
        const Dot delta = dot(&d_out[row], &out[row], s.D);
        for (int64_t j = first_key_of(first_keys, s, b, i); j < s.key_end(i); ++j) {
          const int64_t k = s.k(b, j, g), v = s.v(b, j, g);
          const Dot score = dot(&qkv[q], &qkv[k], s.D), d_p = dot(&d_out[row], &qkv[v], s.D);
          const double exponent = scale * score.value - lse[s.lse(b, i, h)];
          const double p = std::exp(exponent), d_s = p * (d_p.value - delta.value);
          const double p_error =
              unit_p + kExpError + (D + 2) * kUnit * std::abs(scale) * score.magnitude + kUnit * std::abs(exponent);
          const double magnitude = std::abs(scale) * p * (d_p.magnitude + delta.magnitude);
          for (int64_t d = 0; d < s.D; ++d) {
            add(q + d, scale * d_s * qkv[k + d], magnitude * std::abs(qkv[k + d]), p_error);
            add(k + d, scale * d_s * qkv[q + d], magnitude * std::abs(qkv[q + d]), p_error);
            add(v + d, p * d_out[row + d], std::abs(p * d_out[row + d]), p_error);
          }
        }
      }
    }
  }
  return r;
}

// Rotates the gradients of queries and keys back by the angles of their positions, cos_sin [S, D].
inline void rotate_back(BackwardReference& r, const AttentionShape& s, const std::vector<float>& cos_sin) {
  const int64_t half = s.D / 2;
  for (int64_t t = 0; t < s.T(); ++t) {
    for (int64_t c = 0; c < (s.H + s.Hkv) * s.D; ++c) {
      if (c % s.D >= half) continue;
      const int64_t low = t * s.width() + c, high = low + half, angle = t % s.S * s.D + c % s.D;
      const double cos = cos_sin[angle], sin = cos_sin[angle + half];
      const double x = r.d_qkv[low], y = r.d_qkv[high], x_bound = r.bound[low], y_bound = r.bound[high];
      const auto rotate = [&](int64_t at, double from_x, double from_y) {
        r.d_qkv[at] = x * from_x + y * from_y;
        r.bound[at] = std::abs(from_x) * (x_bound + 2 * kUnit * (std::abs(x) + x_bound)) +
                      std::abs(from_y) * (y_bound + 2 * kUnit * (std::abs(y) + y_bound));
      };
      rotate(low, cos, sin);
      rotate(high, -sin, cos);
    }
  }
}

// Elements further from `want` than `bound` and the rounding of their format allow.
inline int64_t count_wrong(const std::vector<float>& got, const Doubles& want, const Doubles& bound, DType dtype) {
  int64_t wrong = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    const double allowed = bound[i] + 1.01 * unit_roundoff(dtype) * (std::abs(want[i]) + bound[i]) + 1e-37;
    wrong += !(std::abs(got[i] - want[i]) <= allowed);
  }
  return wrong;
}

}  // namespace parka::test
