#include "engine/planning/card_speed.h"

#include <algorithm>
#include <cmath>
#include <string_view>

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace parka {
namespace {

struct Card {
  std::string_view name;
  double memory_gb;
};
constexpr Card kCards[] = {{"4090", 24}, {"a100", 80}, {"h100", 80}, {"h200", 141}};

// step.*.1gpu.tok_s_gpu, of OLMoE 4x4.1gpu, and 1xh100 of docs/results/figures.jsonl, by card and recipe from small
// to large models.
struct CardFigure {
  double flop_per_token, tokens_per_second;
  std::string_view card, model;
  Recipe recipe;
  bool is_mixture = false;
};
constexpr CardFigure kMeasured[] = {
    {7.46e9, 80460, "h100", "OLMo-1B", Recipe::kBf16},
    {7.46e9, 120266, "h100", "OLMo-1B", Recipe::kParka},
    {4.125e10, 23875, "h100", "Llama-2-7B", Recipe::kParka},
    {5.147e10, 17226, "h100", "Llama-3-8B", Recipe::kParka},
    {7.46e9, 82012, "h200", "OLMo-1B", Recipe::kBf16},
    {4.125e10, 15104, "h200", "Llama-2-7B", Recipe::kBf16},
    {7.879e9, 63132, "h200", "OLMoE-1B-7B", Recipe::kBf16, true},
    {1.027e9, 442560, "h200", "moe", Recipe::kParka, true},
    {7.879e9, 87956, "h200", "OLMoE-1B-7B", Recipe::kParka, true},
    {7.46e9, 113313, "h200", "OLMo-1B", Recipe::kFp8Linear},
    {4.125e10, 23820, "h200", "Llama-2-7B", Recipe::kFp8Linear},
    {7.46e9, 112379, "h200", "OLMo-1B", Recipe::kCoat},
    {4.125e10, 23710, "h200", "Llama-2-7B", Recipe::kCoat},
    {7.74e8, 696432, "h200", "150m", Recipe::kParka},
    {7.46e9, 125267, "h200", "OLMo-1B", Recipe::kParka},
    {4.125e10, 24697, "h200", "Llama-2-7B", Recipe::kParka},
    {5.147e10, 17853, "h200", "Llama-3-8B", Recipe::kParka},
};

double flop_rate(const CardFigure& one) { return one.flop_per_token * one.tokens_per_second; }

bool is_like_measured(const Config& config) {
  return config.finetune.method == FinetuneMethod::kFull && !config.model.vision.exists();
}

// Names what takes time in this run and was in no measured one; empty: nothing.
std::string left_out(const Config& config) {
  std::vector<std::string_view> parts;
  if (config.precision.recompute != Recompute::kNone) parts.push_back("what it recomputes");
  if (config.precision.offload_blocks > 0 || config.precision.offload_weights || config.optimizer.offload) {
    parts.push_back("what it moves to host memory");
  }
  if (config.optimizer.kind == OptimizerKind::kMuon) parts.push_back("Muon's products");
  return parts.empty() ? "" : fmt::format("; without {}", fmt::join(parts, " and "));
}

}  // namespace

std::vector<std::string> card_names() {
  std::vector<std::string> names;
  for (const Card& card : kCards) names.emplace_back(card.name);
  return names;
}

double card_memory_gb(const std::string& card) { return std::ranges::find(kCards, card, &Card::name)->memory_gb; }

CardSpeed card_speed(const std::string& card, const Config& config, double flop_per_token) {
  std::vector<const CardFigure*> rows;
  for (const CardFigure& one : kMeasured) {
    const bool is_alike = one.card == card && one.recipe == config.precision.recipe;
    if (is_alike && one.is_mixture == config.model.moe.exists()) rows.push_back(&one);
  }
  if (rows.empty() || !is_like_measured(config)) {
    const std::string_view what = config.model.moe.exists()      ? "a mixture of experts"
                                  : config.model.vision.exists() ? "a model that sees images"
                                  : is_like_measured(config)     ? name_of(config.precision.recipe)
                                                                 : "fine-tuning";
    return {0, fmt::format("{} was not measured on it", what)};
  }
  const auto above =
      std::ranges::find_if(rows, [&](const CardFigure* one) { return one->flop_per_token >= flop_per_token; });
  const CardFigure& right = above == rows.end() ? *rows.back() : **above;
  const CardFigure& left = above == rows.begin() || above == rows.end() ? right : **(above - 1);
  const double width = std::log(right.flop_per_token / left.flop_per_token);
  const double share = width > 0 ? std::log(flop_per_token / left.flop_per_token) / width : 0;
  const double flops = flop_rate(left) + share * (flop_rate(right) - flop_rate(left));
  constexpr double kAlike = 1.1, kFar = 0.05;
  const double ratio = flop_per_token / (above == rows.begin() ? right : left).flop_per_token;
  if (ratio < kFar) return {0, fmt::format("the smallest model that was measured is {}", right.model)};
  const std::string source =
      ratio < 1 / kAlike ? fmt::format("at most: by {}, the smallest that was measured", right.model)
      : &left == &right || ratio < kAlike ? fmt::format("by {}", left.model)
                                          : fmt::format("between {} and {}", left.model, right.model);
  return {flops / flop_per_token, source + left_out(config)};
}

}  // namespace parka
