#pragma once
#include "kernels/ops/adamw.h"

namespace parka::cuda {

void adamw_step(Device& device, const AdamwStep& a);
void moment_encode(Device& device, const MomentEncode& a);
void moment_decode(Device& device, const MomentDecode& a);

}  // namespace parka::cuda
