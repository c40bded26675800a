#pragma once
#include "kernels/ops/add.h"

namespace parka::cuda {
// The caller, ops/add.cpp, has checked `a`; x is not empty.
void add(Device& device, const Add& a);
}  // namespace parka::cuda
