#pragma once
#include <cstdint>

#include "core/tensor.h"
#include "kernels/op/op.h"

namespace parka {

// The widest heads that GPUs take: D of AttentionForward, AttentionBackward and AttentionDecode. CPUs take all.
constexpr int64_t kMaxGpuHeadDim = 512;

// Softmax attention within each sequence, with grouped-query heads: query head h uses key/value head h / (H / Hkv).
// q, k and v are read directly from the fused QKV buffer (see RopeForward). T = B * S.
//   p[i,j] = exp(scale * q_i . k_j - lse_i) for f_i <= j <= i;  out_i = sum_j p[i,j] v_j
// where f is 0, or first_key: then documents in one sequence do not attend to each other, and a sliding window
// ends. This is causal attention; without `causal` the sum is over all keys of the sequence, 0 <= j < S.
struct AttentionForward {
  TensorView qkv;           // [T, (H + 2 * Hkv) * D] fp32 or bf16, in
  TensorView out;           // [T, H * D] as qkv, out
  TensorView lse;           // [B, H, S] fp32, out: natural log of the sum of exp(scale * q . k)
  int64_t sequence_length;  // S; T is a multiple of it
  int64_t num_heads;
  int64_t num_kv_heads;
  float scale;
  TensorView out_amax = {};  // [1] fp32, out: max |out| as stored, for quantize; empty: not wanted
  // [T] int32, in: the first position in its sequence that each row attends to, from 0 to its own, and not less
  // than that of the previous row in the sequence. GPUs do not check that and give wrong results. Empty: 0.
  TensorView first_key = {};
  // The most keys that first_key leaves to a row, its own included: what the op's cost counts. 0: it does not say.
  int64_t window = 0;
  bool causal = true;  // false: rows attend to later ones, too; there is no first_key then
};
PARKA_OP(attention_forward, AttentionForward);
int64_t workspace_of(const AttentionForward& a);

//   d_p[i,j] = d_out_i . v_j for the keys j that i attends to;  d_s = p * (d_p - delta_i) with delta_i = d_out_i .
//   out_i d_q_i = scale * sum_j d_s[i,j] k_j;  d_k_j = scale * sum_i d_s[i,j] q_i;  d_v_j = sum_i p[i,j] d_out_i
struct AttentionBackward {
  TensorView qkv;    // [T, (H + 2 * Hkv) * D] fp32 or bf16, in
  TensorView out;    // [T, H * D] as qkv, in
  TensorView d_out;  // [T, H * D] as qkv, in
  TensorView lse;    // [B, H, S] fp32, in
  TensorView d_qkv;  // [T, (H + 2 * Hkv) * D] as qkv, out; every element is written
  int64_t sequence_length;
  int64_t num_heads;
  int64_t num_kv_heads;
  float scale;
  TensorView first_key = {};  // as in AttentionForward
  // [S, D] fp32, in: from rope_table. d_q and d_k are then the gradients before rope_forward: each pair is rotated
  // back by the angle of its position, before anything is rounded. D is even. Empty: no rotation.
  TensorView cos_sin = {};
  TensorView d_qkv_amax = {};  // [1] fp32, out: max |d_qkv| as stored, for quantize; empty: not wanted
  // [bytes] u8, scratch memory in which a GPU may keep d_s of some heads at a time
  // (cuda::attention_backward_scratch_bytes). Too little: d_s is computed for d_k and for d_q.
  TensorView scratch = {};
  int64_t window = 0;  // as in AttentionForward
  bool causal = true;  // as in AttentionForward
};
// Deterministic: equal input gives equal bits, with scratch and without.
PARKA_OP(attention_backward, AttentionBackward);
int64_t workspace_of(const AttentionBackward& a);

// Sums of attention_backward over rows and query heads. The gradients of a row's scores add up to
// zero if `out` is what forward has computed, because adding a number to all scores of a row changes nothing. A
// sum that is not zero pushes queries along the mean of the keys, which no loss corrects. For one row and head:
//   sum = sum_j d_s[i,j];  magnitude = sum_j |d_s[i,j]|;  score = sum_j p[i,j] scale q_i . k_j
struct AttentionTotals {
  float rows;           // rows of query heads that are finite; only these count below
  float not_finite;     // the others
  float sum_norm;       // square root of the sum of sum^2
  float norm;           // square root of the sum of magnitude^2
  float delta_norm;     // square root of the sum of (d_out out)^2 over all products that delta is the sum of
  float score_norm;     // square root of the sum of score^2
  float largest_score;  // the largest magnitude of a score

  static constexpr int64_t kCount = 7;  // of these numbers
};
static_assert(sizeof(AttentionTotals) == AttentionTotals::kCount * sizeof(float));

struct AttentionStatistics {
  TensorView qkv, out, d_out, lse;  // as in AttentionBackward, in
  TensorView totals;                // [AttentionTotals::kCount] fp32, out: an AttentionTotals
  int64_t rows;                     // the first ones of T count
  int64_t sequence_length;
  int64_t num_heads;
  int64_t num_kv_heads;
  float scale;
  TensorView first_key = {};  // as in AttentionForward
  int64_t window = 0;         // as in AttentionForward
  bool causal = true;         // as in AttentionForward
};
PARKA_OP(attention_statistics, AttentionStatistics);
int64_t workspace_of(const AttentionStatistics& a);

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

// The two layouts between which ranks that share sequences exchange attention's tensors, so that each attends with
// some of the heads to whole sequences (DeepSpeed-Ulysses, Jacobs et al. 2023, arXiv 2309.14509, section 3). A rank
// has a slice of L tokens of each of B sequences, with all heads: [B * L, (H + 2 Hkv) * D], query heads, key heads,
// value heads, or query heads alone where Hkv is 0. It exchanges [B, C, L, w] with C ranks, w a C-th of the
// columns: part p has query heads [p H / C, (p + 1) H / C), then key heads [p Hkv / C, (p + 1) Hkv / C), then value
// heads likewise, each in their order. C divides H and Hkv, so each query head stays with its key head.

// parts[b, p, l] = the heads of part p in x[b * L + l].
struct SplitHeads {
  TensorView x;      // [B * L, (H + 2 * Hkv) * D] fp32 or bf16, in
  TensorView parts;  // [B, C, L, (H + 2 * Hkv) * D / C] as x, out
  int64_t num_heads;
  int64_t num_kv_heads;  // 0: x has query heads alone
};
PARKA_OP(split_heads, SplitHeads);

// The inverse: x[b * L + l] = the heads of all parts[b, p, l].
struct MergeHeads {
  TensorView parts;  // [B, C, L, (H + 2 * Hkv) * D / C] fp32 or bf16, in
  TensorView x;      // [B * L, (H + 2 * Hkv) * D] as parts, out
  int64_t num_heads;
  int64_t num_kv_heads;  // as in SplitHeads
};
PARKA_OP(merge_heads, MergeHeads);

}  // namespace parka
