// Sliding windows of models: what blocks with one see, beside models that see the same by documents. That it is
// what transformers computes is the business of test_transformers_fixtures.cpp and test_generation.cpp.
#include <algorithm>
#include <string>

#include "engine/training/speed.h"
#include "tests/model/small_model.h"
#include "tests/support/catch.h"
#include "tests/support/tensors.h"

using namespace parka;
using namespace parka::test;

namespace {

constexpr BatchShape kShape{2, 96};
constexpr BatchShape kDocuments{2, 96, true};

ModelConfig config_with(int64_t window, int64_t full_attention_every = 0) {
  ModelConfig config;
  config.vocab_size = 61;
  config.d_model = 128;
  config.num_layers = 4;
  config.num_heads = 2;
  config.num_kv_heads = 1;
  config.d_ffn = 96;
  config.norm = NormKind::kRmsNorm;
  config.sliding_window = window;
  config.full_attention_every = full_attention_every;
  return config;
}

// Documents that begin at every `length`-th position.
std::vector<int32_t> documents_of(int64_t length) {
  std::vector<int32_t> first_keys;
  for (int64_t t = 0; t < kShape.num_tokens(); ++t) {
    const int64_t i = t % kShape.sequence_length;
    first_keys.push_back(static_cast<int32_t>(i / length * length));
  }
  return first_keys;
}

// What a window leaves of them.
std::vector<int32_t> windowed(std::vector<int32_t> first_keys, int64_t window) {
  for (int64_t t = 0; t < kShape.num_tokens(); ++t) {
    const auto first = static_cast<int32_t>(t % kShape.sequence_length - window + 1);
    first_keys[t] = std::max(first_keys[t], first);
  }
  return first_keys;
}

struct Result {
  std::vector<float> losses, evaluated, gradients;
  bool operator==(const Result&) const = default;
};

// `first_keys` may be empty.
Result run(Device& device, const ModelConfig& config, const PrecisionConfig& precision,
           const std::vector<int32_t>& first_keys) {
  const BatchShape& shape = first_keys.empty() ? kShape : kDocuments;
  SmallModel m(config, precision, shape, 64, device);
  m.initialize(config, 7);
  const std::vector<int32_t> tokens = random_tokens(shape.num_tokens(), 61, 3),
                             targets = next_token_targets(tokens, shape.sequence_length);
  const Model::Batch batch = {tokens.data(), targets.data(), shape,
                              first_keys.empty() ? nullptr : first_keys.data()};
  Result result;
  m.model.accumulate_gradients(device, batch, {.grad_scale = 0.01f}, m.gradients, Model::Accumulation::kBegin);
  result.losses = m.model.losses(device);
  result.gradients = m.all_gradients();
  m.model.evaluate(device, batch);
  result.evaluated = m.model.losses(device);
  return result;
}

}  // namespace

TEST_CASE("a window in every block is what documents that end where it does are", "[model][windows]") {
  const Recipe recipe = GENERATE(Recipe::kFp32, Recipe::kBf16, Recipe::kParka);
  PrecisionConfig precision = precision_recipe(recipe);
  precision.recompute = GENERATE(Recompute::kNone, Recompute::kBlock);
  const int64_t window = GENERATE(int64_t{1}, int64_t{20}, int64_t{95});
  const std::vector<int32_t> joined = documents_of(kShape.sequence_length), packed = documents_of(31);
  for (Device* device : devices()) {
    CAPTURE(name_of(recipe), window, device->name());
    const ModelConfig with = config_with(window), without = config_with(0);
    CHECK(run(*device, with, precision, {}) == run(*device, without, precision, windowed(joined, window)));
    CHECK(run(*device, with, precision, packed) == run(*device, without, precision, windowed(packed, window)));
  }
}

TEST_CASE("a window that no sequence is longer than changes no bit", "[model][windows]") {
  const PrecisionConfig precision = precision_recipe(GENERATE(Recipe::kFp32, Recipe::kBf16));
  const int64_t window = GENERATE(int64_t{96}, int64_t{1000});
  for (Device* device : devices()) {
    const std::vector<int32_t> documents = documents_of(31);
    CHECK(run(*device, config_with(window), precision, {}) == run(*device, config_with(0), precision, {}));
    CHECK(run(*device, config_with(window, 2), precision, documents) ==
          run(*device, config_with(0), precision, documents));
  }
}

// How far back a token reaches: through three blocks with a window of 3 by 6 tokens; through one of full attention
// to the beginning.
TEST_CASE("every n-th block has full attention", "[model][windows]") {
  constexpr int64_t kWindow = 3, kLast = 30;
  const auto reaches = [&](int64_t every) {
    ModelConfig config = config_with(kWindow, every);
    config.num_layers = 3;
    SmallModel m(config, precision_recipe(Recipe::kFp32), {1, kLast + 1});
    m.initialize(config, 7);
    const auto last_logits = [&](int64_t changed) {
      std::vector<int32_t> tokens = random_tokens(kLast + 1, 61, 3);
      if (changed >= 0) tokens[changed] = (tokens[changed] + 1) % 61;
      const std::vector<int32_t> targets(tokens.size(), kIgnoreTarget);
      return m.model.logits(*m.device, {tokens.data(), targets.data(), {1, kLast + 1}}, kLast, 1);
    };
    const std::vector<float> unchanged = last_logits(-1);
    int64_t first = kLast;
    while (first > 0 && last_logits(first - 1) != unchanged) --first;
    return first;
  };
  CHECK(reaches(0) == kLast - 3 * (kWindow - 1));
  CHECK(reaches(2) == 0);
  CHECK(reaches(3) == 0);

  const auto windowed_blocks = [](int64_t every, int64_t num_layers) {
    const ModelConfig config = config_with(kWindow, every);
    std::string blocks;
    for (int64_t l = 0; l < num_layers; ++l) blocks += config.is_windowed(l) ? 'w' : 'f';
    return blocks;
  };
  CHECK(windowed_blocks(0, 3) == "www");
  CHECK(windowed_blocks(4, 8) == "wwwfwwwf");
  CHECK(windowed_blocks(6, 8) == "wwwwwfww");
}

TEST_CASE("training batches of changing lengths each have their own window", "[model][windows]") {
  const ModelConfig config = config_with(20, 2);
  for (Device* device : devices()) {
    SmallModel m(config, precision_recipe(Recipe::kFp32), kShape, 64, *device);
    m.initialize(config, 7);
    for (const BatchShape shape : {BatchShape{2, 96}, BatchShape{3, 50}, BatchShape{1, 20}, BatchShape{2, 96}}) {
      const std::vector<int32_t> tokens = random_tokens(shape.num_tokens(), 61, 3),
                                 targets = next_token_targets(tokens, shape.sequence_length);
      const auto losses = [&](SmallModel& model) {
        model.model.accumulate_gradients(*device, {tokens.data(), targets.data(), shape}, {.grad_scale = 0.01f},
                                         model.gradients, Model::Accumulation::kBegin);
        return model.model.losses(*device);
      };
      SmallModel fresh(config, precision_recipe(Recipe::kFp32), shape, 64, *device);
      fresh.initialize(config, 7);
      CHECK(losses(m) == losses(fresh));
      CHECK(m.all_gradients() == fresh.all_gradients());
    }
  }
}

TEST_CASE("tables and first keys of windows are declared only where they differ", "[model][windows][plan]") {
  const auto declared = [](const ModelConfig& config, bool documents) {
    MemoryPlan plan;
    const Model model(config, precision_recipe(Recipe::kBf16), false, documents ? kDocuments : kShape, 64,
                      Model::Use::kTraining, {}, plan);
    std::string names;
    for (const auto& entry : plan.entries()) {
      if (entry.name == "first_keys" || entry.name.starts_with("windowed") || entry.name == "cos_sin") {
        names += (names.empty() ? "" : " ") + entry.name;
      }
    }
    return names;
  };
  CHECK(declared(config_with(0), false) == "cos_sin");
  CHECK(declared(config_with(0), true) == "cos_sin first_keys");
  CHECK(declared(config_with(96, 2), false) == "cos_sin");
  CHECK(declared(config_with(95, 2), false) == "cos_sin windowed_first_keys");
  CHECK(declared(config_with(95, 2), true) == "cos_sin first_keys windowed_first_keys");
  ModelConfig config = config_with(96, 2);
  config.local_rope_theta = config.rope_theta;
  CHECK(declared(config, false) == "cos_sin");
  config.local_rope_theta = 100;
  CHECK(declared(config, false) == "cos_sin windowed_cos_sin");
  config.local_rope_theta = 0;
  config.rope_scaling.kind = RopeScalingKind::kYarn;
  CHECK(declared(config, false) == "cos_sin windowed_cos_sin");
}

TEST_CASE("model FLOP do not count keys behind a window", "[model][windows]") {
  const auto attention = [](const ModelConfig& config, int64_t sequence_length) {
    const ParameterTable table = make_parameter_table(config, false);
    return flop_per_token(config, table, sequence_length) -
           6.0 * static_cast<double>(table.num_compute_parameters());
  };
  // Of 4 layers; a query sees half the sequence on average, or the window but for its beginning.
  CHECK(attention(config_with(0), 96) == 6.0 * 4 * 96 * 128);
  CHECK(attention(config_with(96), 96) == 6.0 * 4 * 96 * 128);
  CHECK(attention(config_with(24), 96) == 6.0 * 4 * (2 * 24 - 24 * 24 / 96.0) * 128);
  CHECK(attention(config_with(24, 2), 96) == 6.0 * (2 * 96 + 2 * (2 * 24 - 24 * 24 / 96.0)) * 128);
}
