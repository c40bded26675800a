#pragma once
#include "kernels/ops/add.h"

namespace parka::cpu {
// The caller, ops/add.cpp, has checked `a`; x is not empty.
void add(Device& device, const Add& a);
}  // namespace parka::cpu
