#include "kernels/ops/attention/attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "core/parallel.h"
#include "kernels/cpu/attention/rope.h"
#include "kernels/cpu/codec.h"
#include "kernels/cpu/eigen.h"
#include "kernels/cpu/math/exp.h"

// Query rows are processed in tiles of R. A tile attends to keys F..N-1, where F is the first key of its first row
// and N - 1 the last key of its last one. So its scores and probabilities are [R, N - F] matrices, and memory grows
// with S, not S^2. With causal attention the last R columns, and those before the first key of a later row, hold
// masked pairs; their probabilities are zero. (So a NaN in v can reach other rows of the same tile: 0 * NaN = NaN.)
namespace parka::cpu {
namespace {

using RowMatrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

constexpr int64_t kTileRows = 64;

// B sequences of S rows; H query heads and Hkv key/value heads of width D.
struct Dims {
  int64_t B, S, H, Hkv, D;

  template <typename Args>
  explicit Dims(const Args& a)
      : B(a.qkv.dim[0] / a.sequence_length),
        S(a.sequence_length),
        H(a.num_heads),
        Hkv(a.num_kv_heads),
        D(a.qkv.dim[1] / (H + 2 * Hkv)) {}

  int64_t group() const { return H / Hkv; }  // query heads per key/value head
};

// The keys first(i) to end(i) - 1 that row i of sequence b attends to.
class SeenKeys {
 public:
  template <typename Args>
  SeenKeys(const Args& a, const Dims& dims, int64_t b)
      : first_key_(a.first_key.empty() ? nullptr : a.first_key.template as<int32_t>() + b * dims.S),
        last_end_(a.causal ? 0 : dims.S) {}
  int64_t first(int64_t i) const { return first_key_ == nullptr ? 0 : first_key_[i]; }
  int64_t end(int64_t i) const { return std::max(i + 1, last_end_); }
  int64_t count(int64_t i) const { return end(i) - first(i); }

 private:
  const int32_t* first_key_;  // null: 0
  int64_t last_end_;          // of causal attention 0
};

// Before anything is written: the tiles rely on it, and the op's cost on its window.
template <typename Args>
void check_first_keys(const Args& a, const Dims& dims) {
  if (a.first_key.empty()) return;
  for (int64_t b = 0; b < dims.B; ++b) {
    const SeenKeys seen(a, dims, b);
    for (int64_t i = 0; i < dims.S; ++i) {
      const int64_t least = i == 0 ? 0 : seen.first(i - 1);
      if (seen.first(i) < least || seen.first(i) > i) {
        throw_internal("attention: first_key of position {} of sequence {} is {}, wanted {} to {}", i, b,
                       seen.first(i), least, i);
      }
      if (a.window > 0 && seen.count(i) > a.window) {
        throw_internal("attention: position {} of sequence {} attends to {} keys with a window of {}", i, b,
                       seen.count(i), a.window);
      }
    }
  }
}

// Columns [head * D, (head + 1) * D) of the rows of sequence b, as [S, D]. In the fused QKV buffer key head g is
// head H + g and value head g is head H + Hkv + g.
RowMatrix load_head(const TensorView& x, const Dims& dims, int64_t b, int64_t head) {
  RowMatrix values(dims.S, dims.D);
  for (int64_t i = 0; i < dims.S; ++i) {
    decode_elements(x, (b * dims.S + i) * x.dim[1] + head * dims.D, dims.D, values.row(i).data());
  }
  return values;
}

void store_head(const RowMatrix& values, const TensorView& x, const Dims& dims, int64_t b, int64_t head) {
  for (int64_t i = 0; i < dims.S; ++i) {
    encode_elements(values.row(i).data(), (b * dims.S + i) * x.dim[1] + head * dims.D, dims.D, x);
  }
}

// Turns the scores of a row into probabilities and returns the log of the sum of their exponentials. The maximum
// is subtracted first, so no exponential overflows. maxCoeff may skip a NaN; it comes back through the sum.
float softmax(Eigen::Ref<Eigen::RowVectorXf> scores) {
  const float max = scores.maxCoeff();
  scores.array() -= max;
  exp_elements(scores.data(), scores.size(), scores.data());
  const float sum = scores.sum();
  scores /= sum;
  return max + std::log(sum);
}

void forward_head(const AttentionForward& a, const Dims& dims, int64_t b, int64_t h) {
  const int64_t kv_head = h / dims.group();
  const RowMatrix q = load_head(a.qkv, dims, b, h);
  const RowMatrix k = load_head(a.qkv, dims, b, dims.H + kv_head);
  const RowMatrix v = load_head(a.qkv, dims, b, dims.H + dims.Hkv + kv_head);
  RowMatrix out(dims.S, dims.D);
  float* lse = a.lse.as<float>() + (b * dims.H + h) * dims.S;
  const SeenKeys seen(a, dims, b);
  for (int64_t begin = 0; begin < dims.S; begin += kTileRows) {
    const int64_t R = std::min(kTileRows, dims.S - begin), N = seen.end(begin + R - 1), F = seen.first(begin);
    RowMatrix p(R, N - F);
    p.noalias() = a.scale * (q.middleRows(begin, R) * k.middleRows(F, N - F).transpose());
    for (int64_t r = 0; r < R; ++r) {
      const int64_t i = begin + r, hidden = seen.first(i) - F;
      lse[i] = softmax(p.row(r).segment(hidden, seen.count(i)));
      p.row(r).head(hidden).setZero();
      p.row(r).tail(N - seen.end(i)).setZero();
    }
    out.middleRows(begin, R).noalias() = p * v.middleRows(F, N - F);
  }
  store_head(out, a.out, dims, b, h);
}

// lse and delta of a query head, one value per row.
struct RowStatistics {
  const float* lse;
  Eigen::VectorXf delta;
};

// p[r,j] = exp(score - lse), zero where masked, in place of the scores; d_s = p * (d_p - delta) in place of d_p.
// The first column is the first key of row `begin`.
void score_gradient(const RowStatistics& rows, const SeenKeys& seen, int64_t begin, RowMatrix& p, RowMatrix& d_s) {
  for (int64_t r = 0; r < p.rows(); ++r) {
    const int64_t i = begin + r, hidden = seen.first(i) - seen.first(begin), count = seen.count(i);
    auto of_seen = p.row(r).segment(hidden, count);
    of_seen.array() -= rows.lse[i];
    exp_elements(of_seen.data(), count, of_seen.data());
    p.row(r).head(hidden).setZero();
    p.row(r).tail(p.cols() - hidden - count).setZero();
    d_s.row(r).array() = p.row(r).array() * (d_s.row(r).array() - rows.delta[i]);
  }
}

// Gradients of a query or key head, rotated back before they are rounded if the op wants that.
void store_gradient(RowMatrix& d_x, const AttentionBackward& a, const Dims& dims, int64_t b, int64_t head) {
  if (!a.cos_sin.empty()) {
    for (int64_t i = 0; i < dims.S; ++i) {
      rotate_head(d_x.row(i).data(), a.cos_sin.as<float>() + i * dims.D, -1.0f, dims.D);
    }
  }
  store_head(d_x, a.d_qkv, dims, b, head);
}

// All query heads of one key/value head in order, so that d_k and d_v are summed in a fixed order.
void backward_group(const AttentionBackward& a, const Dims& dims, int64_t b, int64_t kv_head) {
  const int64_t k_head = dims.H + kv_head, v_head = dims.H + dims.Hkv + kv_head;
  const RowMatrix k = load_head(a.qkv, dims, b, k_head), v = load_head(a.qkv, dims, b, v_head);
  RowMatrix d_q(dims.S, dims.D);
  RowMatrix d_k = RowMatrix::Zero(dims.S, dims.D), d_v = d_k;
  const SeenKeys seen(a, dims, b);
  for (int64_t h = kv_head * dims.group(); h < (kv_head + 1) * dims.group(); ++h) {
    const RowMatrix q = load_head(a.qkv, dims, b, h);
    const RowMatrix d_out = load_head(a.d_out, dims, b, h);
    const RowStatistics rows{a.lse.as<float>() + (b * dims.H + h) * dims.S,
                             d_out.cwiseProduct(load_head(a.out, dims, b, h)).rowwise().sum()};
    for (int64_t begin = 0; begin < dims.S; begin += kTileRows) {
      const int64_t R = std::min(kTileRows, dims.S - begin), F = seen.first(begin);
      const int64_t N = seen.end(begin + R - 1) - F;
      const auto q_tile = q.middleRows(begin, R), d_out_tile = d_out.middleRows(begin, R);
      RowMatrix p(R, N), d_s(R, N);
      p.noalias() = a.scale * (q_tile * k.middleRows(F, N).transpose());
      d_s.noalias() = d_out_tile * v.middleRows(F, N).transpose();
      score_gradient(rows, seen, begin, p, d_s);
      d_q.middleRows(begin, R).noalias() = a.scale * (d_s * k.middleRows(F, N));
      d_k.middleRows(F, N).noalias() += a.scale * (d_s.transpose() * q_tile);
      d_v.middleRows(F, N).noalias() += p.transpose() * d_out_tile;
    }
    store_gradient(d_q, a, dims, b, h);
  }
  store_gradient(d_k, a, dims, b, k_head);
  store_head(d_v, a.d_qkv, dims, b, v_head);
}

// Sums over some rows and heads; see AttentionTotals.
struct AttentionSums {
  double sum_squares = 0, squares = 0, delta_squares = 0, score_squares = 0;
  int64_t rows = 0, not_finite = 0;
  float largest_score = 0;

  void add(const AttentionSums& other) {
    sum_squares += other.sum_squares;
    squares += other.squares;
    delta_squares += other.delta_squares;
    score_squares += other.score_squares;
    rows += other.rows;
    not_finite += other.not_finite;
    largest_score = std::max(largest_score, other.largest_score);
  }
  void add_row(double sum, double magnitude, double squares_of_delta, double score, float largest) {
    if (!std::isfinite(sum) || !std::isfinite(magnitude) || !std::isfinite(score)) {
      ++not_finite;
      return;
    }
    sum_squares += sum * sum;
    squares += magnitude * magnitude;
    delta_squares += squares_of_delta;
    score_squares += score * score;
    ++rows;
    largest_score = std::max(largest_score, largest);
  }
};

// The first `rows` rows of a query head of sequence b.
AttentionSums sums_of_head(const AttentionStatistics& a, const Dims& dims, int64_t b, int64_t h, int64_t rows) {
  const int64_t kv_head = h / dims.group();
  const RowMatrix q = load_head(a.qkv, dims, b, h), k = load_head(a.qkv, dims, b, dims.H + kv_head),
                  v = load_head(a.qkv, dims, b, dims.H + dims.Hkv + kv_head), out = load_head(a.out, dims, b, h),
                  d_out = load_head(a.d_out, dims, b, h);
  const float* const lse = a.lse.as<float>() + (b * dims.H + h) * dims.S;
  const SeenKeys seen(a, dims, b);
  AttentionSums sums;
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t first = seen.first(i), count = seen.count(i);
    const Eigen::VectorXf scores = a.scale * (k.middleRows(first, count) * q.row(i).transpose());
    Eigen::VectorXf p = scores.array() - lse[i];
    exp_elements(p.data(), count, p.data());
    const Eigen::VectorXf d_p = v.middleRows(first, count) * d_out.row(i).transpose();
    const Eigen::RowVectorXf of_delta = d_out.row(i).cwiseProduct(out.row(i));
    const Eigen::VectorXf d_s = p.array() * (d_p.array() - of_delta.sum());
    sums.add_row(d_s.sum(), d_s.cwiseAbs().sum(), of_delta.squaredNorm(), p.dot(scores),
                 scores.cwiseAbs().maxCoeff());
  }
  return sums;
}

}  // namespace

void attention_forward(Device&, const AttentionForward& a) {
  const Dims dims(a);
  check_first_keys(a, dims);
  parallel_for(dims.B * dims.H, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) forward_head(a, dims, i / dims.H, i % dims.H);
  });
  if (!a.out_amax.empty()) a.out_amax.as<float>()[0] = max_abs(decode(a.out));
}

void attention_backward(Device&, const AttentionBackward& a) {
  const Dims dims(a);
  check_first_keys(a, dims);
  parallel_for(dims.B * dims.Hkv, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) backward_group(a, dims, i / dims.Hkv, i % dims.Hkv);
  });
  if (!a.d_qkv_amax.empty()) a.d_qkv_amax.as<float>()[0] = max_abs(decode(a.d_qkv));
}

void attention_statistics(Device&, const AttentionStatistics& a) {
  const Dims dims(a);
  check_first_keys(a, dims);
  std::vector<AttentionSums> of_heads(static_cast<size_t>(ceil_div(a.rows, dims.S) * dims.H));
  parallel_for(static_cast<int64_t>(of_heads.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t b = i / dims.H, rows = std::min(dims.S, a.rows - b * dims.S);
      of_heads[static_cast<size_t>(i)] = sums_of_head(a, dims, b, i % dims.H, rows);
    }
  });
  AttentionSums sums;
  for (const AttentionSums& of_head : of_heads) sums.add(of_head);
  const AttentionTotals totals = {
      .rows = static_cast<float>(sums.rows),
      .not_finite = static_cast<float>(sums.not_finite),
      .sum_norm = static_cast<float>(std::sqrt(sums.sum_squares)),
      .norm = static_cast<float>(std::sqrt(sums.squares)),
      .delta_norm = static_cast<float>(std::sqrt(sums.delta_squares)),
      .score_norm = static_cast<float>(std::sqrt(sums.score_squares)),
      .largest_score = sums.largest_score,
  };
  std::memcpy(a.totals.as<float>(), &totals, sizeof(totals));
}

}  // namespace parka::cpu
