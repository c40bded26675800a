#pragma once
#include "kernels/ops/swiglu.h"

namespace parka::cuda {
// The caller, ops/swiglu.cpp, has checked `a`; no extent is 0.
void swiglu_forward(Device& device, const SwigluForward& a);
void swiglu_backward(Device& device, const SwigluBackward& a);
}  // namespace parka::cuda
