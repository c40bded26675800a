#include "engine/training/speed.h"

#include <algorithm>
#include <string_view>

#include "model/side/side_network.h"
#include "model/vision/image_embedding.h"

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

bool has_frozen(const ParameterTable& table) {
  return !std::ranges::all_of(table.all,
                              [](const auto& p) { return p.trainable || p.role == ParameterRole::kRouterBias; });
}

bool is_of_tower(const ParameterInfo& p) { return p.name.starts_with(kVision); }
bool is_of_images(const ParameterInfo& p) { return is_of_tower(p) || p.name.starts_with(kProjector); }

// The FLOP of an image in the tower and the projector. Products with weights count twice for each element and row,
// in forward, where gradients pass below it, and where it is trained; attention is to all rows.
double flop_per_image(const VisionConfig& vision, const ParameterTable& table) {
  const TowerConfig& tower = vision.tower;
  const double rows = static_cast<double>(tower.num_tokens());
  const bool trains_tower = table.trains_any(kVision), trains_any = trains_tower || table.trains_any(kProjector);
  double flop = 0;
  for (const ParameterInfo& p : table.all) {
    if (!is_of_images(p) || (p.role != ParameterRole::kPlainLinear && p.role != ParameterRole::kTowerLinear))
      continue;
    const bool is_patch = p.name == kPatchEmbedding, is_first_of_projector = p.name == kProjectorInput;
    const bool passes_on = is_of_tower(p)          ? trains_tower && !is_patch
                           : is_first_of_projector ? trains_tower
                                                   : trains_any;
    const double rows_of_weight = !is_of_tower(p) ? static_cast<double>(ImageEmbedding::num_slots(vision))
                                  : is_patch      ? static_cast<double>(tower.num_patches())
                                                  : rows;
    flop +=
        2.0 * (1 + (passes_on ? 1 : 0) + (p.trainable ? 1 : 0)) * rows_of_weight * static_cast<double>(p.numel());
  }
  const double attention = 4.0 * rows * rows * static_cast<double>(tower.width * tower.num_blocks());
  return flop + attention * (trains_tower ? 3 : 1);
}

// The products with weights take two for each element in forward, in input and in weight gradients.
double frozen_weight_flop(const ParameterTable& table) {
  double flop = 0;
  for (size_t i = 0; i < table.all.size(); ++i) {
    const ParameterInfo& p = table.all[i];
    if ((static_cast<int>(i) == table.embedding && !table.ties_head()) || is_of_images(p)) continue;
    const int unit = static_cast<int>(i) == table.head ? table.head_unit() : p.unit;
    const bool passes_on = is_of_side(p) || unit >= table.first_backward_unit();
    const int products = 1 + (passes_on ? 1 : 0) + (p.trainable ? 1 : 0);
    flop += 2.0 * products * static_cast<double>(p.active_numel());
  }
  return flop;
}

}  // namespace

double flop_per_token(const ModelConfig& model, const ParameterTable& table, int64_t sequence_length,
                      int64_t images_per_sequence) {
  if (images_per_sequence > 0) {
    const double of_images = static_cast<double>(images_per_sequence) * flop_per_image(model.vision, table);
    return flop_per_token(model, table, sequence_length) + of_images / static_cast<double>(sequence_length);
  }
  const double S = static_cast<double>(sequence_length), W = std::min(static_cast<double>(model.sliding_window), S);
  const auto layer_keys = [&](int64_t l) { return model.is_windowed(l) ? W * (2 - W / S) : S; };
  double keys = 0;  // twice those of a query on average, of all layers
  for (int64_t l = 0; l < model.num_layers; ++l) keys += layer_keys(l);
  const double attention = keys * static_cast<double>(model.d_heads());
  int64_t of_images = 0;
  for (const ParameterInfo& p : table.all) of_images += is_of_images(p) ? p.numel() : 0;
  if (!has_frozen(table)) {
    return 6.0 * static_cast<double>(table.num_compute_parameters() - of_images) + 6.0 * attention;
  }
  double forward_only = 0;
  for (int64_t l = 0; table.block_unit(l) < std::min(table.first_backward_unit(), table.head_unit()); ++l) {
    forward_only += layer_keys(l);
  }
  const double of_side =
      table.side.exists() ? 6.0 * keys * static_cast<double>(side_stack(model, table.side).d_heads()) : 0;
  return frozen_weight_flop(table) + 6.0 * attention + of_side -
         4.0 * forward_only * static_cast<double>(model.d_heads());
}

ModelSpeed speed_of(const Config& config, const ParameterTable& table, const std::string& device_name) {
  ModelSpeed speed;
  speed.flop_per_token =
      flop_per_token(config.model, table, config.data.sequence_length, config.data.images_per_sequence);
  if (config.model.sliding_window > 0) speed.formula = kWindowedFlopFormula;
  if (has_frozen(table)) speed.formula = kFrozenFlopFormula;
  if (config.data.images_per_sequence > 0) speed.formula = kImagesFlopFormula;
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
