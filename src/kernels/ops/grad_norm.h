#pragma once
#include <vector>

#include "core/tensor.h"

namespace parka {
class Device;

// result[0] = sum over all parts of sum of squares, accumulated in double in a fixed order that does not
// depend on the number of threads; NaN or Inf anywhere makes it NaN or Inf, so it doubles as the finite check.
struct SumOfSquares {
  std::vector<TensorView> parts;  // any shape, fp32 or bf16, in
  TensorView partial;  // [number of parts] fp32, out: the sum of each part, so that a bad tensor can be named
  TensorView result;   // [1] fp32, out
};
void sum_of_squares(Device& device, const SumOfSquares& a);

}  // namespace parka
