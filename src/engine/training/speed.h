#pragma once
#include <string>

#include "engine/config/config.h"
#include "model/parameter_table.h"

namespace parka {

inline constexpr const char* kFlopFormula =
    "6 x parameters without input embedding + 6 x layers x sequence x width";

// Model FLOP per trained token by kFlopFormula, whose second term is causal attention counted once; layers with a
// window W of S tokens have W (2 - W / S) in the place of the sequence. Forward and backward, without
// recomputation.
double flop_per_token(const ModelConfig& model, const ParameterTable& table, int64_t sequence_length);

// Converts a run's tokens per second to FLOP/s and utilization (MFU).
struct ModelSpeed {
  double flop_per_token = 0;
  double peak_flops = 0;  // dense peak of the card in the format of the GEMMs; 0: unknown, and so is the MFU
};
ModelSpeed speed_of(const Config& config, const ParameterTable& table, const std::string& device_name);

}  // namespace parka
