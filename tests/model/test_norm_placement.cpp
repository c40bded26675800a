// Models with norms behind attention and feed-forward, against the definition of the whole model in float64.
#include "tests/model/reference_model.h"

using namespace parka;
using namespace parka::test;

namespace {

constexpr NormPlacement kPlacements[] = {NormPlacement::kBefore, NormPlacement::kAfter, NormPlacement::kBoth};

ModelConfig config_of(NormPlacement placement) {
  ModelConfig config = reference_config();
  config.norm_placement = placement;
  return config;
}

}  // namespace

TEST_CASE("fp32 loss and every gradient are those of float64 wherever norms are", "[model][norm_placement]") {
  for (const NormPlacement placement : kPlacements) {
    for (const QkNormKind qk_norm : {QkNormKind::kNone, QkNormKind::kFull}) {
      ModelConfig config = config_of(placement);
      config.qk_norm = qk_norm;
      CAPTURE(name_of(placement), name_of(qk_norm));
      check_against_float64(config);
    }
  }
}

TEST_CASE("a block has the weights of the norms that its placement names", "[model][norm_placement]") {
  const auto norms_of = [](NormPlacement placement, NormKind norm) {
    ModelConfig config = config_of(placement);
    config.norm = norm;
    const ParameterTable table = make_parameter_table(config, true);
    std::vector<std::string> names;
    for (size_t i = 0; i < table.all.size(); ++i) {
      const ParameterInfo& p = table.all[i];
      if (!p.name.starts_with("blocks.1.") || !p.name.ends_with("norm")) continue;
      names.push_back(p.name.substr(9));
      CHECK((p.rows == 1 && p.cols == 12 && p.role == ParameterRole::kNorm && !p.decayed));
      CHECK(initial_weight(config, table, i, 1) == std::vector<float>(12, 1.0f));
    }
    return names;
  };
  using Names = std::vector<std::string>;
  CHECK(norms_of(NormPlacement::kBefore, NormKind::kRmsNorm) == Names{"attention_norm", "ffn_norm"});
  CHECK(norms_of(NormPlacement::kAfter, NormKind::kRmsNorm) == Names{"attention_post_norm", "ffn_post_norm"});
  CHECK(norms_of(NormPlacement::kBoth, NormKind::kRmsNorm) ==
        Names{"attention_norm", "attention_post_norm", "ffn_norm", "ffn_post_norm"});
  CHECK(norms_of(NormPlacement::kBoth, NormKind::kLayerNorm).empty());
}

// Beside the bytes of attention and SwiGLU, per token of a block, in widths of the model.
TEST_CASE("what is kept with norms behind is what docs/precision.md says", "[model][norm_placement][plan]") {
  constexpr int64_t kTokens = 128, kWidth = 512, kLayers = 2;
  const auto kept = [&](NormPlacement placement, const PrecisionConfig& precision) {
    ModelConfig config;
    config.d_model = kWidth;
    config.num_heads = 4;
    config.num_layers = kLayers;
    config.d_ffn = 1024;
    config.norm = NormKind::kRmsNorm;
    config.norm_placement = placement;
    MemoryPlan plan;
    const Model model(config, precision, false, {2, 64}, 64, Model::Use::kTraining, {}, plan);
    int64_t bytes = 0;
    for (const auto& entry : plan.entries()) {
      if (entry.category == "saved activations") bytes += entry.bytes;
    }
    return bytes;
  };
  // Each difference counts two branches of a block: in numbers of `width` bytes a token and element, and of the
  // statistics, 4 bytes a token, and scales, 4 bytes a tensor.
  const auto bytes = [](double per_element, int64_t statistics, int64_t scales) {
    const auto elements = static_cast<double>(kTokens * kWidth);
    return 2 * kLayers * (static_cast<int64_t>(per_element * elements) + 4 * kTokens * statistics + 4 * scales);
  };
  struct Case {
    Recipe recipe;
    double after, both;  // bytes per element more than `before`
  };
  for (const auto& [recipe, after, both] :
       {Case{Recipe::kFp32, 0, 4}, Case{Recipe::kBf16, 0, 2}, Case{Recipe::kFp8Linear, 0, 2},
        Case{Recipe::kCoat, 0, 1.125}, Case{Recipe::kParka, 1, 1.125}}) {
    const PrecisionConfig precision = precision_recipe(recipe);
    const int64_t before = kept(NormPlacement::kBefore, precision);
    CAPTURE(name_of(recipe), before);
    CHECK(kept(NormPlacement::kAfter, precision) - before == bytes(after, 0, 0));
    CHECK(kept(NormPlacement::kBoth, precision) - before == bytes(both, 1, 0));
  }
}
