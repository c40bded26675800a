#pragma once
#include "kernels/ops/swiglu/swiglu.h"

namespace parka::cuda {
// SwiGLU where any tensor is FP8, or transposed: what swiglu.cu does not do.
void swiglu_forward_fp8(Device& device, const SwigluForward& a);
void swiglu_backward_fp8(Device& device, const SwigluBackward& a);
}  // namespace parka::cuda
