#pragma once
#include "core/tensor.h"
#include "kernels/op/op.h"

namespace parka {

// Attention of new tokens to all earlier ones, whose keys and values are in a cache, so that generation computes
// each token once. Row t is the token at position[t] of the sequence in slot[t] of the cache:
//   cache  [B, L, 2 * Hkv * D]: key heads, then value heads, of B sequences of up to L tokens
// D is the head width of the fused QKV buffer, see RopeForward.

// cache[slot[t], position[t]] = keys and values of row t. No two rows may have the same slot and position.
struct CacheAppend {
  TensorView qkv;       // [T, (H + 2 * Hkv) * D] fp32 or bf16, in: rotated
  TensorView cache;     // as qkv, in/out
  TensorView slot;      // [T] int32, in; each in [0, B)
  TensorView position;  // [T] int32, in; each in [0, L)
  int64_t num_heads;
  int64_t num_kv_heads;
};
// Throws Error(kInternal) on a slot or position outside the cache (CPU; on a GPU it must not happen).
PARKA_OP(cache_append, CacheAppend);

// Query head h uses key/value head h / (H / Hkv).
//   p[t,j] = exp(scale * q_t . k_j) / sum over j of the same, for j <= position[t];  out_t = sum_j p[t,j] v_j
// With a window only position[t] - window < j counts, and no earlier key is read. k_j and v_j are cache[slot[t],
// j]. They include the row's own, so cache_append comes first.
struct AttentionDecode {
  TensorView qkv;       // [T, (H + 2 * Hkv) * D] fp32 or bf16, in; only the queries are read
  TensorView cache;     // as qkv, in
  TensorView slot;      // [T] int32, in
  TensorView position;  // [T] int32, in; each in [0, max_keys)
  TensorView out;       // [T, H * D] as qkv, out
  int64_t max_keys;     // up to L; decides how much work a GPU launches
  int64_t num_heads;
  int64_t num_kv_heads;
  float scale;
  TensorView out_amax = {};  // [1] fp32, out: max |out| as stored, for quantize; empty: not wanted
  int64_t window = 0;        // keys that a row attends to, its own included; 0: all
};
// The most keys of a row.
inline int64_t most_keys(const AttentionDecode& a) {
  return a.window > 0 && a.window < a.max_keys ? a.window : a.max_keys;
}
// The result of a row depends neither on the other rows nor on max_keys.
PARKA_OP(attention_decode, AttentionDecode);
int64_t workspace_of(const AttentionDecode& a);

}  // namespace parka
