#pragma once
#include "kernels/ops/cross_entropy.h"

namespace parka::cuda {

void cross_entropy(Device& device, const CrossEntropy& a);

}  // namespace parka::cuda
