#pragma once
#include "core/tensor.h"
#include "kernels/op/op.h"

namespace parka {

// Moves what decides the choice of experts beside their scores, without a loss (arXiv 2408.15664):
//   bias[e] += rate * sign(mean of load[0..E) - load[e]),   sign(0) = 0
// Nothing moves where the coefficient of the step's update is NaN, because the step is skipped.
struct MoveRouterBias {
  TensorView load;         // [>= E] fp32, in: whole numbers below 2^24, the slots of each expert in a step
  TensorView coefficient;  // [1] fp32, in
  float rate = 0;
  TensorView bias;  // [E] fp32, in/out
};
PARKA_OP(move_router_bias, MoveRouterBias);

}  // namespace parka
