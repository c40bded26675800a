// Loss, logits and every gradient against models that transformers computed in FP32
// (tests/fixtures/make_model_fixtures.py made the files).
#include <cmath>

#include "tests/model/fixture_model.h"
#include "tests/model/small_model.h"
#include "tests/support/catch.h"
#include "tests/support/tensors.h"

using namespace parka;
using namespace parka::test;

namespace {

void load_weights(SmallModel& m, const Fixture& fixture) {
  const auto& parameters = m.model.parameters().all;
  for (size_t i = 0; i < parameters.size(); ++i)
    m.set_weight(i, fixture.tensors.at("weight/" + parameters[i].name));
  m.model.weights_changed(*m.device);
}

float grad_scale(const BatchShape& shape) {
  return static_cast<float>(1.0 / static_cast<double>(shape.num_sequences * (shape.sequence_length - 1)));
}

}  // namespace

TEST_CASE("fp32 loss, logits and every gradient equal transformers'", "[model]") {
  const std::string name = GENERATE(from_range(std::begin(kFixtures), std::end(kFixtures)));
  const Fixture fixture = load_fixture(name);
  for (Device* device : devices()) {
    CAPTURE(name, device->name());
    SmallModel m(fixture.config, precision_recipe(Recipe::kFp32), fixture.shape, 1 << 20, *device);
    load_weights(m, fixture);
    const std::vector<int32_t> targets = next_token_targets(fixture.tokens, fixture.shape.sequence_length);
    const Model::Batch batch = {fixture.tokens.data(), targets.data(), fixture.shape};

    const std::vector<float> logits = m.model.logits(*m.device, batch, 0, fixture.shape.num_tokens());
    CHECK(relative_error(logits, fixture.tensors.at("logits")) < 1e-5);

    m.model.accumulate_gradients(*m.device, batch, {.grad_scale = grad_scale(fixture.shape)}, m.gradients,
                                 Model::Accumulation::kBegin);
    const double want = fixture.tensors.at("loss")[0];
    CHECK(std::abs(mean_loss(m.model.losses(*m.device), targets) - want) < 1e-5 * want);

    const auto& parameters = m.model.parameters().all;
    for (size_t i = 0; i < parameters.size(); ++i) {
      CAPTURE(parameters[i].name);
      const std::vector<float>& expected = fixture.tensors.at("grad/" + parameters[i].name);
      const std::vector<float> got = m.gradient(i);
      CHECK(relative_error(got, expected) < 1e-4);
      // Element by element, too, relative to the tensor's largest.
      float largest = 0, worst = 0;
      for (float g : expected) largest = std::max(largest, std::abs(g));
      for (size_t k = 0; k < expected.size(); ++k) worst = std::max(worst, std::abs(got[k] - expected[k]));
      CHECK(worst < 1e-4f * largest);
    }
    // No fixture gradient is left over: every one that transformers has was compared.
    int64_t num_gradients = 0;
    for (const auto& [key, unused] : fixture.tensors) num_gradients += key.starts_with("grad/");
    CHECK(num_gradients == static_cast<int64_t>(parameters.size()));
  }
}

TEST_CASE("bf16 gradients stay within bf16 noise of transformers' fp32", "[model]") {
  const std::string name = GENERATE(from_range(std::begin(kFixtures), std::end(kFixtures)));
  const Fixture fixture = load_fixture(name);
  for (Device* device : devices()) {
    CAPTURE(name, device->name());
    SmallModel m(fixture.config, precision_recipe(Recipe::kBf16), fixture.shape, 1 << 20, *device);
    load_weights(m, fixture);
    const std::vector<int32_t> targets = next_token_targets(fixture.tokens, fixture.shape.sequence_length);
    m.model.accumulate_gradients(*m.device, {fixture.tokens.data(), targets.data(), fixture.shape},
                                 {.grad_scale = grad_scale(fixture.shape)}, m.gradients,
                                 Model::Accumulation::kBegin);
    const double want = fixture.tensors.at("loss")[0];
    CHECK(std::abs(mean_loss(m.model.losses(*m.device), targets) - want) < 0.01 * want);
    for (size_t i = 0; i < m.gradients.size(); ++i) {
      const std::string& parameter = m.model.parameters().all[i].name;
      CAPTURE(parameter);
      const std::vector<float>& expected = fixture.tensors.at("grad/" + parameter);
      // Roundings of up to 2^-8 each, some ten of them in a block between tokens and gradient, which add up as
      // their squares; the fixtures' large random weights make attention sharp, which multiplies errors of its
      // logits.
      CHECK(relative_error(m.gradient(i), expected) <
            0.06 * std::sqrt(static_cast<double>(fixture.config.num_layers) / 2));
    }
  }
}
