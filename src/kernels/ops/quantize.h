#pragma once
#include "core/tensor.h"
#include "kernels/op/op.h"

namespace parka {

// out = x in the number format and scaling of `out`, and the same transposed into out_t.
//
// For each scaled piece (tensor, 1xG group or GxG block): amax = max |x|; scale = amax / format max, in fp32
// (a bf16 scale is rounded up, so that nothing passes the format's maximum); code = rn_saturate(x * (1 / scale)),
// with 1 / scale rounded to fp32. A piece whose amax is below 2^-100 gets scale 1 and zero codes. NaN gives NaN
// codes; a piece with an infinity decodes to NaN: bad values stay visible to the finite check.
// A kGroup out_t has its groups along its own rows (the transposed axis), as a K-major GEMM operand needs.
struct Quantize {
  ScaledView x;           // [R, C] fp32, bf16 or fp8 (decoded first), in
  ScaledView out = {};    // [R, C] fp32, bf16 or fp8, out; empty: not wanted
  ScaledView out_t = {};  // [C, R], out; empty: not wanted; shares a kTensor scale with out
  // kTensor only: the scale of out / out_t is an input, from an earlier pass over the same values.
  bool scale_given = false;
  TensorView amax = {};  // [1] fp32, in: max |x|, if whoever made x has found it (kTensor, not scale_given)
};
// Also converts between plain formats (Scaling::kNone), dequantizes (fp8 x, plain out) and transposes
// (out empty; an fp8 kTensor x with an out_t whose scale is the memory of x.scale is moved code for code).
PARKA_OP(quantize, Quantize);
int64_t workspace_of(const Quantize& a);

}  // namespace parka
