#pragma once
#include "kernels/ops/norm.h"

namespace parka::cuda {
// The caller, ops/norm.cpp, has checked `a`; no extent is 0.
void norm_forward(Device& device, const NormForward& a);
void norm_recompute(Device& device, const NormRecompute& a);
void norm_backward(Device& device, const NormBackward& a);
}  // namespace parka::cuda
