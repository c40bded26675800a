// Models with a norm of queries and keys, against the definition of the whole model in float64: its loss, and
// central differences of it for every weight.
#include "tests/model/reference_model.h"

using namespace parka;
using namespace parka::test;

namespace {

ModelConfig config_of(QkNormKind kind) {
  ModelConfig config = reference_config();
  config.given_head_dim = 6;
  config.qk_norm = kind;
  return config;
}

}  // namespace

TEST_CASE("fp32 loss and every gradient with a norm of queries and keys are those of float64", "[model][qk_norm]") {
  const QkNormKind kind = GENERATE(QkNormKind::kPerHead, QkNormKind::kFull);
  CAPTURE(name_of(kind));
  check_against_float64(config_of(kind));
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
