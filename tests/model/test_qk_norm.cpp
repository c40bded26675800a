// Models with a norm of queries and keys, against the definition of the whole model in float64: its loss, and
// central differences of it for every weight.
#include <cmath>

#include "engine/evaluation/evaluation.h"
#include "tests/model/small_model.h"
#include "tests/support/catch.h"

using namespace parka;
using namespace parka::test;

namespace {

constexpr BatchShape kShape{2, 6};

// Heads of another width than d_model / num_heads, in groups of two for each key head.
ModelConfig config_of(QkNormKind kind) {
  ModelConfig config;
  config.vocab_size = 13;
  config.d_model = 12;
  config.num_layers = 2;
  config.num_heads = 4;
  config.num_kv_heads = 2;
  config.given_head_dim = 6;
  config.d_ffn = 10;
  config.norm = NormKind::kRmsNorm;
  config.norm_eps = 1e-3;
  config.qk_norm = kind;
  config.rope_theta = 100.0;
  config.tie_embeddings = false;
  return config;
}

using Vector = std::vector<double>;

// One sequence after another, token by token, as the papers write it.
class Reference {
 public:
  Reference(const ModelConfig& config, const ParameterTable& table, std::vector<Vector>& weights)
      : c_(config), table_(table), weights_(weights) {}

  // The mean over all targets that count.
  double loss(const std::vector<int32_t>& tokens, const std::vector<int32_t>& targets) const {
    const int64_t S = kShape.sequence_length;
    double sum = 0, count = 0;
    for (int64_t first = 0; first < kShape.num_tokens(); first += S) {
      std::vector<Vector> x;
      for (int64_t s = 0; s < S; ++s) {
        const double* row = weight("embedding").data() + tokens[first + s] * c_.d_model;
        x.emplace_back(row, row + c_.d_model);
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
    for (int64_t i = 0; i < count; ++i) x[i] *= rstd * weight[static_cast<size_t>(i)];
  }

  // Queries and keys normalised, then rotated.
  Vector qkv(const Vector& x, int64_t position, const std::string& prefix) const {
    const int64_t D = c_.head_dim(), H = c_.num_heads, Hkv = c_.kv_heads();
    Vector qkv = times(weight(prefix + "qkv"), normalized(x, weight(prefix + "attention_norm")));
    const Vector &q_norm = weight(prefix + "q_norm"), &k_norm = weight(prefix + "k_norm");
    if (c_.qk_norm == QkNormKind::kFull) {
      normalize(qkv.data(), H * D, q_norm);
      normalize(qkv.data() + H * D, Hkv * D, k_norm);
    } else {
      for (int64_t h = 0; h < H + Hkv; ++h) normalize(qkv.data() + h * D, D, h < H ? q_norm : k_norm);
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
          p.push_back(std::exp(score / std::sqrt(static_cast<double>(D))));
          total += p.back();
        }
        for (int64_t j = 0; j <= s; ++j) {
          for (int64_t i = 0; i < D; ++i) out[h * D + i] += p[j] / total * all[j][value + i];
        }
      }
      add(x[s], times(weight(prefix + "attention_out"), out));
      const Vector up_gate = times(weight(prefix + "up_gate"), normalized(x[s], weight(prefix + "ffn_norm")));
      Vector product(static_cast<size_t>(c_.d_ffn));
      for (int64_t i = 0; i < c_.d_ffn; ++i) {
        const double gate = up_gate[c_.d_ffn + i];
        product[i] = up_gate[i] * gate / (1 + std::exp(-gate));
      }
      add(x[s], times(weight(prefix + "down"), product));
    }
  }
  static void add(Vector& x, const Vector& y) {
    for (size_t i = 0; i < x.size(); ++i) x[i] += y[i];
  }

  const ModelConfig& c_;
  const ParameterTable& table_;
  const std::vector<Vector>& weights_;
};

// Matrices with values large enough that each weight matters, and norms around 1.
std::vector<float> test_weight(const ParameterInfo& p, size_t index) {
  std::vector<float> values = random_normal(p.numel(), 40 + index, p.role == ParameterRole::kNorm ? 0.2f : 0.4f);
  if (p.role == ParameterRole::kNorm) {
    for (float& v : values) v += 1;
  }
  return values;
}

}  // namespace

TEST_CASE("fp32 loss and every gradient with a norm of queries and keys are those of float64", "[model][qk_norm]") {
  const QkNormKind kind = GENERATE(QkNormKind::kPerHead, QkNormKind::kFull);
  const ModelConfig config = config_of(kind);
  const ParameterTable table = make_parameter_table(config, false);
  std::vector<Vector> weights;
  for (size_t i = 0; i < table.all.size(); ++i) {
    const std::vector<float> values = test_weight(table.all[i], i);
    weights.emplace_back(values.begin(), values.end());
  }
  const std::vector<int32_t> tokens = random_tokens(kShape.num_tokens(), config.vocab_size, 5);
  const std::vector<int32_t> targets = next_token_targets(tokens, kShape.sequence_length);
  const Reference reference(config, table, weights);
  const double want_loss = reference.loss(tokens, targets);
  std::vector<std::vector<float>> want(weights.size());
  for (size_t p = 0; p < weights.size(); ++p) {
    for (double& w : weights[p]) {
      constexpr double kStep = 1e-5;
      const double value = w;
      w = value + kStep;
      const double above = reference.loss(tokens, targets);
      w = value - kStep;
      const double below = reference.loss(tokens, targets);
      w = value;
      want[p].push_back(static_cast<float>((above - below) / (2 * kStep)));
    }
  }

  for (Device* device : devices()) {
    SmallModel m(config, precision_recipe(Recipe::kFp32), kShape, 1 << 20, *device);
    for (size_t i = 0; i < table.all.size(); ++i) m.set_weight(i, test_weight(table.all[i], i));
    m.model.weights_changed(*device);
    const auto scale =
        static_cast<float>(1.0 / static_cast<double>(kShape.num_sequences * (kShape.sequence_length - 1)));
    m.model.accumulate_gradients(*device, {tokens.data(), targets.data(), kShape}, {.grad_scale = scale},
                                 m.gradients, Model::Accumulation::kBegin);
    CAPTURE(name_of(kind), device->name());
    CHECK(std::abs(mean_loss(m.model.losses(*device), targets) - want_loss) < 1e-5 * want_loss);
    for (size_t p = 0; p < weights.size(); ++p) {
      CAPTURE(table.all[p].name);
      CHECK(relative_error(m.gradient(p), want[p]) < 1e-4);
    }
  }
}

TEST_CASE("weights of the norm of queries and keys start at 1, in widths of its kind", "[model][qk_norm]") {
  const auto names_with = [](QkNormKind kind, int64_t q_width, int64_t k_width) {
    const ModelConfig config = config_of(kind);
    const ParameterTable table = make_parameter_table(config, true);
    for (const auto& [name, width] : {std::pair{"blocks.1.q_norm", q_width}, {"blocks.1.k_norm", k_width}}) {
      const int index = table.index_of(name);
      if (width == 0) {
        CHECK(index == -1);
        continue;
      }
      REQUIRE(index >= 0);
      const ParameterInfo& p = table.all[static_cast<size_t>(index)];
      CHECK((p.rows == 1 && p.cols == width && p.role == ParameterRole::kNorm && !p.decayed));
      CHECK(initial_weight(config, table, static_cast<size_t>(index), 1) ==
            std::vector<float>(static_cast<size_t>(width), 1.0f));
    }
  };
  names_with(QkNormKind::kNone, 0, 0);
  names_with(QkNormKind::kPerHead, 6, 6);
  names_with(QkNormKind::kFull, 24, 12);
}

// FP8 copies of q, k and v are made before the norm, so that forward and backward have the same ones.
TEST_CASE("what is kept with a norm of queries and keys is as large as without", "[model][qk_norm][plan]") {
  const Recipe recipe = GENERATE(Recipe::kBf16, Recipe::kParka);
  const auto kept = [&](QkNormKind kind) {
    ModelConfig config;
    config.d_model = 512;
    config.num_heads = 4;
    config.num_layers = 2;
    config.d_ffn = 1024;
    config.qk_norm = kind;
    MemoryPlan plan;
    const Model model(config, precision_recipe(recipe), false, {2, 64}, 64, Model::Use::kTraining, {}, plan);
    int64_t bytes = 0;
    for (const auto& entry : plan.entries()) {
      if (entry.category == "saved activations") bytes += entry.bytes;
    }
    return bytes;
  };
  CHECK(kept(QkNormKind::kPerHead) == kept(QkNormKind::kNone));
  CHECK(kept(QkNormKind::kFull) == kept(QkNormKind::kNone));
}
