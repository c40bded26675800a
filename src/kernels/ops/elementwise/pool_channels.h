#pragma once
#include "core/tensor.h"
#include "kernels/op/op.h"

namespace parka {

enum class PoolKind : uint8_t { kMax, kAverage };

// out[t, i] = the largest of x[t, i * group ... (i + 1) * group - 1], or their mean: summed in fp32 from the first
// on, and rounded once. The last group may be short. Columns of out behind the groups are zeros. A NaN in a group
// makes it NaN.
struct PoolChannels {
  PoolKind kind;
  int64_t group;   // columns that become one, at least 1
  TensorView x;    // [T, C] fp32 or bf16, in
  TensorView out;  // [T, s] as x, out; s is at least C / group, rounded up
};
PARKA_OP(pool_channels, PoolChannels);

}  // namespace parka
