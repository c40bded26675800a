#pragma once
#include <vector>

#include "core/tensor.h"

namespace parka {
class Device;

// Rotary position embedding (Su et al. 2021), half-split layout as in NeoX, OLMo and Llama. The pair
// (x[i], x[i + D/2]) of every query and key head is turned by the angle position * theta^(-2i/D):
//   y[i]       = x[i] * cos - x[i + D/2] * sin
//   y[i + D/2] = x[i + D/2] * cos + x[i] * sin
// In place in the fused QKV buffer; value heads are left alone. The position of row t is t mod S.
struct RopeForward {
  TensorView qkv;      // [T, (H + 2 * Hkv) * D] fp32 or bf16, in/out: H query heads, Hkv key heads, Hkv value heads
  TensorView cos_sin;  // [S, D] fp32, in: D/2 cosines, then D/2 sines, from rope_table
  int64_t num_heads;
  int64_t num_kv_heads;
  // kGroup fp8 [T, (H + 2 * Hkv) * D], out: the rotated q and k, and v, as saved for backward. When given, qkv
  // is overwritten with the decoded saved values, so that attention forward and backward see the same numbers.
  ScaledView saved;
};
// D is even. `saved` is quantized from the rotated fp32 values, so that each is rounded once.
void rope_forward(Device& device, const RopeForward& a);

// Turns the gradients of queries and keys back (angle negated), and quantizes the whole buffer. In place unless it
// is quantized: then what d_qkv holds afterwards is unspecified, which saves writing it.
struct RopeBackward {
  TensorView d_qkv;    // [T, (H + 2 * Hkv) * D] fp32 or bf16, in/out
  TensorView cos_sin;  // [S, D] fp32, in
  int64_t num_heads;
  int64_t num_kv_heads;
  ScaledView d_quantized;  // [T, ...] fp8, out; empty: not wanted
  ScaledView
      d_quantized_t;  // [..., T] fp8 transposed, out; empty: not wanted; shares a kTensor scale with d_quantized
};
// The quantized copies are made from the turned gradients rounded to the dtype of d_qkv.
void rope_backward(Device& device, const RopeBackward& a);

// The contents of cos_sin, [S, D] row by row. Angles, cosines and sines in double, rounded once to fp32. D is even.
std::vector<float> rope_table(int64_t sequence_length, int64_t head_dim, double theta);

}  // namespace parka
