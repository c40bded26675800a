#pragma once
#include <cstdint>
#include "kernels/op/op.h"

#include "core/tensor.h"
#include "kernels/ops/optimizer/adamw.h"

namespace parka {

// The error of storing numbers in FP8. Sums are computed in double in a fixed order. Except for `elements` and
// `not_finite`, only elements that are finite before and after count.
struct QuantizationTotals {
  float elements;     // number of elements compared
  float amax;         // largest magnitude before
  float scale;        // of q, if it has one scale for the whole tensor; 0 otherwise
  float saturated;    // elements clipped to the largest code (beyond saturation_threshold)
  float underflowed;  // nonzero elements that became code 0
  float not_finite;   // elements that were NaN or infinite, or became so
  float norm;         // square root of the sum of squares before
  float error_norm;   // square root of the sum of squared differences

  static constexpr int64_t kCount = 8;  // of these numbers
};
static_assert(sizeof(QuantizationTotals) == QuantizationTotals::kCount * sizeof(float));

struct QuantizationStatistics {
  TensorView x;             // [R, C or more] fp32 or bf16, in: the numbers before; only the first C columns count
  ScaledView q;             // [R, C] fp8 with any scaling, in: the same numbers quantized
  TensorView totals;        // [QuantizationTotals::kCount] fp32, out: a QuantizationTotals
  bool accumulate = false;  // to what totals holds of other parts of a tensor, whose largest scale is kept
};
PARKA_OP(quantization_statistics, QuantizationStatistics);
int64_t workspace_of(const QuantizationStatistics& a);

// An element is saturated if its magnitude divided by its scale exceeds this: the midpoint between the largest
// number of the format and what would be the next one.
float saturation_threshold(DType format);

// The distribution of exponents and the range of amax over the groups of a moment with range expansion.
struct MomentStatistics {
  MomentView moment;  // fp8 with exponents, in
  TensorView counts;  // [256] int32, out: number of groups with each exponent (k = exponent / 16); groups of zeros
                      // do not count
  TensorView amax;    // [2] fp32, out: smallest and largest amax of those groups; infinity and 0 if there are none
};
PARKA_OP(moment_statistics, MomentStatistics);
inline constexpr int64_t kNumMomentExponents = 256;

}  // namespace parka
