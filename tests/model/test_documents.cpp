// Documents packed into one sequence against the same documents alone.
#include <cmath>

#include "tests/model/small_model.h"
#include "tests/support/catch.h"
#include "tests/support/tensors.h"

using namespace parka;
using namespace parka::test;

namespace {

ModelConfig small_config() {
  ModelConfig config;
  config.vocab_size = 61;
  config.d_model = 128;
  config.num_layers = 2;
  config.num_heads = 2;
  config.num_kv_heads = 1;
  config.d_ffn = 96;
  config.norm = NormKind::kRmsNorm;
  return config;
}

struct Packed {
  std::vector<int32_t> tokens, targets, first_keys;
};

// One sequence of documents of these lengths, from whose last tokens nothing is predicted.
Packed pack(const std::vector<int64_t>& lengths, uint64_t seed) {
  Packed packed;
  for (const int64_t length : lengths) {
    const auto begin = static_cast<int32_t>(packed.tokens.size());
    const std::vector<int32_t> tokens = random_tokens(length, 61, seed++),
                               targets = next_token_targets(tokens, length);
    packed.tokens.insert(packed.tokens.end(), tokens.begin(), tokens.end());
    packed.targets.insert(packed.targets.end(), targets.begin(), targets.end());
    packed.first_keys.insert(packed.first_keys.end(), tokens.size(), begin);
  }
  return packed;
}

struct Result {
  std::vector<float> losses, gradients;
};

Result run_packed(SmallModel& m, const Packed& packed, float grad_scale, const TensorView& grad_factor = {}) {
  const BatchShape shape{1, static_cast<int64_t>(packed.tokens.size()), true};
  m.model.accumulate_gradients(
      *m.device, {packed.tokens.data(), packed.targets.data(), shape, packed.first_keys.data()},
      {.grad_scale = grad_scale, .grad_factor = grad_factor}, m.gradients, Model::Accumulation::kBegin);
  return {m.model.losses(*m.device), m.all_gradients()};
}

Result run_alone(SmallModel& m, const std::vector<int64_t>& lengths, const Packed& packed, float grad_scale) {
  Result result;
  int64_t begin = 0;
  for (const int64_t length : lengths) {
    m.model.accumulate_gradients(*m.device,
                                 {packed.tokens.data() + begin, packed.targets.data() + begin, {1, length}},
                                 {.grad_scale = grad_scale}, m.gradients, accumulation_of(begin));
    const std::vector<float> losses = m.model.losses(*m.device);
    result.losses.insert(result.losses.end(), losses.begin(), losses.end());
    begin += length;
  }
  result.gradients = m.all_gradients();
  return result;
}

}  // namespace

TEST_CASE("packed documents give the losses and gradients of each alone", "[model][documents]") {
  const ModelConfig config = small_config();
  const Recipe recipe = GENERATE(Recipe::kFp32, Recipe::kBf16, Recipe::kParka);
  PrecisionConfig precision = precision_recipe(recipe);
  precision.recompute = GENERATE(Recompute::kNone, Recompute::kBlock);
  const std::vector<int64_t> lengths = {48, 16, 64, 32};
  const Packed packed = pack(lengths, 3);
  for (Device* device : devices()) {
    CAPTURE(name_of(recipe), device->name());
    SmallModel m(config, precision, {1, 160, true}, 64, *device);
    m.initialize(config, 7);
    const Result alone = run_alone(m, lengths, packed, 0.01f), together = run_packed(m, packed, 0.01f);
    // A recipe rounds differently where its scales belong to a tensor of all documents and to one of each: about as
    // far from each other as each is from fp32.
    SmallModel exact(config, precision_recipe(Recipe::kFp32), {1, 160, true}, 64, *device);
    exact.initialize(config, 7);
    const Result unrounded = run_alone(exact, lengths, packed, 0.01f);
    const double loss_bound = 1e-6 + 1.5 * relative_error(alone.losses, unrounded.losses);
    const double gradient_bound = 1e-5 + 1.5 * relative_error(alone.gradients, unrounded.gradients);
    CAPTURE(loss_bound, gradient_bound);
    CHECK(relative_error(together.losses, alone.losses) <= loss_bound);
    CHECK(relative_error(together.gradients, alone.gradients) <= gradient_bound);
    // Without the documents it is something else.
    Packed joined = packed;
    std::fill(joined.first_keys.begin(), joined.first_keys.end(), 0);
    CHECK(relative_error(run_packed(m, joined, 0.01f).gradients, alone.gradients) > 2 * gradient_bound);
  }
}

TEST_CASE("documents and the scale of the gradient may change where work is replayed", "[model][documents]") {
  const ModelConfig config = small_config();
  const PrecisionConfig precision = precision_recipe(Recipe::kFp32);
  for (Device* device : devices()) {
    SmallModel replayed(config, precision, {1, 160, true}, 64, *device);
    replayed.initialize(config, 7);
    const TestTensor factor(*device, DType::kF32, {1}, {1.0f});
    const std::vector<std::vector<int64_t>> packings = {{160}, {48, 16, 64, 32}, {1, 158, 1}, {80, 80}};
    for (size_t i = 0; i < packings.size(); ++i) {
      const Packed packed = pack(packings[i], 10 * i);
      const float scale = 0.5f / static_cast<float>(i + 1);
      device->copy_to_device(factor.view().data, &scale, sizeof(scale));
      SmallModel fresh(config, precision, {1, 160, true}, 64, *device);
      fresh.initialize(config, 7);
      const Result got = run_packed(replayed, packed, 2.0f, factor), want = run_packed(fresh, packed, 2.0f * scale);
      CHECK(got.losses == want.losses);
      CHECK(got.gradients == want.gradients);
    }
  }
}

TEST_CASE("evaluation keeps documents apart", "[model][documents]") {
  const ModelConfig config = small_config();
  const std::vector<int64_t> lengths = {48, 16, 64, 32};
  const Packed packed = pack(lengths, 3);
  for (Device* device : devices()) {
    SmallModel m(config, precision_recipe(Recipe::kFp32), {1, 160, true}, 64, *device);
    m.initialize(config, 7);
    const Result trained = run_packed(m, packed, 0.01f);
    m.model.evaluate(*device,
                     {packed.tokens.data(), packed.targets.data(), {1, 160, true}, packed.first_keys.data()});
    CHECK(m.model.losses(*device) == trained.losses);
  }
}
