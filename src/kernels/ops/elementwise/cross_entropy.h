#pragma once
#include <cmath>

#include "core/host_device.h"
#include "core/ignored_target.h"
#include "core/tensor.h"
#include "kernels/op/op.h"

namespace parka {

// Softmax cross-entropy over a chunk of rows. The gradient overwrites the logits, or goes to d_logits in FP8:
//   lse = log sum_v exp(logits[t,v]);  loss[t] = lse - logits[t, target] + z_loss * lse^2
//   d_logits[t,v] = g * (p[v] * (1 + 2 * z_loss * lse) - (v == target)),  p = exp(logits - lse)
// with g = grad_scale, times the value of grad_factor if that is given.
// Rows with target kIgnoreTarget get loss 0 and gradient 0. For another target outside [0, V) the CPU throws
// Error(kBadInput). A GPU cannot throw: it sets loss and gradient of the row to NaN, so that the finite check
// fails. All V columns take part in the softmax, including rows of the embedding that no token has, as in OLMo.
struct CrossEntropy {
  TensorView logits;        // [T, V + padding] fp32 or bf16, in; overwritten with d_logits when write_gradient
  TensorView targets;       // [T] int32, in: in [0, V) or kIgnoreTarget
  TensorView loss;          // [T] fp32, out: without the z-loss term
  TensorView z_loss_value;  // [T] fp32, out: z_loss * lse^2; empty: not wanted
  float z_loss = 0;
  float grad_scale = 1;  // 1 / number of targets of the whole step
  bool write_gradient = true;
  TensorView grad_factor = {};  // [1] fp32, in: a factor that differs from step to step; empty: 1
  int64_t padding = 0;          // columns at the end of each row that are neither read nor written
  // If they are given and write_gradient is, the gradient goes here and the logits stay as they are; both in one
  // format. Codes of padding columns are zeros. The scale of kTensor is that of logits_gradient_scale().
  ScaledView d_logits = {};    // [T, V + padding] fp8, out; empty: not wanted
  ScaledView d_logits_t = {};  // [V + padding, T] fp8, out; empty: not wanted; shares a kTensor scale with d_logits
};
PARKA_OP(cross_entropy, CrossEntropy);
int64_t workspace_of(const CrossEntropy& a);

// The scale of a kTensor gradient in a format whose largest number is `largest`, 1.75 times a power of two: |g|
// becomes that power. No pass has to look for the largest number, for a probability is at most 1. With z_loss a
// gradient may be more than g; what is more than 1.75 |g| becomes that.
// A row's numbers are then multiplied by the one near 1, row_factor(), with which that at the target, by far the
// largest of most rows, is a number of the format. A row without z-loss adds up to 0, for adding a number to all
// logits changes nothing. Rounding the target alone would push all logits the same way, row after row.
PARKA_HOST_DEVICE inline float logits_gradient_scale(float g, float largest) {
  constexpr float kTiny = 0x1p-100f;  // below it 1 / scale would leave fp32's range, and codes are zeros
  const float magnitude = std::fabs(g);
  return magnitude < kTiny ? 1.0f : magnitude * (1.75f / largest);
}

// `rounded` / `at_target`; 1 where that is no rounding: beyond the range, below it, or of NaN.
PARKA_HOST_DEVICE inline float row_factor(float at_target, float rounded) {
  constexpr float kMost = 0.126f;  // half a place of E5M2
  const float factor = rounded / at_target;
  return std::fabs(factor - 1.0f) <= kMost ? factor : 1.0f;
}

}  // namespace parka
