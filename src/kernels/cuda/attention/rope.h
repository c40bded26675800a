#pragma once
#include "kernels/ops/rope.h"

namespace parka::cuda {

void rope_forward(Device& device, const RopeForward& a);

}  // namespace parka::cuda
