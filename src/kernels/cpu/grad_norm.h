#pragma once
#include "kernels/ops/grad_norm.h"

namespace parka::cpu {

void sum_of_squares(Device& device, const SumOfSquares& a);

}  // namespace parka::cpu
