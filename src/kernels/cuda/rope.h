#pragma once
#include "kernels/ops/rope.h"

namespace parka::cuda {

void rope_forward(Device& device, const RopeForward& a);
void rope_backward(Device& device, const RopeBackward& a);

}  // namespace parka::cuda
