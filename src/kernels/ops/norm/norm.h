#pragma once
#include "core/tensor.h"
#include "kernels/op/op.h"

namespace parka {

enum class NormKind : uint8_t {
  kLayerNorm,        // non-parametric, as in OLMo v1: y = (x - mean) * rstd, rstd = 1 / sqrt(var + eps)
  kRmsNorm,          // y = x * rstd * w,              rstd = 1 / sqrt(mean(x^2) + eps),  w = weight + weight_offset
  kNone,             // y = x: a residual add alone, with the outputs of a norm. It has no statistics
  kAffineLayerNorm,  // y = (x - mean) * rstd * w + bias, w as for kRmsNorm: as in vision towers
};
constexpr bool has_mean(NormKind kind) {
  return kind == NormKind::kLayerNorm || kind == NormKind::kAffineLayerNorm;
}
constexpr bool has_weight(NormKind kind) {
  return kind == NormKind::kRmsNorm || kind == NormKind::kAffineLayerNorm;
}

// Residual add and norm in one:
//   sum = residual + branch, rounded to the dtype of residual_out
//   x   = quantize(sum)                          when x is given
//   y   = norm(x if given, else residual_out)    with statistics of that same input
// Backward gets the same input of the norm, so the gradient is exact for the quantized function.
struct NormForward {
  NormKind kind;
  float eps;
  TensorView residual;      // [T, C] fp32 or bf16, in
  TensorView branch = {};   // [T, C] as residual, in; empty: sum = residual
  TensorView weight = {};   // [C] as residual, in; of kinds with a weight only
  TensorView bias = {};     // [C] as residual, in; kAffineLayerNorm only; empty: zeros
  TensorView residual_out;  // [T, C] as residual, out; may be the memory of residual
  ScaledView x = {};        // [T, C] fp8 kGroup, out; empty, as for kNone always: the norm reads residual_out
  ScaledView y;             // [T, C] fp32, bf16, or fp8 with any scaling, out; may be residual_out for kNone
  ScaledView y_t = {};      // [C, T] fp8, out: y transposed for the weight gradient; empty: not wanted; shares a
                            // kTensor scale with y, and a kGroup one has its groups along T
  TensorView mean = {};     // [T] fp32, out; of kinds with a mean only
  TensorView rstd = {};     // [T] fp32, out; empty for kNone
  float weight_offset = 0;  // added in fp32: 1 for weights that are kept as what they differ from 1 by
};
// Statistics are computed in fp32 over exactly C elements, in two passes: the mean first, then squared deviations.
PARKA_OP(norm_forward, NormForward);
int64_t workspace_of(const NormForward& a);

// Recomputes y from the saved input and statistics: bitwise equal to norm_forward's y. With kTensor scaling y.scale
// is an input, so no pass for the maximum is needed.
struct NormRecompute {
  NormKind kind;
  ScaledView x;             // [T, C] what the norm read, in
  TensorView weight = {};   // [C] fp32 or bf16, in; as in forward
  TensorView bias = {};     // [C] as weight, in; as in forward
  TensorView mean = {};     // [T] fp32, in; of kinds with a mean only
  TensorView rstd = {};     // [T] fp32, in; empty for kNone
  ScaledView y = {};        // [T, C], out; empty: not wanted. kTensor: y.scale is an input
  ScaledView y_t = {};      // [C, T] transposed, out; empty: not wanted. kTensor: y_t.scale is an input
  float weight_offset = 0;  // as in forward
};
PARKA_OP(norm_recompute, NormRecompute);

// Gradient through the norm, added to the gradient of the residual stream:
//   d_residual_out = d_residual + norm'(x) d_y,   d_weight += sum_t d_y * (x - mean) * rstd,   d_bias += sum_t d_y
// with mean 0 for kinds without one.
// The quantization of x has derivative 1 (straight-through estimator).
struct NormBackward {
  NormKind kind;
  ScaledView x = {};              // [T, C] what the norm read, in; empty for kNone
  TensorView weight = {};         // [C], in; as in forward
  TensorView mean = {};           // [T] fp32, in; of kinds with a mean only
  TensorView rstd = {};           // [T] fp32, in; empty for kNone
  TensorView d_y;                 // [T, C] fp32 or bf16, in
  TensorView d_residual = {};     // [T, C] as d_y, in; empty: zero
  TensorView d_residual_out;      // [T, C] as d_y, out; may be the memory of d_residual or d_y
  ScaledView d_quantized = {};    // [T, C] fp8, out: d_residual_out quantized for the next GEMM; empty: not wanted
  ScaledView d_quantized_t = {};  // [C, T] fp8, out: the same transposed; empty: not wanted
  TensorView d_weight = {};       // [C] fp32 or bf16, in/out; of kinds with a weight only; empty: not wanted
  TensorView d_bias = {};         // [C] fp32 or bf16, in/out; kAffineLayerNorm only; empty: not wanted
  float weight_offset = 0;        // as in forward
};
// kTensor outputs share one scale: if both are given, d_quantized_t.scale must be the memory of d_quantized.scale.
// The quantized copies are made from d_residual_out after rounding.
PARKA_OP(norm_backward, NormBackward);
int64_t workspace_of(const NormBackward& a);

}  // namespace parka
