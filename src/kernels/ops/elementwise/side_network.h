#pragma once
#include "core/tensor.h"
#include "kernels/op/op.h"

namespace parka {

// The weight that mixes two tensors: a learnt scalar itself, or the logistic function of it.
enum class MixWeight : uint8_t {
  kScalar,    // w = c
  kLogistic,  // w = 1 / (1 + exp(-c))
};

// out = (1 - w) x + w y,  y = residual + branch: computed in fp32 and rounded once. With w = 1 and finite x it is y
// itself, to the bit where there is no branch. The gate of a side layer in Quantized Side Tuning
// (arXiv 2401.07159), and its sum with the frozen model's output.
struct MixForward {
  MixWeight kind;
  TensorView c;                // [1] fp32 or bf16, in
  TensorView x;                // [T, C] as c, in
  TensorView residual;         // [T, C] as c, in
  TensorView branch = {};      // [T, C] as c, in; empty: y = residual
  TensorView out;              // [T, C] as c, out; may be the memory of residual
  TensorView difference = {};  // [T, C] as c, out: y - x, for backward; may be the memory of x; empty: not wanted
};
PARKA_OP(mix_forward, MixForward);

// d_x = (1 - w) d_out,   d_y = w d_out,   d_c += w'(c) sum over all elements of d_out * difference
// The sum is fp32, in an order that depends on the shape alone, and is rounded once.
struct MixBackward {
  MixWeight kind;
  TensorView c;           // [1] fp32 or bf16, in: as forward read it
  TensorView difference;  // [T, C] as c, in: what forward left
  TensorView d_out;       // [T, C] as c, in
  TensorView d_x = {};    // [T, C] as c, out; may be the memory of difference or d_out; empty: not wanted
  TensorView d_y = {};    // [T, C] as c, out; may be the memory of d_out; empty: not wanted
  TensorView d_c = {};    // [1] fp32 or bf16, in/out; empty: not wanted
};
PARKA_OP(mix_backward, MixBackward);
int64_t workspace_of(const MixBackward& a);

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
