#pragma once
#include "kernels/ops/amax.h"

namespace parka::cuda {
// The caller, ops/amax.cpp, has checked `a`; x is not empty.
void amax(Device& device, const Amax& a);
}  // namespace parka::cuda
