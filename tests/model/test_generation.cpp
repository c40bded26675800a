// Generation with a cache: against transformers' greedy continuations (tests/fixtures/make_generation_fixtures.py),
// and against forward passes over whole sequences in every recipe.
#include <algorithm>
#include <cmath>
#include <fstream>

#include <nlohmann/json.hpp>

#include "engine/evaluation/generator.h"
#include "tests/model/fixture_model.h"
#include "tests/model/small_model.h"
#include "tests/support/catch.h"

using namespace parka;
using namespace parka::test;

namespace {

using Tokens = std::vector<int32_t>;

// A model with a cache, for up to as many tokens at a time as a slot has room for.
struct CachedModel {
  CachedModel(const ModelConfig& config_, const PrecisionConfig& precision, const CacheShape& shape_,
              Device& on = *devices().front())
      : config(config_),
        shape(shape_),
        device(on),
        model(config, precision, false, {1, std::max(shape.max_length, shape.num_slots)}, 3, Model::Use::kInference,
              {}, plan) {
    model.declare_cache(shape, plan);
    plan.finish();
    arena = std::make_unique<Arena>(device, plan);
    model.bind(device, *arena);
  }

  void load(const Fixture& fixture) {
    for (size_t i = 0; i < model.parameters().all.size(); ++i) {
      upload_weight(device, model.weights().own()[i],
                    fixture.tensors.at("weight/" + model.parameters().all[i].name));
    }
    model.weights_changed(device);
  }
  // Weights larger than training starts with, so that attention prefers some tokens and logits differ.
  void initialize(uint64_t seed) {
    for (size_t i = 0; i < model.parameters().all.size(); ++i) {
      std::vector<float> weight = initial_weight(config, model.parameters(), i, seed);
      for (float& w : weight) w *= 1.5f;
      upload_weight(device, model.weights().own()[i], weight);
    }
    model.weights_changed(device);
  }

  // The logits behind `tokens`, from a forward over all of them that knows no cache.
  std::vector<float> uncached(const Tokens& tokens) {
    const auto length = static_cast<int64_t>(tokens.size());
    const Tokens targets(tokens.size(), kIgnoreTarget);
    return model.logits(device, {tokens.data(), targets.data(), {1, length}}, length - 1, 1);
  }

  std::vector<Continuation> generate(const std::vector<Tokens>& prompts, const GenerationOptions& options) {
    return parka::generate(device, model, shape, prompts, options);
  }

  ModelConfig config;
  CacheShape shape;
  Device& device;
  MemoryPlan plan;
  Model model;
  std::unique_ptr<Arena> arena;
};

void append(std::vector<float>& all, const std::vector<float>& more) {
  all.insert(all.end(), more.begin(), more.end());
}

GenerationOptions greedy(int64_t num_tokens) { return {{.temperature = 0}, num_tokens, {}}; }

ModelConfig small_config() {
  ModelConfig config;
  config.vocab_size = 97;
  config.d_model = 64;
  config.num_layers = 3;
  config.num_heads = 4;
  config.num_kv_heads = 2;
  config.d_ffn = 176;
  return config;
}

ModelConfig config_with(QkNormKind qk_norm, NormPlacement placement) {
  ModelConfig config = small_config();
  config.qk_norm = qk_norm;
  config.norm_placement = placement;
  config.qkv_bias = placement == NormPlacement::kBoth;
  return config;
}

// In every second block, with angles of its own.
ModelConfig windowed_config() {
  ModelConfig config = small_config();
  config.sliding_window = 7;
  config.full_attention_every = 2;
  config.local_rope_theta = 100;
  config.rope_scaling.kind = RopeScalingKind::kYarn;
  return config;
}

// Of which a token alone has three.
ModelConfig moe_config() {
  ModelConfig config = small_config();
  config.moe = {.num_experts = 8,
                .experts_per_token = 3,
                .score = RouterScore::kSigmoid,
                .normalize_weights = true,
                .correction_bias = true,
                .shared_width = 48,
                .dense_layers = 1,
                .dense_width = 176};
  return config;
}

std::vector<Tokens> random_prompts(const std::vector<int64_t>& lengths) {
  std::vector<Tokens> prompts;
  for (int64_t length : lengths) prompts.push_back(random_tokens(length, 97, 100 + prompts.size()));
  return prompts;
}

}  // namespace

TEST_CASE("greedy generation equals transformers' token for token", "[model][generation]") {
  const std::string name = GENERATE(from_range(all_fixtures()));
  const Fixture fixture = load_fixture(name);
  std::ifstream file(std::string(PARKA_SOURCE_DIR) + "/tests/fixtures/generation.json");
  const nlohmann::json cases = nlohmann::json::parse(file).at(name);
  REQUIRE(cases.size() == 6);
  for (Device* device : devices()) {
    CAPTURE(name, device->name());
    // Prompts of 1 to 60 tokens; those of one batch end at different times, and others take their slots.
    CachedModel m(fixture.config, precision_recipe(Recipe::kFp32), {3, 64}, *device);
    m.load(fixture);
    std::vector<Tokens> prompts;
    for (const auto& one : cases) prompts.push_back(one.at("prompt"));
    for (size_t i = 0; i < prompts.size(); ++i) {
      const Tokens want = cases[i].at("tokens");
      CAPTURE(prompts[i].size());
      CHECK(m.generate({prompts[i]}, greedy(static_cast<int64_t>(want.size())))[0].tokens == want);
    }
    const std::vector<Continuation> together = m.generate(prompts, greedy(63));
    for (size_t i = 0; i < prompts.size(); ++i) {
      const Tokens want = cases[i].at("tokens");
      CHECK(std::equal(want.begin(), want.end(), together[i].tokens.begin()));
    }
  }
}

TEST_CASE("logits with a cache are those of whole sequences in every recipe", "[model][generation][slow]") {
  const Recipe recipe = GENERATE(Recipe::kFp32, Recipe::kBf16, Recipe::kFp8Linear, Recipe::kFp8Block,
                                 Recipe::kCoatActivation, Recipe::kCoat, Recipe::kParka);
  const bool plain_evaluation = GENERATE(false, true);
  const ModelConfig config = GENERATE(
      config_with(QkNormKind::kNone, NormPlacement::kBefore), config_with(QkNormKind::kFull, NormPlacement::kAfter),
      config_with(QkNormKind::kPerHead, NormPlacement::kBoth), windowed_config(), moe_config());
  if (config.moe.exists() && recipe == Recipe::kFp8Block) return;
  PrecisionConfig precision = precision_recipe(recipe);
  if (plain_evaluation) precision.eval = EvalNumerics::kBf16;
  for (Device* device : devices()) {
    CAPTURE(name_of(recipe), plain_evaluation, name_of(config.qk_norm), config.sliding_window, device->name());
    CachedModel m(config, precision, {4, 40}, *device);
    CachedModel fp32(config, precision_recipe(Recipe::kFp32), {4, 40}, *device);
    m.initialize(1);
    fp32.initialize(1);
    // Three sequences of different lengths grow together, in slots of which one is not used.
    std::vector<Tokens> sequences = random_prompts({5, 1, 17});
    const int32_t slots[] = {2, 0, 3};
    for (size_t i = 0; i < 3; ++i) {
      const std::vector<float> first = m.model.prefill(m.device, slots[i], sequences[i]);
      CHECK(first == m.uncached(sequences[i]));  // the same computation
    }
    std::vector<float> got, want, exact;
    for (int step = 0; step < 20; ++step) {
      std::vector<Model::CachedToken> next;
      for (size_t i = 0; i < 3; ++i) {
        const auto position = static_cast<int32_t>(sequences[i].size());
        sequences[i].push_back(static_cast<int32_t>((31 * position + 7 * static_cast<int32_t>(i)) % 97));
        next.push_back({slots[i], position, sequences[i].back()});
      }
      append(got, m.model.decode(m.device, next));
      for (const Tokens& sequence : sequences) {
        append(want, m.uncached(sequence));
        append(exact, fp32.uncached(sequence));
      }
    }
    const double difference = relative_error(got, want);
    CAPTURE(difference, relative_error(want, exact));
    const bool tensor_scales = precision.gemm == GemmPrecision::kFp8Tensor && !plain_evaluation;
    if (tensor_scales) {
      // The scale of a tensor is that of the tokens at hand: rounding falls elsewhere, but it is not coarser.
      CHECK(relative_error(got, exact) < 1.1 * relative_error(want, exact));
    } else if (precision.has_fp8() && !plain_evaluation) {
      CHECK(difference < 0.05);  // a bf16 rounding may fall otherwise, and after it one to FP8
    } else {
      CHECK(difference < (recipe == Recipe::kFp32 ? 1e-5 : 0.02));
    }
  }
}

TEST_CASE("what a sequence gets does not depend on the batch it is in", "[model][generation]") {
  // Recipes whose scales are those of a row; with a scale per tensor the other rows have a say.
  const Recipe recipe = GENERATE(Recipe::kFp32, Recipe::kFp8Block);
  const std::vector<Tokens> prompts = random_prompts({3, 11, 1, 30, 7});
  GenerationOptions options{{.temperature = 1.0, .seed = 5}, 25, {}};
  CachedModel one(small_config(), precision_recipe(recipe), {1, 64}),
      three(small_config(), precision_recipe(recipe), {3, 64});
  one.initialize(2);
  three.initialize(2);
  const std::vector<Continuation> alone = one.generate(prompts, options),
                                  together = three.generate(prompts, options);
  for (size_t i = 0; i < prompts.size(); ++i) {
    CHECK(alone[i].tokens == together[i].tokens);
    CHECK(alone[i].tokens.size() == 25);
  }
  CHECK(alone[0].tokens != alone[1].tokens);
}

TEST_CASE("a sequence longer than the cache goes on with its latest tokens", "[model][generation]") {
  CachedModel m(GENERATE(small_config(), windowed_config()), precision_recipe(Recipe::kFp32), {2, 16});
  m.initialize(3);
  const std::vector<Tokens> prompts = random_prompts({3, 40});  // one is too long from the beginning
  const std::vector<Continuation> got = m.generate(prompts, greedy(30));
  for (size_t i = 0; i < prompts.size(); ++i) {
    Tokens tokens = prompts[i];
    for (int step = 0; step < 30; ++step) {
      const Tokens window(tokens.end() - std::min<int64_t>(16, static_cast<int64_t>(tokens.size())), tokens.end());
      const std::vector<float> logits = m.uncached(window);
      tokens.push_back(static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin()));
    }
    CHECK(got[i].tokens == Tokens(tokens.end() - 30, tokens.end()));
  }
}

TEST_CASE("generation stops before a stop token and frees its slot", "[model][generation]") {
  CachedModel m(small_config(), precision_recipe(Recipe::kFp32), {2, 64});
  m.initialize(4);
  const std::vector<Tokens> prompts = random_prompts({3, 9, 4, 2});
  GenerationOptions options{{.temperature = 1.0, .seed = 1}, 30, {}};
  const std::vector<Continuation> whole = m.generate(prompts, options);
  options.stop_tokens = {whole[0].tokens[4], whole[2].tokens[0]};
  std::vector<std::vector<int32_t>> heard(prompts.size());
  const std::vector<Continuation> stopped =
      generate(m.device, m.model, m.shape, prompts, options,
               [&](size_t prompt, int32_t token) { heard[prompt].push_back(token); });
  for (size_t i = 0; i < prompts.size(); ++i) {
    const Tokens& all = whole[i].tokens;
    const auto end =
        std::find_first_of(all.begin(), all.end(), options.stop_tokens.begin(), options.stop_tokens.end());
    CHECK(stopped[i].tokens == Tokens(all.begin(), end));
    CHECK(stopped[i].stopped == (end != all.end()));
    CHECK(heard[i] == stopped[i].tokens);
  }
  CHECK((stopped[0].stopped && stopped[2].tokens.empty()));
  CHECK(m.generate(prompts, greedy(0))[1].tokens.empty());
}

TEST_CASE("the cache is in the memory plan", "[model][generation]") {
  const CachedModel m(small_config(), precision_recipe(Recipe::kCoat), {4, 40});
  int64_t bytes = 0;
  for (const MemoryPlan::Entry& entry : m.plan.entries()) {
    if (entry.category == "kv cache" && entry.name.starts_with("blocks.")) bytes += entry.bytes;
  }
  CHECK(bytes == 3 * 4 * 40 * (2 * 2 * 16) * 2);  // blocks, slots, tokens, keys and values of two heads, bf16
}
