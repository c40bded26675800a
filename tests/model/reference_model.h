#pragma once
#include <algorithm>
#include <cmath>
#include <map>
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

  struct Loss {
    double of_targets = 0;  // the mean over all that count
    double of_routers = 0;
  };
  Loss loss(const std::vector<int32_t>& tokens, const std::vector<int32_t>& targets, int64_t S,
            const RouterLosses& router = {}) const {
    double sum = 0, count = 0;
    Routed routed;
    for (int64_t first = 0; first < static_cast<int64_t>(tokens.size()); first += S) {
      std::vector<Vector> x;
      for (int64_t s = 0; s < S; ++s) {
        const double* row = weight("embedding").data() + tokens[first + s] * c_.d_model;
        x.emplace_back(row, row + c_.d_model);
        if (c_.embedding_scale == EmbeddingScale::kSqrtDModel) {
          for (double& v : x.back()) v *= std::sqrt(static_cast<double>(c_.d_model));
        }
      }
      for (int64_t l = 0; l < c_.num_layers; ++l) block(x, "blocks." + std::to_string(l) + ".", routed);
      for (int64_t s = 0; s < S; ++s) {
        if (targets[first + s] == kIgnoreTarget) continue;
        const Vector logits = times(weight("head"), normalized(x[s], weight("final_norm")));
        double total = 0;
        for (const double logit : logits) total += std::exp(logit);
        sum += std::log(total) - logits[targets[first + s]];
        count += 1;
      }
    }
    return {sum / count, router_loss(routed, router, static_cast<double>(tokens.size()))};
  }

 private:
  // What the router of a block has done, block by block.
  struct Load {
    Vector chosen, scores;  // tokens that chose each expert, and the sum of its scores
    double squared_lse = 0;
  };
  using Routed = std::map<std::string, Load>;

  double router_loss(const Routed& routed, const RouterLosses& router, double tokens) const {
    const auto E = static_cast<double>(c_.moe.num_experts), k = static_cast<double>(c_.moe.experts_per_token);
    const auto blocks = static_cast<double>(routed.size());
    double loss = 0;
    Vector chosen(static_cast<size_t>(c_.moe.num_experts)), scores(chosen);
    for (const auto& [prefix, load] : routed) {
      loss += router.z * load.squared_lse / tokens;
      for (size_t e = 0; e < chosen.size(); ++e) {
        if (!router.is_pooled) loss += router.balance * E * load.chosen[e] / (k * tokens) * load.scores[e] / tokens;
        chosen[e] += load.chosen[e];
        scores[e] += load.scores[e];
      }
    }
    for (size_t e = 0; router.is_pooled && e < chosen.size(); ++e) {
      loss += router.balance * E * chosen[e] / (tokens * blocks) * scores[e] / (tokens * blocks);
    }
    return loss;
  }

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

  // The feed-forward of these matrices, [2 f, d] from `up_gate` on and [d, f].
  Vector feed_forward(const Vector& x, const Vector& up_gate, const Vector& down) const {
    const Vector projected = times(up_gate, x);
    Vector product(projected.size() / 2);
    for (size_t i = 0; i < product.size(); ++i)
      product[i] = projected[i] * activated(projected[product.size() + i]);
    return times(down, product);
  }

  static std::vector<size_t> largest(const Vector& values, const std::vector<size_t>& of, int64_t count) {
    std::vector<size_t> order = of;
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return values[a] > values[b]; });
    order.resize(static_cast<size_t>(count));
    return order;
  }

  Vector mixture(const Vector& x, const std::string& prefix, Load& load) const {
    const MoeConfig& moe = c_.moe;
    const auto E = static_cast<size_t>(moe.num_experts), in_group = E / static_cast<size_t>(moe.groups);
    const Vector l = times(weight(prefix + "router"), x);
    double total = 0, of_all = 0;
    for (const double v : l) total += std::exp(v);
    Vector p;
    for (const double v : l)
      p.push_back(moe.score == RouterScore::kSoftmax ? std::exp(v) / total : 1 / (1 + std::exp(-v)));
    for (const double v : p) of_all += v;
    Vector c = p;
    for (size_t e = 0; moe.correction_bias && e < E; ++e) c[e] += weight(prefix + "router_bias")[e];
    Vector group_scores;
    std::vector<size_t> groups, candidates;
    for (size_t g = 0; g < E / in_group; ++g) {
      Vector own(c.begin() + static_cast<int64_t>(g * in_group),
                 c.begin() + static_cast<int64_t>((g + 1) * in_group));
      std::sort(own.rbegin(), own.rend());
      group_scores.push_back(own[0] + (in_group > 1 ? own[1] : 0));
      groups.push_back(g);
    }
    groups = largest(group_scores, groups, moe.groups_kept);
    for (size_t e = 0; e < E; ++e) {
      if (std::find(groups.begin(), groups.end(), e / in_group) != groups.end()) candidates.push_back(e);
    }
    const std::vector<size_t> chosen = largest(c, candidates, moe.experts_per_token);

    double sum = 0;
    for (const size_t e : chosen) sum += p[e];
    Vector y(x.size());
    if (moe.shared_width > 0) {
      y = feed_forward(x, weight(prefix + "shared.up_gate"), weight(prefix + "shared.down"));
    }
    for (const size_t e : chosen) {
      const double w = p[e] / (moe.normalize_weights ? sum : 1) * moe.weight_scaling;
      const Vector out =
          feed_forward(x, of_expert(prefix + "experts.up_gate", e), of_expert(prefix + "experts.down", e));
      for (size_t i = 0; i < y.size(); ++i) y[i] += w * out[i];
    }

    load.chosen.resize(E);
    load.scores.resize(E);
    for (const size_t e : chosen) load.chosen[e] += 1;
    for (size_t e = 0; e < E; ++e) load.scores[e] += p[e] / of_all;
    load.squared_lse += std::pow(std::log(total), 2);
    return y;
  }
  Vector of_expert(const std::string& name, size_t e) const {
    const Vector& all = weight(name);
    const auto size = static_cast<int64_t>(all.size()) / c_.moe.num_experts;
    const auto begin = all.begin() + static_cast<int64_t>(e) * size;
    return {begin, begin + size};
  }

  void block(std::vector<Vector>& x, const std::string& prefix, Routed& routed) const {
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
      const Vector y = in_front(x[s], prefix + "ffn_norm");
      add(x[s],
          has(prefix + "router") ? mixture(y, prefix, routed[prefix])
                                 : feed_forward(y, weight(prefix + "up_gate"), weight(prefix + "down")),
          prefix + "ffn_post_norm");
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

// The loss in fp32, and every gradient against central differences of the loss in float64, on every device. No two
// experts may be so near that a difference changes the choice.
inline void check_against_float64(const ModelConfig& config, const RouterLosses& router = {}) {
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
  const auto loss = [&] {
    const auto [of_targets, of_routers] = reference.loss(tokens, targets, shape.sequence_length, router);
    return of_targets + of_routers;
  };
  const double want_loss = reference.loss(tokens, targets, shape.sequence_length).of_targets;
  std::vector<std::vector<float>> want(weights.size());
  for (size_t p = 0; p < weights.size(); ++p) {
    if (!table.all[p].trainable) continue;
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
    m.model.accumulate_gradients(*device, {tokens.data(), targets.data(), shape},
                                 {.grad_scale = scale, .router = router}, m.gradients, Model::Accumulation::kBegin);
    CAPTURE(device->name());
    CHECK(std::abs(mean_loss(m.model.losses(*device), targets) - want_loss) < 1e-5 * want_loss);
    for (size_t p = 0; p < weights.size(); ++p) {
      if (!table.all[p].trainable) continue;
      CAPTURE(table.all[p].name);
      CHECK(relative_error(m.gradient(p), want[p]) < 1e-4);
    }
  }
}

}  // namespace parka::test
