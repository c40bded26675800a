#pragma once
#include "kernels/ops/gemm.h"

namespace parka::cuda {
// The caller, ops/gemm.cpp, has checked `a`; no extent is 0.
void gemm(Device& device, const Gemm& a);
}  // namespace parka::cuda
