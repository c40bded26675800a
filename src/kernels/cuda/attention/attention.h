#pragma once
#include "kernels/ops/attention.h"

namespace parka::cuda {

void attention_forward(Device& device, const AttentionForward& a);
void attention_backward(Device& device, const AttentionBackward& a);

}  // namespace parka::cuda
