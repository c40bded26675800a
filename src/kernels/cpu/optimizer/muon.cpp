#include "kernels/ops/optimizer/muon.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "core/parallel.h"
#include "kernels/cpu/codec.h"
#include "kernels/cpu/optimizer/groups.h"

namespace parka::cpu {
namespace {

// out = x y, rounded to bf16 after out[i][j] = factor * sum + addend_factor * addend[i][j]. Every sum is over
// ascending k, so a product that is symmetric by definition is so bit for bit.
struct Product {
  const Matrix &x, &y;
  float factor = 1;
  const Matrix* addend = nullptr;
  float addend_factor = 0;
};

void multiply(const Product& p, Matrix& out) {
  constexpr int64_t kRowGrain = 8;
  parallel_for(out.rows(), kRowGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      float* row = out.row(i);
      std::fill_n(row, out.cols(), 0.0f);
      for (int64_t k = 0; k < p.y.rows(); ++k) {
        const float x = p.x.row(i)[k];
        const float* y = p.y.row(k);
        for (int64_t j = 0; j < out.cols(); ++j) row[j] += x * y[j];
      }
      for (int64_t j = 0; j < out.cols(); ++j) {
        row[j] *= p.factor;
        if (p.addend != nullptr) row[j] += p.addend_factor * p.addend->row(i)[j];
      }
    }
  });
  round_to(DType::kBF16, out);
}

void normalize(float safety, Matrix& x) {
  double squares = 0;
  for (int64_t i = 0; i < x.rows() * x.cols(); ++i) squares += double{x.data()[i]} * x.data()[i];
  const float divisor = std::max(safety * static_cast<float>(std::sqrt(squares)), kLeastMatrixNorm);
  for (int64_t i = 0; i < x.rows() * x.cols(); ++i) x.data()[i] /= divisor;
  round_to(DType::kBF16, x);
}

// x has at least as many columns as rows.
Matrix orthogonal_factor(Matrix x, const Orthogonalize& a) {
  const int64_t r = x.rows();
  Matrix gram(r, r), polynomial(r, r), next(r, x.cols());
  normalize(a.safety, x);
  for (const NewtonSchulzStep& step : a.steps) {
    multiply({x, transposed(x)}, gram);
    multiply({gram, gram, step.c, &gram, step.b}, polynomial);
    multiply({polynomial, x, 1.0f, &x, step.a}, next);
    std::swap(x, next);
  }
  return x;
}

}  // namespace

void muon_momentum(Device&, const MuonMomentum& a) {
  const float grad_scale = a.grad_scale.as<float>()[0];
  const auto mu = static_cast<float>(a.mu), gain = static_cast<float>(1.0 - a.mu);
  for_each_group(a.gradient.numel(), [&](const GroupRange& range) {
    GroupValues g, b, direction{};
    if (std::isfinite(grad_scale)) {
      decode_elements(a.gradient, range.begin, range.count, g.data());
      read_moment(a.momentum, range, b.data());
      for (int64_t i = 0; i < range.count; ++i) {
        g[i] *= grad_scale;
        b[i] += gain * (g[i] - b[i]);
        direction[i] = g[i] + mu * (b[i] - g[i]);
      }
      write_moment(b.data(), range, /*is_second=*/false, a.momentum);
    }
    encode_elements(direction.data(), range.begin, range.count, a.direction);
  });
}

// All memory but that of `matrices` is its own.
void orthogonalize(Device&, const Orthogonalize& a) {
  const int64_t m = a.matrices.dim[1], n = a.matrices.dim[2];
  for (int64_t i = 0; i < a.matrices.dim[0]; ++i) {
    const TensorView matrix = a.matrices.rows(i, 1).reshaped({m, n});
    Matrix x = decode(matrix);
    const bool is_tall = m > n;
    x = orthogonal_factor(is_tall ? transposed(x) : std::move(x), a);
    encode(is_tall ? transposed(x) : std::move(x), matrix);
  }
}

void muon_step(Device&, const MuonStep& a) {
  const SteppedWeights weights(a);
  const bool changes = std::isfinite(a.grad_scale.as<float>()[0]);
  if (!changes && a.weight_amax.empty()) return;
  for_each_group(a.weight.numel(), [&](const GroupRange& range) {
    if (changes) {
      GroupValues direction, w;
      decode_elements(a.direction, range.begin, range.count, direction.data());
      read_weights(weights, range, w.data());
      for (int64_t i = 0; i < range.count; ++i) {
        w[i] -= a.lr * (direction[i] + a.weight_decay * w[i]);
      }
      write_weights(weights, range, w.data());
    }
    raise_weight_amax(weights, range);
  });
}

}  // namespace parka::cpu
