#pragma once
#include <cstdint>

#include "core/config_fields.h"
#include "kernels/ops/moe/routing.h"

namespace parka {

template <>
struct EnumNames<RouterScore> {
  static constexpr EnumName<RouterScore> kAll[] = {{RouterScore::kSoftmax, "softmax"},
                                                   {RouterScore::kSigmoid, "sigmoid"}};
};

// A mixture of experts in place of the feed-forward of blocks: section model.moe of a config. An expert is a gated
// feed-forward of width model.d_ffn.
struct MoeConfig {
  int64_t num_experts = 0;  // 0: every block has one feed-forward
  int64_t experts_per_token = 0;
  RouterScore score = RouterScore::kSoftmax;
  bool normalize_weights = false;
  double weight_scaling = 1.0;
  int64_t groups = 1;
  int64_t groups_kept = 1;
  bool correction_bias = false;
  int64_t shared_width = 0;  // 0: no shared expert
  int64_t dense_layers = 0;
  int64_t dense_width = 0;  // of their feed-forward

  bool exists() const { return num_experts > 0; }
  RouterRule rule() const {
    return {score, normalize_weights, static_cast<float>(weight_scaling), groups, groups_kept};
  }
  bool operator==(const MoeConfig&) const = default;

  template <typename Visitor>
  void fields(Visitor& visit) {
    visit("num_experts", num_experts,
          "Experts of each block, gated feed-forwards of width model.d_ffn; 0: every block has one feed-forward",
          IntegerRange{0, kMostExperts}, kModelField);
    visit("experts_per_token", experts_per_token, "Experts that the router chooses for each token",
          IntegerRange{0, kMostChosen}, kModelField);
    visit("score", score,
          "Of an expert, from the router's logits: softmax over all experts (OLMoE, Qwen3, Mixtral), or sigmoid "
          "(DeepSeek-V3)",
          kModelField);
    visit("normalize_weights", normalize_weights,
          "Divide the scores of a token's experts by their sum (Qwen3, Mixtral, DeepSeek-V3); OLMoE does not",
          kModelField);
    visit("weight_scaling", weight_scaling, "Multiplies the weights of experts (DeepSeek-V3: 2.5)",
          RealRange{1e-6, 1e6}, kModelField);
    visit("groups", groups,
          "Equal groups of experts; a token's are chosen among the groups_kept best, by the sum of a group's two "
          "best scores (DeepSeek-V3: 8)",
          IntegerRange{1, kMostExperts}, kModelField);
    visit("groups_kept", groups_kept, "See groups (DeepSeek-V3: 4)", IntegerRange{1, kMostExperts}, kModelField);
    visit("correction_bias", correction_bias,
          "A number for each expert is added to its score where experts are chosen, not where they are weighed "
          "(DeepSeek-V3); training.router_bias_rate moves it",
          kModelField);
    visit("shared_width", shared_width,
          "Width of a gated feed-forward that every token goes through as well (DeepSeek: n_shared_experts times "
          "moe_intermediate_size); 0: none",
          IntegerRange{0, kMaxDimension}, kModelField);
    visit("dense_layers", dense_layers, "First blocks that have one feed-forward of dense_width instead",
          IntegerRange{0, 10000}, kModelField);
    visit("dense_width", dense_width, "See dense_layers", IntegerRange{0, kMaxDimension}, kModelField);
  }
};

}  // namespace parka
