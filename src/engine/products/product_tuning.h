#pragma once
#include <vector>

#include "engine/step/recorded_step.h"
#include "kernels/device/device.h"
#include "kernels/device/gemm_tuning.h"

namespace parka {

// Runs each product of a step on memory of its own: of every key_of(), what tune_gemms() chooses.
std::vector<GemmChoice> tune_products(Device& device, const std::vector<RecordedProduct>& products,
                                      GemmTuneOptions options);

}  // namespace parka
