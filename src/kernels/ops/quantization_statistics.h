#pragma once
#include <cstdint>
#include "kernels/op/op.h"

#include "core/tensor.h"
#include "kernels/ops/adamw.h"

namespace parka {

// What became of numbers that were stored in FP8. Sums are taken in double in a fixed order.
struct QuantizationTotals {
  float elements;     // compared; what follows is of those of them that are finite before and after
  float amax;         // the largest magnitude before
  float scale;        // of q, if it has one for the whole tensor; 0 otherwise
  float saturated;    // elements that became the largest code and were too large for rounding to be the reason
  float underflowed;  // elements that were not 0 and became code 0
  float not_finite;   // elements that were NaN or infinite, or became so
  float norm;         // root of the sum of squares before
  float error_norm;   // root of the sum of squared differences

  static constexpr int64_t kCount = 8;  // of numbers, as they lie in memory
};
static_assert(sizeof(QuantizationTotals) == QuantizationTotals::kCount * sizeof(float));

struct QuantizationStatistics {
  TensorView x;  // [R, C or more] fp32 or bf16, in: the numbers before; columns behind the first C do not count
  ScaledView q;  // [R, C] fp8 with any scaling, in: what they became
  TensorView totals;  // [QuantizationTotals::kCount] fp32, out: a QuantizationTotals
};
PARKA_OP(quantization_statistics, QuantizationStatistics);
int64_t workspace_of(const QuantizationStatistics& a);

// What an element's magnitude, divided by its scale, must exceed to be saturated: half way from the largest number
// of the format to what would be the next one.
float saturation_threshold(DType format);

// How the groups of a moment with range expansion are stretched, and how large their members are.
struct MomentStatistics {
  MomentView moment;  // fp8 with exponents, in
  TensorView counts;  // [256] int32, out: how many groups have each exponent (k = exponent / 16); groups of zeros,
                      // which have none of their own, are not counted
  TensorView amax;  // [2] fp32, out: the smallest and the largest amax of those groups; infinity and 0 without any
};
PARKA_OP(moment_statistics, MomentStatistics);
inline constexpr int64_t kNumMomentExponents = 256;

}  // namespace parka
