#pragma once
#include <string>
#include <vector>

#include "engine/step/recorded_step.h"
#include "kernels/device/device.h"
#include "kernels/device/gemm_tuning.h"
#include "kernels/ops/gemm/fused_product.h"

namespace parka {

// Runs each product of a step on memory of its own: of every key_of(), what tune_gemms() chooses. Then of each of
// `fused` what tune_fused_products() does, in a small part of the seconds that `options` gives for all.
std::vector<GemmChoice> tune_products(Device& device, const std::vector<RecordedProduct>& products,
                                      const std::vector<FusedProduct>& fused, const GemmTuneOptions& options);

// Times each product that the device has one kernel for as that and as two, gemm() with what the device uses for it
// and the op that reads it, in turns. Chooses one where it is clearly faster, leaves the same bits each time, and
// about what two leave. As tune_gemms() does, it lets each run alone until the clock has settled to the power that
// it draws.
std::vector<GemmChoice> tune_fused_products(Device& device, const std::vector<FusedProduct>& products,
                                            double budget_of_each);

// Whether one kernel, on memory that holds the operands of `placed`, leaves the same bits each time, and codes
// that are about those that two leave: their sums may be rounded otherwise, so that a few are neighbours. False if
// any number is NaN.
bool one_kernel_agrees(Device& device, const FusedProduct& placed);

// One kernel or two for the op of that key, by the time of two and that of one over it.
GemmChoice choose_kernels(const std::string& key, double seconds_of_two, double ratio);

}  // namespace parka
