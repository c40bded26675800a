#pragma once
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "tests/model/small_model.h"
#include "tests/support/catch.h"
#include "tests/support/tensors.h"

// The definition of a whole model in float64, and a check of Parka's fp32 against it.
namespace parka::test {

using Vector = std::vector<double>;

// A model that it is checked with, small enough for central differences of every weight: heads of another width
// than d_model / num_heads, in groups of two for each key head.
inline ModelConfig reference_config() {
  ModelConfig config;
  config.vocab_size = 13;
  config.d_model = 12;
  config.num_layers = 2;
  config.num_heads = 4;
  config.num_kv_heads = 2;
  config.given_head_dim = 4;
  config.d_ffn = 10;
  config.norm = NormKind::kRmsNorm;
  config.norm_eps = 1e-3;
  config.rope_theta = 100.0;
  config.tie_embeddings = false;
  return config;
}

// An RMSNorm model with an untied head: one sequence after another, token by token, as the papers write it.
class ReferenceModel {
 public:
  ReferenceModel(const ModelConfig& config, const ParameterTable& table, std::vector<Vector>& weights)
      : c_(config), table_(table), weights_(weights) {}

  // The mean over all targets that count.
  double loss(const std::vector<int32_t>& tokens, const std::vector<int32_t>& targets, int64_t S) const {
    double sum = 0, count = 0;
    for (int64_t first = 0; first < static_cast<int64_t>(tokens.size()); first += S) {
      std::vector<Vector> x;
      for (int64_t s = 0; s < S; ++s) {
        const double* row = weight("embedding").data() + tokens[first + s] * c_.d_model;
        x.emplace_back(row, row + c_.d_model);
        if (c_.embedding_scale == EmbeddingScale::kSqrtDModel) {
          for (double& v : x.back()) v *= std::sqrt(static_cast<double>(c_.d_model));
        }
      }
      for (int64_t l = 0; l < c_.num_layers; ++l) block(x, "blocks." + std::to_string(l) + ".");
      for (int64_t s = 0; s < S; ++s) {
        if (targets[first + s] == kIgnoreTarget) continue;
        const Vector logits = times(weight("head"), normalized(x[s], weight("final_norm")));
        double total = 0;
        for (const double logit : logits) total += std::exp(logit);
        sum += std::log(total) - logits[targets[first + s]];
        count += 1;
      }
    }
    return sum / count;
  }

 private:
  const Vector& weight(const std::string& name) const {
    return weights_[static_cast<size_t>(table_.index_of(name))];
  }
  static Vector times(const Vector& matrix, const Vector& x) {
    Vector y(matrix.size() / x.size());
    for (size_t i = 0; i < matrix.size(); ++i) y[i / x.size()] += matrix[i] * x[i % x.size()];
    return y;
  }
  Vector normalized(Vector x, const Vector& weight) const {
    normalize(x.data(), static_cast<int64_t>(x.size()), weight);
    return x;
  }
  void normalize(double* x, int64_t count, const Vector& weight) const {
    double squares = 0;
    for (int64_t i = 0; i < count; ++i) squares += x[i] * x[i];
    const double rstd = 1 / std::sqrt(squares / static_cast<double>(count) + static_cast<float>(c_.norm_eps));
    for (int64_t i = 0; i < count; ++i)
      x[i] *= rstd * (weight[static_cast<size_t>(i)] + (c_.norm_unit_offset ? 1 : 0));
  }

  bool has(const std::string& name) const { return table_.index_of(name) >= 0; }

  // What an inner layer reads, of the residual stream x.
  Vector in_front(const Vector& x, const std::string& norm) const {
    return has(norm) ? normalized(x, weight(norm)) : x;
  }
  // x += y, or the norm behind of it.
  void add(Vector& x, Vector y, const std::string& norm) const {
    if (has(norm)) y = normalized(std::move(y), weight(norm));
    for (size_t i = 0; i < x.size(); ++i) x[i] += y[i];
  }

  // Queries and keys normalised, then rotated.
  Vector qkv(const Vector& x, int64_t position, const std::string& prefix) const {
    const int64_t D = c_.head_dim(), H = c_.num_heads, Hkv = c_.kv_heads();
    Vector qkv = times(weight(prefix + "qkv"), in_front(x, prefix + "attention_norm"));
    for (size_t i = 0; c_.qkv_bias && i < qkv.size(); ++i) qkv[i] += weight(prefix + "qkv_bias")[i];
    if (c_.qk_norm == QkNormKind::kFull) {
      normalize(qkv.data(), H * D, weight(prefix + "q_norm"));
      normalize(qkv.data() + H * D, Hkv * D, weight(prefix + "k_norm"));
    } else if (c_.qk_norm == QkNormKind::kPerHead) {
      for (int64_t h = 0; h < H + Hkv; ++h) {
        normalize(qkv.data() + h * D, D, weight(prefix + (h < H ? "q_norm" : "k_norm")));
      }
    }
    for (int64_t h = 0; h < H + Hkv; ++h) {
      for (int64_t i = 0; i < D / 2; ++i) {
        const double angle = static_cast<double>(position) *
                             std::pow(c_.rope_theta, -2.0 * static_cast<double>(i) / static_cast<double>(D));
        double &low = qkv[h * D + i], &high = qkv[h * D + i + D / 2];
        const double old_low = low;
        low = old_low * std::cos(angle) - high * std::sin(angle);
        high = high * std::cos(angle) + old_low * std::sin(angle);
      }
    }
    return qkv;
  }

  void block(std::vector<Vector>& x, const std::string& prefix) const {
    const int64_t D = c_.head_dim(), H = c_.num_heads, Hkv = c_.kv_heads(), S = static_cast<int64_t>(x.size());
    std::vector<Vector> all;
    for (int64_t s = 0; s < S; ++s) all.push_back(qkv(x[s], s, prefix));
    for (int64_t s = 0; s < S; ++s) {
      Vector out(static_cast<size_t>(H * D));
      for (int64_t h = 0; h < H; ++h) {
        const int64_t key = (H + h / (H / Hkv)) * D, value = key + Hkv * D;
        Vector p;
        double total = 0;
        for (int64_t j = 0; j <= s; ++j) {
          double score = 0;
          for (int64_t i = 0; i < D; ++i) score += all[s][h * D + i] * all[j][key + i];
          p.push_back(std::exp(score / std::sqrt(static_cast<double>(c_.pre_attn_scalar()))));
          total += p.back();
        }
        for (int64_t j = 0; j <= s; ++j) {
          for (int64_t i = 0; i < D; ++i) out[h * D + i] += p[j] / total * all[j][value + i];
        }
      }
      add(x[s], times(weight(prefix + "attention_out"), out), prefix + "attention_post_norm");
      const Vector up_gate = times(weight(prefix + "up_gate"), in_front(x[s], prefix + "ffn_norm"));
      Vector product(static_cast<size_t>(c_.d_ffn));
      for (int64_t i = 0; i < c_.d_ffn; ++i) {
        const double gate = up_gate[c_.d_ffn + i];
        product[i] = up_gate[i] * activated(gate);
      }
      add(x[s], times(weight(prefix + "down"), product), prefix + "ffn_post_norm");
    }
  }

  double activated(double gate) const {
    if (c_.activation == GateActivation::kSilu) return gate / (1 + std::exp(-gate));
    const double inner = std::sqrt(2 / std::acos(-1.0)) * (gate + 0.044715 * gate * gate * gate);
    return gate * 0.5 * (1 + std::tanh(inner));
  }

  const ModelConfig& c_;
  const ParameterTable& table_;
  const std::vector<Vector>& weights_;
};

// Matrices with values large enough that each weight matters, and norms around 1.
inline std::vector<float> test_weight(const ParameterInfo& p, size_t index) {
  std::vector<float> values = random_normal(p.numel(), 40 + index, p.role == ParameterRole::kNorm ? 0.2f : 0.4f);
  if (p.role == ParameterRole::kNorm) {
    for (float& v : values) v += 1;
  }
  return values;
}

// The loss in fp32, and every gradient against central differences of the loss in float64, on every device.
inline void check_against_float64(const ModelConfig& config) {
  constexpr BatchShape shape{2, 6};
  const ParameterTable table = make_parameter_table(config, false);
  std::vector<Vector> weights;
  for (size_t i = 0; i < table.all.size(); ++i) {
    const std::vector<float> values = test_weight(table.all[i], i);
    weights.emplace_back(values.begin(), values.end());
  }
  const std::vector<int32_t> tokens = random_tokens(shape.num_tokens(), config.vocab_size, 5);
  const std::vector<int32_t> targets = next_token_targets(tokens, shape.sequence_length);
  const ReferenceModel reference(config, table, weights);
  const auto loss = [&] { return reference.loss(tokens, targets, shape.sequence_length); };
  const double want_loss = loss();
  std::vector<std::vector<float>> want(weights.size());
  for (size_t p = 0; p < weights.size(); ++p) {
    for (double& w : weights[p]) {
      constexpr double kStep = 1e-5;
      const double value = w;
      w = value + kStep;
      const double above = loss();
      w = value - kStep;
      const double below = loss();
      w = value;
      want[p].push_back(static_cast<float>((above - below) / (2 * kStep)));
    }
  }

  for (Device* device : devices()) {
    SmallModel m(config, precision_recipe(Recipe::kFp32), shape, 1 << 20, *device);
    for (size_t i = 0; i < table.all.size(); ++i) m.set_weight(i, test_weight(table.all[i], i));
    m.model.weights_changed(*device);
    const auto scale =
        static_cast<float>(1.0 / static_cast<double>(shape.num_sequences * (shape.sequence_length - 1)));
    m.model.accumulate_gradients(*device, {tokens.data(), targets.data(), shape}, {.grad_scale = scale},
                                 m.gradients, Model::Accumulation::kBegin);
    CAPTURE(device->name());
    CHECK(std::abs(mean_loss(m.model.losses(*device), targets) - want_loss) < 1e-5 * want_loss);
    for (size_t p = 0; p < weights.size(); ++p) {
      CAPTURE(table.all[p].name);
      CHECK(relative_error(m.gradient(p), want[p]) < 1e-4);
    }
  }
}

}  // namespace parka::test
