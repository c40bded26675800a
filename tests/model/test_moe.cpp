// Mixtures of experts against their formulas in float64, and under routings that nobody would wish for.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "tests/model/reference_model.h"
#include "tests/model/small_model.h"
#include "tests/support/catch.h"
#include "tests/support/tensors.h"

using namespace parka;
using namespace parka::test;

namespace {

const Recipe kRecipes[] = {Recipe::kFp32, Recipe::kBf16, Recipe::kFp8Linear, Recipe::kCoat, Recipe::kParka};

// DeepSeek-V3's router with all that goes with it.
MoeConfig deepseek() {
  return {.num_experts = 8,
          .experts_per_token = 2,
          .score = RouterScore::kSigmoid,
          .normalize_weights = true,
          .weight_scaling = 2.5,
          .groups = 4,
          .groups_kept = 2,
          .correction_bias = true,
          .shared_width = 16,
          .dense_layers = 1,
          .dense_width = 16};
}

ModelConfig small_config(const MoeConfig& moe, int64_t num_layers = 2) {
  ModelConfig config;
  config.vocab_size = 61;
  config.d_model = 32;
  config.num_layers = num_layers;
  config.num_heads = 2;
  config.d_ffn = 48;
  config.norm = NormKind::kRmsNorm;
  config.tie_embeddings = false;
  config.moe = moe;
  return config;
}

// A model whose sums over micro-batches are asked for.
struct MoeModel : SmallModel {
  MoeModel(const ModelConfig& config_, const PrecisionConfig& precision, const BatchShape& largest, Device& on)
      : SmallModel(config_, precision, largest, 1 << 20, on),
        config(config_),
        sums(on, DType::kF32, {model.num_sums()}, std::vector<float>(static_cast<size_t>(model.num_sums()))) {
    initialize(config, 1);
  }

  size_t index_of(const std::string& name) const { return static_cast<size_t>(model.parameters().index_of(name)); }
  void set(const std::string& name, const std::vector<float>& values) {
    set_weight(index_of(name), values);
    model.weights_changed(*device);
  }
  void run(const std::vector<int32_t>& tokens, const BatchShape& shape, const RouterLosses& router = {},
           Model::Accumulation accumulation = Model::Accumulation::kBegin) {
    const std::vector<int32_t> targets = next_token_targets(tokens, shape.sequence_length);
    model.accumulate_gradients(*device, {tokens.data(), targets.data(), shape},
                               {.grad_scale = 0.01f, .sums = sums, .router = router}, gradients, accumulation);
  }
  // The gradient of an expert's matrix.
  std::vector<float> of_expert(const std::string& name, int64_t e) const {
    const std::vector<float> all = gradient(index_of(name));
    const auto size = static_cast<int64_t>(all.size()) / config.moe.num_experts;
    return {all.begin() + e * size, all.begin() + (e + 1) * size};
  }
  // All that is trained.
  std::vector<float> trained_gradients() const {
    std::vector<float> all;
    for (size_t i = 0; i < gradients.size(); ++i) {
      if (!model.parameters().all[i].trainable) continue;
      const std::vector<float> one = gradient(i);
      all.insert(all.end(), one.begin(), one.end());
    }
    return all;
  }
  // How many tokens chose each expert in the i-th block that has experts.
  std::vector<float> counts(int64_t i) const {
    const std::vector<float> all = sums.host();
    const auto begin = all.begin() + 1 + i * (2 * config.moe.num_experts + 1);
    return {begin, begin + config.moe.num_experts};
  }
  void fill_gradients(float value) {
    for (const TensorView& g : gradients)
      upload_weight(*device, g, std::vector<float>(static_cast<size_t>(g.numel()), value));
  }
  double scalar(const std::string& name) const {
    for (const StepScalar& s : model.scalars(sums.host(), 1)) {
      if (s.name == name) return s.value;
    }
    FAIL("no such scalar");
    return 0;
  }

  ModelConfig config;
  TestTensor sums;
};

bool all_finite(const std::vector<float>& values) {
  return std::all_of(values.begin(), values.end(), [](float v) { return std::isfinite(v); });
}
bool all_zero(const std::vector<float>& values) {
  return std::all_of(values.begin(), values.end(), [](float v) { return v == 0; });
}

// A router that gives a token the expert by whose number its embedding is marked, with k = 1: whatever the recipe.
struct MarkedModel : MoeModel {
  MarkedModel(const ModelConfig& config_, const PrecisionConfig& precision, const BatchShape& largest, Device& on)
      : MoeModel(config_, precision, largest, on) {
    const int64_t d = config.d_model, E = config.moe.num_experts;
    std::vector<float> embedding = random_bf16(config.vocab_size * d, 3, 0.2f), router(static_cast<size_t>(E * d));
    for (int64_t v = 0; v < config.vocab_size; ++v) embedding[v * d + v % E] = 3;
    for (int64_t e = 0; e < E; ++e) router[e * d + e] = 1;
    set("embedding", embedding);
    set("blocks.0.router", router);
  }
};

}  // namespace

TEST_CASE("a mixture's losses and all gradients are those of its formulas", "[model][moe][slow]") {
  ModelConfig config = reference_config();
  config.d_ffn = 3;
  MoeConfig qwen{.num_experts = 5, .experts_per_token = 2, .normalize_weights = true},
      olmoe{.num_experts = 6, .experts_per_token = 3}, one{.num_experts = 3, .experts_per_token = 1},
      scaled{.num_experts = 4, .experts_per_token = 2, .score = RouterScore::kSigmoid, .weight_scaling = 3},
      all{.num_experts = 3, .experts_per_token = 3, .normalize_weights = true}, grouped = olmoe, v3 = deepseek();
  grouped.num_experts = 8, grouped.groups = 4, grouped.groups_kept = 2;
  v3.shared_width = v3.dense_width = 4;
  bool is_pooled = false;
  for (const MoeConfig& moe : {olmoe, qwen, v3, one, scaled, all, grouped, olmoe}) {
    config.moe = moe;
    CAPTURE(moe.num_experts, moe.experts_per_token, moe.normalize_weights, moe.groups, moe.dense_layers, is_pooled);
    check_against_float64(config, {.balance = 0.3, .is_pooled = is_pooled, .z = 0.05});
    is_pooled = !is_pooled;
  }
  config.moe = qwen;
  config.norm_placement = NormPlacement::kBoth;
  config.activation = GateActivation::kGeluTanh;
  check_against_float64(config, {.z = 0.1});
}

TEST_CASE("a router of zeros takes the first experts, at a balance loss of 1 and a z-loss of log(E)^2",
          "[model][moe]") {
  constexpr BatchShape shape{2, 11};
  const MoeConfig moe{.num_experts = 8, .experts_per_token = 2};
  for (Device* device : devices()) {
    for (const Recipe recipe : kRecipes) {
      MoeModel m(small_config(moe), precision_recipe(recipe), shape, *device);
      for (const char* name : {"blocks.0.router", "blocks.1.router"}) m.set(name, std::vector<float>(8 * 32));
      m.run(random_tokens(shape.num_tokens(), 61, 2), shape);
      CAPTURE(name_of(recipe), device->name());
      for (int64_t block = 0; block < 2; ++block)
        CHECK((m.counts(block) == std::vector<float>{22, 22, 0, 0, 0, 0, 0, 0}));
      CHECK(std::abs(m.scalar("balance_loss") - 1) < 1e-6);
      CHECK(std::abs(m.scalar("router_z_loss") - std::pow(std::log(8), 2)) < 1e-5);
      CHECK(m.scalar("expert_load") == 4);
      CHECK(m.scalar("idle_experts") == 0.75);
      CHECK(std::abs(m.scalar("expert_entropy") - 1.0 / 3) < 1e-6);
    }
  }
}

TEST_CASE("an idle expert has a gradient of zeros, and counts add up over micro-batches once", "[model][moe]") {
  constexpr BatchShape shape{2, 13};  // not a multiple of 16
  const std::vector<int32_t> tokens = random_tokens(shape.num_tokens(), 61, 4);
  MoeConfig moe = deepseek();
  moe.groups = moe.groups_kept = 1;
  for (Device* device : devices()) {
    for (const Recipe recipe : kRecipes) {
      for (const Recompute recompute : {Recompute::kNone, Recompute::kBlock}) {
        PrecisionConfig precision = precision_recipe(recipe);
        precision.recompute = recompute;
        MoeModel m(small_config(moe), precision, shape, *device);
        std::vector<float> bias(8);
        bias[5] = -2;
        m.set("blocks.1.router_bias", bias);
        m.fill_gradients(std::nanf(""));
        m.run(tokens, shape, {.balance = 0.01});
        CAPTURE(name_of(recipe), name_of(recompute), device->name());
        CHECK((all_finite(m.trained_gradients()) && m.counts(0)[5] == 0));
        const std::vector<float> counts = m.counts(0);
        CHECK(std::accumulate(counts.begin(), counts.end(), 0.0f) == 2 * 26);
        for (const char* name : {"blocks.1.experts.up_gate", "blocks.1.experts.down"}) {
          for (int64_t e = 0; e < 8; ++e) CHECK(all_zero(m.of_expert(name, e)) == (counts[e] == 0));
        }
        const std::vector<float> once = m.gradient(m.index_of("blocks.1.experts.down"));
        m.run(tokens, shape, {.balance = 0.01}, Model::Accumulation::kContinue);
        std::vector<float> twice = once, counted = counts;
        for (float& v : twice) v *= 2;
        for (float& v : counted) v *= 2;
        CHECK(m.counts(0) == counted);
        CHECK(same_bits(m.gradient(m.index_of("blocks.1.experts.down")), twice));
        CHECK(all_zero(m.of_expert("blocks.1.experts.up_gate", 5)));
      }
    }
  }
}

TEST_CASE("a correction bias chooses experts and weighs none", "[model][moe]") {
  constexpr BatchShape shape{1, 16};
  const std::vector<int32_t> tokens = random_tokens(16, 61, 6);
  MoeConfig moe = deepseek();
  for (Device* device : devices()) {
    MoeModel m(small_config(moe), precision_recipe(Recipe::kFp32), shape, *device);
    // The same number for all experts changes no choice, and would change every weight.
    std::vector<std::vector<float>> losses;
    for (const float bias : {0.0f, 0.01f, 3.0f}) {
      m.set("blocks.1.router_bias", std::vector<float>(8, bias));
      m.run(tokens, shape);
      losses.push_back(m.model.losses(*device));
    }
    CHECK((same_bits(losses[0], losses[1]) && same_bits(losses[0], losses[2])));
  }
}

TEST_CASE("experts of few tokens, or of all, have gradients as close as others in every recipe", "[model][moe]") {
  // Marked tokens: expert e has as many as its entry says.
  const std::vector<std::vector<int64_t>> loads = {{0, 1, 2, 3, 5, 7, 15, 16, 17, 0, 8, 6}, {0, 0, 0, 80}, {80}};
  constexpr BatchShape shape{1, 80};
  for (Device* device : devices()) {
    for (const std::vector<int64_t>& load : loads) {
      const MoeConfig moe{.num_experts = 12, .experts_per_token = 1};
      std::vector<int32_t> tokens;
      for (size_t e = 0; e < load.size(); ++e) {
        for (int64_t i = 0; i < load[e]; ++i) tokens.push_back(static_cast<int32_t>(e + 12 * (i % 5)));
      }
      REQUIRE(tokens.size() == 80);
      for (size_t i = tokens.size(); i > 1; --i) std::swap(tokens[i - 1], tokens[philox4x32(5, 2, i)[0] % i]);
      const auto run = [&](Recipe recipe) {
        auto m = std::make_unique<MarkedModel>(small_config(moe, 1), precision_recipe(recipe), shape, *device);
        m->run(tokens, shape);
        return m;
      };
      const auto exact = run(Recipe::kFp32);
      for (const Recipe recipe : kRecipes) {
        const auto m = run(recipe);
        CAPTURE(name_of(recipe), load, device->name());
        CHECK(relative_error(m->model.losses(*device), exact->model.losses(*device)) < 0.05);
        for (size_t e = 0; e < 12; ++e) {
          const int64_t count = e < load.size() ? load[e] : 0;
          CHECK(static_cast<int64_t>(m->counts(0)[e]) == count);
          for (const char* name : {"blocks.0.experts.up_gate", "blocks.0.experts.down"}) {
            const std::vector<float> got = m->of_expert(name, static_cast<int64_t>(e)),
                                     want = exact->of_expert(name, static_cast<int64_t>(e));
            CAPTURE(e, name);
            CHECK(all_zero(got) == (count == 0));
            if (count > 0) CHECK(relative_error(got, want) < (precision_recipe(recipe).has_fp8() ? 0.3 : 0.03));
          }
        }
      }
    }
  }
}

TEST_CASE("an expert of zeros or of huge weights changes no bit of what others do", "[model][moe]") {
  constexpr BatchShape shape{1, 48};
  std::vector<int32_t> tokens = random_tokens(48, 61, 8);
  for (int32_t& token : tokens) token -= token % 4 == 2;  // no token of expert 2
  for (Device* device : devices()) {
    for (const Recipe recipe : kRecipes) {
      const MoeConfig moe{.num_experts = 4, .experts_per_token = 1};
      MarkedModel m(small_config(moe, 1), precision_recipe(recipe), shape, *device);
      m.run(tokens, shape);
      const std::vector<float> losses = m.model.losses(*device), gradients = m.trained_gradients();
      CAPTURE(name_of(recipe), device->name());
      CHECK((all_finite(gradients) && m.counts(0)[2] == 0));
      for (const float value : {0.0f, 1e5f}) {
        for (const std::string name : {"blocks.0.experts.up_gate", "blocks.0.experts.down"}) {
          const size_t i = m.index_of(name);
          std::vector<float> weight = initial_weight(m.config, m.model.parameters(), i, 1);
          std::fill_n(weight.begin() + static_cast<int64_t>(weight.size()) / 2, weight.size() / 4, value);
          m.set(name, weight);
        }
        m.run(tokens, shape);
        CHECK(same_bits(m.model.losses(*device), losses));
        CHECK(same_bits(m.trained_gradients(), gradients));
      }
    }
  }
}

TEST_CASE("what an earlier batch has left in buffers of experts matters to none", "[model][moe]") {
  constexpr BatchShape largest{4, 32}, shape{1, 17};
  const std::vector<int32_t> many = random_tokens(largest.num_tokens(), 61, 9), few = random_tokens(17, 61, 10);
  for (Device* device : devices()) {
    for (const Recipe recipe : kRecipes) {
      for (const MoeConfig& moe : {MoeConfig{.num_experts = 8, .experts_per_token = 2}, deepseek()}) {
        const ModelConfig config = small_config(moe);
        MoeModel fresh(config, precision_recipe(recipe), largest, *device),
            used(config, precision_recipe(recipe), largest, *device);
        const size_t i = used.index_of("embedding");
        used.set("embedding", std::vector<float>(61 * 32, std::nanf("")));
        used.run(many, largest);
        used.set("embedding", initial_weight(config, used.model.parameters(), i, 1));
        used.run(few, shape);
        fresh.run(few, shape);
        CAPTURE(name_of(recipe), moe.shared_width, device->name());
        CHECK(same_bits(used.model.losses(*device), fresh.model.losses(*device)));
        CHECK(all_finite(fresh.trained_gradients()));
        CHECK(same_bits(used.trained_gradients(), fresh.trained_gradients()));
      }
    }
  }
}

TEST_CASE("two hundred random routings give the same bits again, with recompute, and in evaluation",
          "[model][moe][slow]") {
  for (uint64_t seed = 0; seed < 200; ++seed) {
    const auto pick = [&, n = uint64_t{0}](int64_t from, int64_t to) mutable {
      return from + static_cast<int64_t>(philox4x32(77, seed, n++)[0] % static_cast<uint64_t>(to - from + 1));
    };
    auto draw = pick;
    MoeConfig moe;
    moe.groups = int64_t{1} << draw(0, 2);
    moe.num_experts = moe.groups * draw(2, draw(0, 1) == 0 ? 4 : 20);
    moe.groups_kept = draw(1, moe.groups);
    const int64_t candidates = moe.num_experts / moe.groups * moe.groups_kept;
    moe.experts_per_token = draw(1, std::min<int64_t>(candidates, 9));
    moe.score = draw(0, 1) == 0 ? RouterScore::kSoftmax : RouterScore::kSigmoid;
    moe.normalize_weights = moe.experts_per_token > 1 && draw(0, 1) == 0;
    moe.correction_bias = draw(0, 1) == 0;
    moe.weight_scaling = draw(0, 1) == 0 ? 1.0 : 2.5;
    moe.shared_width = draw(0, 2) == 0 ? 16 : 0;
    const BatchShape shape{draw(1, 3), draw(2, 40)};
    const Recipe recipe = kRecipes[seed % std::size(kRecipes)];
    const std::vector<int32_t> tokens = random_tokens(shape.num_tokens(), 61, seed);
    const RouterLosses router{.balance = 0.02, .is_pooled = draw(0, 1) == 0, .z = 1e-3};
    const float skew = std::pow(4.0f, static_cast<float>(draw(-2, 3)));
    const ModelConfig config = small_config(moe);
    for (Device* device : devices()) {
      std::vector<float> losses, gradients, counts;
      for (int again = 0; again < 3; ++again) {
        PrecisionConfig precision = precision_recipe(recipe);
        if (again == 2) precision.recompute = Recompute::kBlock;
        MoeModel m(config, precision, shape, *device);
        for (const std::string block : {"blocks.0.", "blocks.1."}) {
          m.set(block + "router", random_normal(moe.num_experts * 32, seed, 0.1f * skew));
          if (moe.correction_bias)
            m.set(block + "router_bias", random_normal(moe.num_experts, seed + 1, 0.2f * skew));
        }
        m.fill_gradients(std::nanf(""));
        m.run(tokens, shape, router);
        CAPTURE(seed, name_of(recipe), moe.num_experts, moe.experts_per_token, moe.groups, shape.num_tokens(),
                again, device->name());
        if (again == 0) {
          losses = m.model.losses(*device), gradients = m.trained_gradients(), counts = m.counts(1);
          CHECK((all_finite(losses) && all_finite(gradients)));
          CHECK(std::accumulate(counts.begin(), counts.end(), 0.0f) ==
                static_cast<float>(shape.num_tokens() * moe.experts_per_token));
          for (int64_t e = 0; e < moe.num_experts; ++e) {
            CHECK((counts[e] > 0 || all_zero(m.of_expert("blocks.1.experts.up_gate", e))));
          }
          const std::vector<int32_t> targets = next_token_targets(tokens, shape.sequence_length);
          m.model.evaluate(*device, {tokens.data(), targets.data(), shape});
          CHECK(same_bits(m.model.losses(*device), losses));
        } else {
          CHECK(same_bits(m.model.losses(*device), losses));
          CHECK(same_bits(m.trained_gradients(), gradients));
          CHECK(m.counts(1) == counts);
        }
      }
    }
  }
}

TEST_CASE("documents packed into one sequence take the experts that each alone takes", "[model][moe]") {
  const std::vector<int64_t> lengths = {19, 1, 12, 32};
  constexpr BatchShape packed{1, 64, true};
  for (Device* device : devices()) {
    for (const Recipe recipe : {Recipe::kFp32, Recipe::kBf16}) {
      MoeModel together(small_config(deepseek()), precision_recipe(recipe), packed, *device),
          alone(small_config(deepseek()), precision_recipe(recipe), packed, *device);
      std::vector<int32_t> tokens, targets, first_keys;
      std::vector<float> losses;
      for (const int64_t length : lengths) {
        const auto begin = static_cast<int32_t>(tokens.size());
        const std::vector<int32_t> own = random_tokens(length, 61, 30 + tokens.size()),
                                   next = next_token_targets(own, length);
        tokens.insert(tokens.end(), own.begin(), own.end());
        targets.insert(targets.end(), next.begin(), next.end());
        first_keys.insert(first_keys.end(), own.size(), begin);
        alone.run(own, {1, length}, {}, accumulation_of(begin));
        const std::vector<float> one = alone.model.losses(*device);
        losses.insert(losses.end(), one.begin(), one.end());
      }
      together.model.accumulate_gradients(*device, {tokens.data(), targets.data(), packed, first_keys.data()},
                                          {.grad_scale = 0.01f, .sums = together.sums}, together.gradients,
                                          Model::Accumulation::kBegin);
      CAPTURE(name_of(recipe), device->name());
      CHECK(together.counts(0) == alone.counts(0));
      const double bound = recipe == Recipe::kFp32 ? 1e-5 : 0.02;
      CHECK(relative_error(together.model.losses(*device), losses) < bound);
      CHECK(relative_error(together.trained_gradients(), alone.trained_gradients()) < bound);
    }
  }
}

TEST_CASE("targets that are masked still have their experts", "[model][moe]") {
  constexpr BatchShape shape{1, 24};
  const std::vector<int32_t> tokens = random_tokens(24, 61, 12);
  std::vector<int32_t> targets = next_token_targets(tokens, 24);
  for (size_t t = 0; t < 24; t += 2) targets[t] = kIgnoreTarget;
  for (Device* device : devices()) {
    MoeModel m(small_config(deepseek()), precision_recipe(Recipe::kParka), shape, *device);
    m.run(tokens, shape);
    const std::vector<float> whole = m.model.losses(*device), counts = m.counts(0);
    m.model.accumulate_gradients(*device, {tokens.data(), targets.data(), shape}, {.grad_scale = 0.01f},
                                 m.gradients, Model::Accumulation::kBegin);
    const std::vector<float> masked = m.model.losses(*device);
    for (size_t t = 0; t < 24; ++t) CHECK(masked[t] == (t % 2 == 0 ? 0 : whole[t]));
    CHECK(std::accumulate(counts.begin(), counts.end(), 0.0f) == 48);
    // With no target at all the routers' losses are left, and nothing of the head.
    const std::vector<int32_t> none(24, kIgnoreTarget);
    m.fill_gradients(std::nanf(""));
    m.model.accumulate_gradients(*device, {tokens.data(), none.data(), shape},
                                 {.grad_scale = 0.01f, .router = {.balance = 0.1, .z = 0.1}}, m.gradients,
                                 Model::Accumulation::kBegin);
    CHECK(all_finite(m.trained_gradients()));
    CHECK(all_zero(m.gradient(m.index_of("blocks.1.experts.down"))));
    CHECK_FALSE(all_zero(m.gradient(m.index_of("blocks.1.router"))));
  }
}
