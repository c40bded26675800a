#include "kernels/ops/norm/qk_norm.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/parallel.h"
#include "kernels/cpu/attention/rope.h"
#include "kernels/cpu/codec.h"

namespace parka::cpu {
namespace {

constexpr int64_t kQkRowGrain = 16;

// The groups of a row that share one weight: the queries', or the keys'.
struct Groups {
  int64_t first;  // of all groups of a row
  int64_t count;
  int64_t first_col;  // of a row, of the first of them
  int64_t width;      // columns of one
  std::vector<float> weight;
};

std::vector<float> decoded(const TensorView& weight, float offset) {
  std::vector<float> values(static_cast<size_t>(weight.dim[0]));
  decode_elements(weight, 0, weight.dim[0], values.data());
  for (float& w : values) w += offset;
  return values;
}

template <typename Args>
std::vector<Groups> groups_of(const Args& a) {
  const int64_t queries = a.num_heads, keys = a.num_kv_heads, D = a.x.num_cols() / (queries + 2 * keys);
  const std::vector<float> of_q = decoded(a.q_weight, a.weight_offset), of_k = decoded(a.k_weight, a.weight_offset);
  if (a.kind == QkNormKind::kFull) {
    return {{0, 1, 0, queries * D, of_q}, {1, 1, queries * D, keys * D, of_k}};
  }
  return {{0, queries, 0, D, of_q}, {queries, keys, queries * D, D, of_k}};
}

// term(0) + ... + term(count - 1), in double: sums of long rows and short ones are equally good.
template <typename Term>
float mean_over(int64_t count, const Term& term) {
  double sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += term(i);
  return static_cast<float>(sum / static_cast<double>(count));
}

}  // namespace

void qk_norm_rope_forward(Device&, const QkNormRopeForward& a) {
  const int64_t T = a.x.num_rows(), width = a.x.num_cols(), S = a.cos_sin.dim[0], D = a.cos_sin.dim[1];
  const std::vector<Groups> parts = groups_of(a);
  parallel_for(T, kQkRowGrain, [&](int64_t begin, int64_t end) {
    std::vector<float> row(static_cast<size_t>(width));
    for (int64_t t = begin; t < end; ++t) {
      decode_rows(a.x, t, 1, row.data());
      if (!a.saved.empty()) {
        encode_row(row.data(), t, a.saved);
        decode_rows(a.saved, t, 1, row.data());
      }
      for (const Groups& part : parts) {
        for (int64_t g = 0; g < part.count; ++g) {
          float* const x = row.data() + part.first_col + g * part.width;
          const float rstd =
              1.0f / std::sqrt(mean_over(part.width, [&](int64_t c) { return x[c] * x[c]; }) + a.eps);
          a.rstd.as<float>()[t * a.rstd.dim[1] + part.first + g] = rstd;
          for (int64_t c = 0; c < part.width; ++c) x[c] = x[c] * rstd * part.weight[static_cast<size_t>(c)];
        }
      }
      for (int64_t head = 0; head < a.num_heads + a.num_kv_heads; ++head) {
        rotate_head(row.data() + head * D, a.cos_sin.as<float>() + t % S * D, 1.0f, D);
      }
      encode_elements(row.data(), t * width, width, a.out);
    }
  });
}

namespace {

// One group of one row: dy becomes d_x, and d_weight gets its part.
void group_backward(const float* x, float rstd, const std::vector<float>& weight, float* dy, float* d_weight) {
  const auto width = static_cast<int64_t>(weight.size());
  const float mean_g_xhat = mean_over(width, [&](int64_t c) { return dy[c] * weight[c] * (x[c] * rstd); });
  for (int64_t c = 0; c < width; ++c) {
    const float xhat = x[c] * rstd;
    d_weight[c] += dy[c] * xhat;
    dy[c] = rstd * (dy[c] * weight[c] - xhat * mean_g_xhat);
  }
}

void add_to(const TensorView& d_weight, const Matrix& parts, int64_t first_col) {
  const int64_t cols = d_weight.dim[0];
  std::vector<float> sum(static_cast<size_t>(cols)), total(sum);
  for (int64_t p = 0; p < parts.rows(); ++p) {
    for (int64_t c = 0; c < cols; ++c) sum[c] += parts.row(p)[first_col + c];
  }
  decode_elements(d_weight, 0, cols, total.data());
  for (int64_t c = 0; c < cols; ++c) total[c] += sum[c];
  encode_elements(total.data(), 0, cols, d_weight);
}

}  // namespace

void qk_norm_backward(Device&, const QkNormBackward& a) {
  const int64_t T = a.x.num_rows(), width = a.x.num_cols();
  const int64_t q_cols = a.q_weight.dim[0], k_cols = a.k_weight.dim[0];
  const std::vector<Groups> parts = groups_of(a);
  constexpr int64_t kTile = 64;  // rows whose part of the weights' gradients is summed together
  Matrix d_weights(ceil_div(T, kTile), q_cols + k_cols), d_qkv = decode(a.d_qkv);
  parallel_for(T, kTile, [&](int64_t begin, int64_t end) {
    std::vector<float> x(static_cast<size_t>(width));
    float* const d_weight = d_weights.row(begin / kTile);
    std::fill_n(d_weight, q_cols + k_cols, 0.0f);
    for (int64_t t = begin; t < end; ++t) {
      decode_rows(a.x, t, 1, x.data());
      for (const Groups& part : parts) {
        for (int64_t g = 0; g < part.count; ++g) {
          const int64_t col = part.first_col + g * part.width;
          group_backward(x.data() + col, a.rstd.as<float>()[t * a.rstd.dim[1] + part.first + g], part.weight,
                         d_qkv.row(t) + col, d_weight + (part.first == 0 ? 0 : q_cols));
        }
      }
    }
  });
  encode(d_qkv, a.d_qkv);
  if (!a.d_qkv_amax.empty()) {
    round_to(a.d_qkv.dtype, d_qkv);
    *a.d_qkv_amax.as<float>() = max_abs(d_qkv);
  }
  if (!a.d_q_weight.empty()) add_to(a.d_q_weight, d_weights, 0);
  if (!a.d_k_weight.empty()) add_to(a.d_k_weight, d_weights, q_cols);
}

}  // namespace parka::cpu
