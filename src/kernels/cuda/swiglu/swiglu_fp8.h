#pragma once
#include <functional>
#include <string_view>

#include "kernels/ops/swiglu/swiglu.h"

namespace parka::cuda {
class CudaDevice;

// SwiGLU where any tensor is FP8, or transposed: what swiglu.cu does not do.
void swiglu_forward_fp8(Device& device, const SwigluForward& a);
void swiglu_backward_fp8(Device& device, const SwigluBackward& a);

// The forward pass with up_gate and silu written by `quantize`, which gets where to raise the product's maximum, of
// 0 at first; null where the product has no scale for the whole of it. `op` is whose workspace that is.
void swiglu_forward_with(CudaDevice& device, const SwigluForward& a, std::string_view op,
                         const std::function<void(float* amax)>& quantize);
}  // namespace parka::cuda
