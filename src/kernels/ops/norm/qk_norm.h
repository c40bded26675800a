#pragma once
#include <cstdint>

#include "core/tensor.h"
#include "kernels/op/op.h"

namespace parka {

enum class QkNormKind : uint8_t {
  kNone,
  kPerHead,  // as Qwen3: each head is normalised on its own, all query heads by one weight and all key heads by one
  kFull,     // as OLMo 2: the queries of a row together, and its keys together
};

// RMSNorm of queries and keys, and their rotation (ops/attention/rope.h) in the same pass. A group is one head of D
// columns (kPerHead), or all H D columns of the queries or all Hkv D of the keys (kFull). For each group x:
//   y = x * rstd * w,   rstd = 1 / sqrt(mean(x^2) + eps),   w = weight + weight_offset
// and the heads of y are rotated in fp32 like in rope_forward. Values are copied.
struct QkNormRopeForward {
  QkNormKind kind;      // not kNone
  ScaledView x;         // [T, (H + 2 * Hkv) * D] fp32, bf16 or kGroup fp8, in: as RopeForward's qkv
  TensorView q_weight;  // [D], or [H * D] with kFull, fp32 or bf16, in
  TensorView k_weight;  // [D], or [Hkv * D] with kFull, as q_weight, in
  TensorView cos_sin;   // [S, D] fp32, in: as RopeForward's
  int64_t num_heads;
  int64_t num_kv_heads;
  float eps;
  // kGroup fp8, as x, out: x as saved for backward. If given, x is plain, and all else is made of the decoded saved
  // values, so that forward and backward use the same numbers. Empty: not wanted.
  ScaledView saved;
  TensorView out;           // as x, fp32 or bf16, out; may be x
  TensorView rstd;          // [T, groups] fp32, out: of the queries' groups, then of the keys'
  float weight_offset = 0;  // of both weights, added in fp32: 1 where they are kept as what they differ from 1 by
};
PARKA_OP(qk_norm_rope_forward, QkNormRopeForward);

// Groups of a row: H + Hkv, or 2 with kFull.
int64_t qk_norm_groups(QkNormKind kind, int64_t num_heads, int64_t num_kv_heads);

// Backward of the norm alone: attention_backward has rotated the gradients back. For each group, in place in the
// gradient of y, and added up for the weights:
//   d_x = rstd * (g - xhat * mean(g * xhat)),   g = d_y * w,   xhat = x * rstd
//   d_weight += sum d_y * xhat, over rows, and with kPerHead over heads
struct QkNormBackward {
  QkNormKind kind;      // not kNone
  ScaledView x;         // as in forward, in: what forward read, or what it saved
  TensorView rstd;      // [T, groups] fp32, in
  TensorView q_weight;  // as in forward, in
  TensorView k_weight;  // as in forward, in
  TensorView d_qkv;     // as x, fp32 or bf16, in/out; the gradient of values stays as it is
  // The shapes are those of q_weight and k_weight; fp32 or bf16, in/out; empty: not wanted.
  TensorView d_q_weight = {};
  TensorView d_k_weight = {};
  int64_t num_heads;
  int64_t num_kv_heads;
  TensorView d_qkv_amax =
      {};  // [1] fp32, out: max |d_qkv| as stored, values included, for quantize; empty: not wanted
  float weight_offset = 0;  // as in forward
};
// Deterministic: equal input gives equal bits.
PARKA_OP(qk_norm_backward, QkNormBackward);
int64_t workspace_of(const QkNormBackward& a);

}  // namespace parka
