#pragma once
#include "core/ignored_target.h"
#include "core/tensor.h"
#include "kernels/op/op.h"

namespace parka {

// Softmax cross-entropy over a chunk of rows. The gradient overwrites the logits:
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
};
PARKA_OP(cross_entropy, CrossEntropy);

}  // namespace parka
