#pragma once
#include "core/tensor.h"
#include "kernels/op/op.h"

namespace parka {

// total += x, element by element, added in fp32 and rounded once to their dtype. x and total must not overlap.
struct Add {
  TensorView x;      // [N] fp32 or bf16, in
  TensorView total;  // [N] of the same dtype, in/out
};
PARKA_OP(add, Add);

}  // namespace parka
