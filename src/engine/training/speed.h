#pragma once
#include <string>

#include "engine/config/config.h"
#include "model/parameter_table.h"

namespace parka {

inline constexpr const char* kFlopFormula =
    "6 x active parameters without input embedding + 6 x layers x sequence x width";
inline constexpr const char* kWindowedFlopFormula =
    "6 x active parameters without input embedding + 6 x width x (sequence, or W (2 - W / sequence) with a window W, "
    "summed over layers)";

inline constexpr const char* kImagesFlopFormula =
    "2 x active parameters without input embedding + 2 x those through which gradients pass + 2 x those trained + "
    "attention; tower and projector likewise, for data.images_per_sequence images in each sequence, blank ones too";
inline constexpr const char* kFrozenFlopFormula =
    "2 x active parameters without input embedding + 2 x those through which gradients pass + 2 x those trained + "
    "attention";

// Model FLOP per trained token by these formulas, whose second term is causal attention counted once. Forward and
// backward, without recomputation. Weight gradients of frozen parameters are not counted, nor is backward below the
// lowest trained unit. Tower and projector add theirs for so many images of each sequence, per token.
double flop_per_token(const ModelConfig& model, const ParameterTable& table, int64_t sequence_length,
                      int64_t images_per_sequence = 0);

// Converts a run's tokens per second to FLOP/s and utilization (MFU).
struct ModelSpeed {
  double flop_per_token = 0;
  double peak_flops = 0;  // dense peak of a card in the format of the GEMMs; 0: unknown, and so is the MFU
  const char* formula = kFlopFormula;

  // The share of their peak at which so many cards make `flops` FLOP/s together.
  double utilization(double flops, int num_cards) const { return flops / (num_cards * peak_flops); }
};
ModelSpeed speed_of(const Config& config, const ParameterTable& table, const std::string& device_name);

}  // namespace parka
