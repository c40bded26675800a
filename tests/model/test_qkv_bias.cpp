// Models with a bias of queries, keys and values, against the definition of the whole model in float64.
#include "tests/model/reference_model.h"

using namespace parka;
using namespace parka::test;

namespace {

ModelConfig biased_config() {
  ModelConfig config = reference_config();
  config.qkv_bias = true;
  return config;
}

}  // namespace

TEST_CASE("fp32 loss and every gradient with a bias of queries, keys and values are those of float64",
          "[model][qkv_bias]") {
  for (const QkNormKind qk_norm : {QkNormKind::kNone, QkNormKind::kPerHead}) {
    ModelConfig config = biased_config();
    config.qk_norm = qk_norm;
    CAPTURE(name_of(qk_norm));
    check_against_float64(config);
  }
}

TEST_CASE("the bias of queries, keys and values starts at 0 and is not decayed", "[model][qkv_bias]") {
  const ModelConfig config = biased_config();
  const ParameterTable table = make_parameter_table(config, true);
  const int index = table.index_of("blocks.1.qkv_bias");
  REQUIRE(index >= 0);
  const ParameterInfo& p = table.all[static_cast<size_t>(index)];
  CHECK((p.rows == config.d_qkv() && p.cols == 1 && p.role == ParameterRole::kBias && !p.decayed));
  CHECK(initial_weight(config, table, static_cast<size_t>(index), 1) == std::vector<float>(32, 0.0f));
  ModelConfig without = config;
  without.qkv_bias = false;
  CHECK(make_parameter_table(without, true).index_of("blocks.1.qkv_bias") == -1);
}

TEST_CASE("gradients of the bias are close to fp32's in every recipe", "[model][qkv_bias]") {
  ModelConfig config = biased_config();
  config.vocab_size = 97;
  config.d_model = 64;
  config.given_head_dim = 16;
  config.d_ffn = 176;
  constexpr BatchShape kShape{3, 24};
  const auto bias_gradients = [&](Recipe recipe) {
    SmallModel m(config, precision_recipe(recipe), kShape);
    m.initialize(config, 1);
    const auto& parameters = m.model.parameters().all;
    std::vector<float> all;
    for (size_t i = 0; i < parameters.size(); ++i) {
      if (parameters[i].role == ParameterRole::kBias)
        m.set_weight(i, random_normal(parameters[i].numel(), i, 0.3f));
    }
    const std::vector<int32_t> tokens = random_tokens(kShape.num_tokens(), config.vocab_size, 5);
    const std::vector<int32_t> targets = next_token_targets(tokens, kShape.sequence_length);
    // In two micro-batches, of which the second adds.
    for (const auto accumulation : {Model::Accumulation::kBegin, Model::Accumulation::kContinue}) {
      m.model.accumulate_gradients(*m.device, {tokens.data(), targets.data(), kShape}, {.grad_scale = 0.01f},
                                   m.gradients, accumulation);
    }
    for (size_t i = 0; i < parameters.size(); ++i) {
      if (parameters[i].role != ParameterRole::kBias) continue;
      const std::vector<float> one = m.gradient(i);
      all.insert(all.end(), one.begin(), one.end());
    }
    return all;
  };
  const std::vector<float> exact = bias_gradients(Recipe::kFp32);
  for (const auto& [recipe, name] : EnumNames<Recipe>::kAll) {
    CAPTURE(name);
    const double error = relative_error(bias_gradients(recipe), exact);
    CHECK(error < (precision_recipe(recipe).has_fp8() ? 0.3 : 0.02));
  }
}
