#pragma once
#include <limits>
#include <vector>

#include "core/tensor.h"
#include "kernels/op/op.h"

namespace parka {

// result[0] = sum over all parts of their sums of squares, accumulated in double, in a fixed order that does not
// depend on the number of threads. A NaN or Inf anywhere makes it NaN or Inf, so it is the finite check too.
struct SumOfSquares {
  std::vector<TensorView> parts;  // any shape, fp32 or bf16, in
  TensorView partial;  // [number of parts] fp32, out: the sum of each part, so that a bad tensor can be named
  TensorView result;   // [1] fp32, out
};
PARKA_OP(sum_of_squares, SumOfSquares);
int64_t workspace_of(const SumOfSquares& a);

// The factor that limits the norm of the gradients to max_norm, as in OLMo and PyTorch:
//   coefficient[0] = min(1, max_norm / (sqrt(sum_of_squares[0]) + 1e-6))
// or NaN if sum_of_squares or loss is not finite, or exceeds its limit: then adamw_step changes nothing.
struct ClipCoefficient {
  TensorView sum_of_squares;  // [1] fp32, in: of all gradients
  TensorView loss;            // [1] fp32, in
  float max_norm;             // infinity: no clipping
  float most_squares = std::numeric_limits<float>::infinity();
  float most_loss = std::numeric_limits<float>::infinity();
  TensorView coefficient;  // [1] fp32, out
  // [1] fp32, in: what stands for sum_of_squares in the formula, and must be finite likewise; empty: that itself.
  TensorView clipped_squares = {};
};
PARKA_OP(clip_coefficient, ClipCoefficient);

// total[0] += the sum of x, computed in double in a fixed order and rounded once.
struct AddSum {
  TensorView x;      // any shape, fp32, in
  TensorView total;  // [1] fp32, in/out
};
PARKA_OP(add_sum, AddSum);

}  // namespace parka
