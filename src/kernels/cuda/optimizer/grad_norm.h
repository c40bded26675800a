#pragma once
#include "kernels/ops/grad_norm.h"

namespace parka::cuda {

void sum_of_squares(Device& device, const SumOfSquares& a);
void clip_coefficient(Device& device, const ClipCoefficient& a);
void add_sum(Device& device, const AddSum& a);

}  // namespace parka::cuda
