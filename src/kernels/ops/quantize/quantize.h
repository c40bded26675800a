#pragma once
#include "core/tensor.h"
#include "kernels/op/op.h"

namespace parka {

// out = x in the number format and scaling of `out`; out_t = its transpose.
//
// For each scaled piece (tensor, 1xG group or GxG block): amax = max |x|; scale = amax / format max, in fp32
// (a bf16 scale is rounded up, so that nothing exceeds the format's maximum); code = rn_saturate(x * (1 / scale)),
// with 1 / scale rounded to fp32. A piece with amax below 2^-100 gets scale 1 and zero codes. NaN gives NaN codes,
// and a piece with an infinity decodes to NaN, so the finite check still detects bad values.
// A kGroup out_t has its groups along its own rows (the transposed axis), as a K-major GEMM operand needs.
struct Quantize {
  ScaledView x;           // [R, C] fp32, bf16 or fp8 (decoded first), in
  ScaledView out = {};    // [R, C] fp32, bf16 or fp8, out; empty: not wanted
  ScaledView out_t = {};  // [C, R], out; empty: not wanted; shares a kTensor scale with out
  // kTensor only: the scale of out / out_t is an input, from an earlier pass over the same values.
  bool scale_given = false;
  TensorView amax = {};  // [1] fp32, in: max |x|, if the producer of x has computed it (kTensor, not scale_given)
};
// Also converts between plain formats (Scaling::kNone), dequantizes (fp8 x, plain out) and transposes
// (out empty; if x is fp8 kTensor and out_t has the same scale memory, the codes are copied unchanged).
PARKA_OP(quantize, Quantize);
int64_t workspace_of(const Quantize& a);

// The rows that a matrix may have on a GPU where kernels make FP8 codes of it: tiles of 128 rows are one below the
// other in a grid, which has at most 65535 rows of blocks.
inline constexpr int64_t kMaxFloat8Rows = int64_t{65535} * 128;

// quantize() of N matrices of one shape, below each other, that have a kTensor scale each. From numbers, whose
// max |x| are known, it makes codes and scales; codes it transposes as they are.
struct QuantizeMatrices {
  TensorView x;         // [N R, C] fp32, bf16 or fp8, in
  TensorView amax;      // [N] fp32, in: max |x|; empty if x is fp8
  TensorView scales;    // [N] fp32, out; not used if x is fp8
  TensorView out = {};  // [N R, C] fp8, out; empty: not wanted
  TensorView out_t;     // [N C, R] fp8, out; empty: not wanted
};
PARKA_OP(quantize_matrices, QuantizeMatrices);
// Of one of its matrices.
Quantize matrix_of(const QuantizeMatrices& a, int64_t number);

// result[n] = max(result[n], max |x| of the n-th part); NaN is ignored. Several calls give the maximum over several
// tensors, or over what several devices have of one. The caller initializes the result, usually to 0.
struct Amax {
  TensorView x;       // any shape, fp32 or bf16, in
  TensorView result;  // [N] fp32, in/out; not negative
  // N > 1: x has elements `first` and following of a tensor of N parts of `part` elements.
  int64_t part = 0, first = 0;
};
PARKA_OP(amax, Amax);

// scales[i] = the kTensor scale of fp8 codes of numbers whose max |x| is amax[i], as quantize() makes it.
struct TensorScales {
  TensorView amax;    // [N] fp32, in
  DType format;       // e4m3 or e5m2
  TensorView scales;  // [N] fp32, out
};
PARKA_OP(tensor_scales, TensorScales);

}  // namespace parka
