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

}  // namespace

double flop_per_token(const ModelConfig& model, const ParameterTable& table, int64_t sequence_length) {
  const double S = static_cast<double>(sequence_length), W = std::min(static_cast<double>(model.sliding_window), S);
  double keys = 0;  // twice those of a query on average, of all layers
  for (int64_t l = 0; l < model.num_layers; ++l) keys += model.is_windowed(l) ? W * (2 - W / S) : S;
  const double attention = keys * static_cast<double>(model.d_heads());
  return 6.0 * static_cast<double>(table.num_compute_parameters()) + 6.0 * attention;
}

ModelSpeed speed_of(const Config& config, const ParameterTable& table, const std::string& device_name) {
  ModelSpeed speed;
  speed.flop_per_token = flop_per_token(config.model, table, config.data.sequence_length);
  if (config.model.sliding_window > 0) speed.formula = kWindowedFlopFormula;
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
