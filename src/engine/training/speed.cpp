#include "engine/training/speed.h"

#include <algorithm>
#include <string_view>

namespace parka {
namespace {

// Dense tensor-core peaks by NVIDIA's datasheets (SXM cards), FLOP/s.
struct CardPeak {
  std::string_view name;  // what the product's name begins with
  double bf16, fp8;
};
constexpr CardPeak kPeaks[] = {
    {"NVIDIA H200", 989e12, 1979e12},
    {"NVIDIA H100 80GB HBM3", 989e12, 1979e12},
    {"NVIDIA A100-SXM4", 312e12, 0},
};

bool has_frozen(const ParameterTable& table) { return !std::ranges::all_of(table.all, &ParameterInfo::trainable); }

// Of the products with weights: twice for each element that takes part in forward, in input and in weight
// gradients.
double frozen_weight_flop(const ParameterTable& table) {
  double flop = 0;
  for (size_t i = 0; i < table.all.size(); ++i) {
    const ParameterInfo& p = table.all[i];
    if (static_cast<int>(i) == table.embedding && !table.ties_head()) continue;
    const int unit = static_cast<int>(i) == table.head ? table.head_unit() : p.unit;
    const int products = 1 + (unit >= table.first_trained_unit ? 1 : 0) + (p.trainable ? 1 : 0);
    flop += 2.0 * products * static_cast<double>(p.numel());
  }
  return flop;
}

}  // namespace

double flop_per_token(const ModelConfig& model, const ParameterTable& table, int64_t sequence_length) {
  const double S = static_cast<double>(sequence_length), W = std::min(static_cast<double>(model.sliding_window), S);
  const auto layer_keys = [&](int64_t l) { return model.is_windowed(l) ? W * (2 - W / S) : S; };
  double keys = 0;  // twice those of a query on average, of all layers
  for (int64_t l = 0; l < model.num_layers; ++l) keys += layer_keys(l);
  const double attention = keys * static_cast<double>(model.d_heads());
  if (!has_frozen(table)) return 6.0 * static_cast<double>(table.num_compute_parameters()) + 6.0 * attention;
  double forward_only = 0;
  for (int64_t l = 0; table.block_unit(l) < std::min(table.first_trained_unit, table.head_unit()); ++l) {
    forward_only += layer_keys(l);
  }
  return frozen_weight_flop(table) + 6.0 * attention - 4.0 * forward_only * static_cast<double>(model.d_heads());
}

ModelSpeed speed_of(const Config& config, const ParameterTable& table, const std::string& device_name) {
  ModelSpeed speed;
  speed.flop_per_token = flop_per_token(config.model, table, config.data.sequence_length);
  if (config.model.sliding_window > 0) speed.formula = kWindowedFlopFormula;
  if (has_frozen(table)) speed.formula = kFrozenFlopFormula;
  for (const CardPeak& card : kPeaks) {
    if (!device_name.starts_with(card.name)) continue;
    if (config.precision.gemm != GemmPrecision::kCompute) {
      speed.peak_flops = card.fp8;
    } else if (config.precision.compute == DType::kBF16) {
      speed.peak_flops = card.bf16;
    }
  }
  return speed;
}

}  // namespace parka
