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

// Compares the gradients with the fixture's of this kind.
void check_gradients(const SmallModel& m, const Fixture& fixture, const std::string& kind) {
  const auto& parameters = m.model.parameters().all;
  const float most = fixture.config.moe.exists() ? 1e-5f : 1e-4f;
  int64_t num_compared = 0, num_gradients = 0;
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (!m.model.parameters().is_trainable(static_cast<int>(i))) continue;
    CAPTURE(kind, parameters[i].name);
    const std::vector<float>& expected = fixture.tensors.at(kind + parameters[i].name);
    const std::vector<float> got = m.gradient(i);
    CHECK(relative_error(got, expected) < most);
    // Element by element, too, relative to the tensor's largest.
    float largest = 0, worst = 0;
    for (float g : expected) largest = std::max(largest, std::abs(g));
    for (size_t k = 0; k < expected.size(); ++k) worst = std::max(worst, std::abs(got[k] - expected[k]));
    CHECK(worst < most * largest);
    ++num_compared;
  }
  // No fixture gradient is left over: every one that transformers has was compared.
  for (const auto& [key, unused] : fixture.tensors) num_gradients += key.starts_with(kind);
  CHECK(num_gradients == num_compared);
}

}  // namespace

TEST_CASE("fp32 loss, logits and every gradient equal transformers'", "[model]") {
  const std::string name = GENERATE(from_range(all_fixtures()));
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

    check_gradients(m, fixture, "grad/");
  }
}

// The loss of load balance is transformers' with output_router_logits: it pools all blocks.
TEST_CASE("fp32 gradients of loss and balance loss equal transformers'", "[model]") {
  const std::string name = GENERATE(from_range(std::begin(kMoeFixtures), std::end(kMoeFixtures)));
  const Fixture fixture = load_fixture(name);
  if (fixture.balance_weight == 0) return;  // transformers has none for it
  const int64_t experts = fixture.config.moe.num_experts, blocks = fixture.config.num_layers;
  for (Device* device : devices()) {
    CAPTURE(name, device->name());
    SmallModel m(fixture.config, precision_recipe(Recipe::kFp32), fixture.shape, 1 << 20, *device);
    load_weights(m, fixture);
    const std::vector<int32_t> targets = next_token_targets(fixture.tokens, fixture.shape.sequence_length);
    const std::vector<float> zeros(static_cast<size_t>(m.model.num_sums()));
    const TestTensor sums(*device, DType::kF32, {m.model.num_sums()}, zeros);
    m.model.accumulate_gradients(*m.device, {fixture.tokens.data(), targets.data(), fixture.shape},
                                 {.grad_scale = grad_scale(fixture.shape),
                                  .sums = sums,
                                  .router = {.balance = fixture.balance_weight, .is_pooled = true}},
                                 m.gradients, Model::Accumulation::kBegin);
    check_gradients(m, fixture, "balanced/");
    // Counts and scores of all blocks, behind the loss.
    const std::vector<float> all = sums.host(), load(all.begin() + 1, all.end());
    double balance = 0;
    for (int64_t e = 0; e < experts; ++e) {
      double count = 0, score = 0;
      for (int64_t b = 0; b < blocks; ++b) {
        count += load[static_cast<size_t>(b * (2 * experts + 1) + e)];
        score += load[static_cast<size_t>(b * (2 * experts + 1) + experts + e)];
      }
      balance += count * score;
    }
    const auto rows = static_cast<double>(blocks * fixture.shape.num_tokens());
    const double want = fixture.tensors.at("balance")[0];
    CHECK(std::abs(balance * static_cast<double>(experts) / (rows * rows) - want) < 1e-5 * want);
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
