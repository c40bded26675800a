#pragma once
#include "core/tensor.h"
#include "kernels/op/op.h"

namespace parka {

// x += bias in every row, added in fp32 and rounded once to their dtype.
struct BiasForward {
  TensorView bias;  // [N] fp32 or bf16, in
  TensorView x;     // [T, N] of the same dtype, in/out
};
PARKA_OP(bias_forward, BiasForward);

// d_bias += sum_t d_y. Sums are fp32, in an order that depends on the shape alone, and are rounded once.
struct BiasBackward {
  TensorView d_y;     // [T, N] fp32 or bf16, in
  TensorView d_bias;  // [N] fp32 or bf16, in/out
};
PARKA_OP(bias_backward, BiasBackward);
int64_t workspace_of(const BiasBackward& a);

}  // namespace parka
