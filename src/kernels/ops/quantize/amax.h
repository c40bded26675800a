#pragma once
#include "core/tensor.h"
#include "kernels/op/op.h"

namespace parka {

// result[0] = max(result[0], max |x|); NaN is ignored. Several calls give the maximum over several tensors, or over
// the parts of one on several devices. The caller initializes result[0], usually to 0.
struct Amax {
  TensorView x;       // any shape, fp32 or bf16, in
  TensorView result;  // [1] fp32, in/out; not negative
};
PARKA_OP(amax, Amax);

}  // namespace parka
