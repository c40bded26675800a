#pragma once
#include "kernels/ops/quantization_statistics.h"

namespace parka::cuda {

void quantization_statistics(Device& device, const QuantizationStatistics& a);
void moment_statistics(Device& device, const MomentStatistics& a);

}  // namespace parka::cuda
