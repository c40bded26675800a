#pragma once
#include "kernels/ops/quantize.h"

namespace parka::cuda {
// The caller, ops/quantize.cpp, has checked `a`; x is not empty.
void quantize(Device& device, const Quantize& a);
}  // namespace parka::cuda
