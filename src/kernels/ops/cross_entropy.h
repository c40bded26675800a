#pragma once
#include "core/ignored_target.h"
#include "core/tensor.h"
#include "kernels/op/op.h"

namespace parka {

// Softmax cross-entropy over a chunk of rows, with the gradient written over the logits:
//   lse = log sum_v exp(logits[t,v]);  loss[t] = lse - logits[t, target] + z_loss * lse^2
//   d_logits[t,v] = g * (p[v] * (1 + 2 * z_loss * lse) - (v == target)),  p = exp(logits - lse)
// with g = grad_scale, times what grad_factor holds where there is one.
// Rows whose target is kIgnoreTarget get loss 0 and gradient 0. Of another target outside [0, V) the CPU throws
// Error(kBadInput); a GPU cannot, and makes loss and gradient of the row NaN, so that the finite check finds it.
// Every one of the V columns takes part in the softmax, padding rows of the embedding included, as in OLMo.
struct CrossEntropy {
  TensorView logits;        // [T, V] fp32 or bf16, in; overwritten with d_logits when write_gradient
  TensorView targets;       // [T] int32, in: in [0, V) or kIgnoreTarget
  TensorView loss;          // [T] fp32, out: without the z-loss term
  TensorView z_loss_value;  // [T] fp32, out: z_loss * lse^2; empty: not wanted
  float z_loss = 0;
  float grad_scale = 1;  // 1 / number of targets of the whole step
  bool write_gradient = true;
  TensorView grad_factor = {};  // [1] fp32, in: for a scale that differs from step to step; empty: 1
};
PARKA_OP(cross_entropy, CrossEntropy);

}  // namespace parka
