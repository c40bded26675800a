#pragma once
#include "core/tensor.h"
#include "kernels/op/op.h"

namespace parka {

// result[0] = max(result[0], max |x|); NaN is skipped. For a maximum over several tensors, or over the parts of one
// that lie on several devices. The caller sets result[0] first, to 0 as a rule.
struct Amax {
  TensorView x;       // any shape, fp32 or bf16, in
  TensorView result;  // [1] fp32, in/out; not negative
};
PARKA_OP(amax, Amax);

}  // namespace parka
