#pragma once
#include "kernels/ops/bit_hash.h"

namespace parka::cuda {
// The caller, ops/bit_hash.cpp, has checked `a`; x is not empty.
void bit_hash(Device& device, const BitHash& a);
}  // namespace parka::cuda
