#include "kernels/ops/attention/attention.h"

#include <algorithm>
#include <string_view>

#include <fmt/format.h>

#include "kernels/op/define.h"
#include "kernels/op/workspace.h"

namespace parka {
namespace {

// Checks that forward and backward have in common.
template <typename Args>
void check_attention(std::string_view op, const Args& a) {
  const int64_t T = a.qkv.dim[0], width = a.qkv.dim[1], S = a.sequence_length;
  const int64_t H = a.num_heads, Hkv = a.num_kv_heads;
  if (H <= 0 || Hkv <= 0 || H % Hkv != 0) {
    throw_internal("{}: {} query heads do not share {} key/value heads evenly", op, H, Hkv);
  }
  check_tensor(op, "qkv", a.qkv, {T, width}, {DType::kF32, DType::kBF16});
  if (width % (H + 2 * Hkv) != 0) {
    throw_internal("{}: qkv is {}, wanted a multiple of {} + 2 * {} columns", op, describe(a.qkv), H, Hkv);
  }
  if (S <= 0 || T % S != 0) {
    throw_internal("{}: qkv is {}, wanted whole sequences of {} rows", op, describe(a.qkv), S);
  }
  check_tensor(op, "out", a.out, {T, width / (H + 2 * Hkv) * H}, {a.qkv.dtype});
  check_tensor(op, "lse", a.lse, {T / S, H, S}, {DType::kF32});
  if (!a.first_key.empty()) check_tensor(op, "first_key", a.first_key, {T}, {DType::kI32});
  if (a.window < 0 || (a.window > 0 && a.first_key.empty())) {
    throw_internal("{}: a window of {} keys {}", op, a.window, a.window < 0 ? "is none" : "without first_key");
  }
  if (!a.causal && !a.first_key.empty()) throw_internal("{}: first_key is of causal attention only", op);
}

template <typename Args>
bool has_window(const Args& a) {
  return a.window > 0 && a.window < a.sequence_length;
}

// Kernels of one shape take less time with a window, and more over all keys.
template <typename Args>
std::string shape_with_mask(const Args& a) {
  if (!a.causal) return shape_of(a.out) + ", not causal";
  return has_window(a) ? fmt::format("{}, window {}", shape_of(a.out), a.window) : shape_of(a.out);
}

// FLOP of q k^T and p v over all scores, or the causal half, of which a window leaves a band.
template <typename Args>
double attention_flop(const Args& a) {
  const double S = static_cast<double>(a.sequence_length), elements = static_cast<double>(a.out.numel());
  if (!a.causal) return 4.0 * elements * S;
  if (!has_window(a)) return 2.0 * elements * S;
  const double W = static_cast<double>(a.window);
  return 4.0 * elements * (W - W * W / (2.0 * S));
}

// Checks that both ops have in common.
template <typename Args>
void check_cached(std::string_view op, const Args& a) {
  const int64_t T = a.qkv.dim[0], width = a.qkv.dim[1], H = a.num_heads, Hkv = a.num_kv_heads;
  if (H <= 0 || Hkv <= 0 || H % Hkv != 0) {
    throw_internal("{}: {} query heads do not share {} key/value heads evenly", op, H, Hkv);
  }
  check_tensor(op, "qkv", a.qkv, {T, width}, {DType::kF32, DType::kBF16});
  if (width % (H + 2 * Hkv) != 0) {
    throw_internal("{}: qkv is {}, wanted a multiple of {} + 2 * {} columns", op, describe(a.qkv), H, Hkv);
  }
  check_tensor(op, "cache", a.cache, {a.cache.dim[0], a.cache.dim[1], width / (H + 2 * Hkv) * 2 * Hkv},
               {a.qkv.dtype});
  check_tensor(op, "slot", a.slot, {T}, {DType::kI32});
  check_tensor(op, "position", a.position, {T}, {DType::kI32});
}

void check_heads(const char* op, const TensorView& x, const TensorView& parts, int64_t num_heads,
                 int64_t num_kv_heads) {
  const int64_t B = parts.dim[0], C = parts.dim[1], L = parts.dim[2], w = parts.dim[3];
  check_tensor(op, "parts", parts, {B, C, L, w}, {DType::kF32, DType::kBF16});
  check_tensor(op, "x", x, {B * L, C * w}, {parts.dtype});
  const int64_t heads = num_heads + 2 * num_kv_heads;
  const bool divide = C > 0 && num_heads > 0 && num_kv_heads >= 0 && num_heads % C == 0 && num_kv_heads % C == 0;
  if (divide && C * w % heads == 0) return;
  throw_internal("{}: {} columns of {} query heads and {} key/value heads do not divide into {} parts", op, C * w,
                 num_heads, num_kv_heads, C);
}

}  // namespace

void attention_forward(Device& device, const AttentionForward& a) {
  check_attention("attention_forward", a);
  if (!a.out_amax.empty()) check_tensor("attention_forward", "out_amax", a.out_amax, {1}, {DType::kF32});
  if (a.qkv.numel() == 0) return;
  PARKA_DISPATCH(attention_forward, device, a);
}

void attention_backward(Device& device, const AttentionBackward& a) {
  check_attention("attention_backward", a);
  check_tensor("attention_backward", "d_out", a.d_out, {a.out.dim[0], a.out.dim[1]}, {a.qkv.dtype});
  check_tensor("attention_backward", "d_qkv", a.d_qkv, {a.qkv.dim[0], a.qkv.dim[1]}, {a.qkv.dtype});
  if (!a.cos_sin.empty()) {
    const int64_t D = a.qkv.dim[1] / (a.num_heads + 2 * a.num_kv_heads);
    check_tensor("attention_backward", "cos_sin", a.cos_sin, {a.sequence_length, D}, {DType::kF32});
    if (D % 2 != 0) throw_internal("attention_backward: heads of {} columns have no pairs to rotate back", D);
  }
  if (!a.d_qkv_amax.empty()) check_tensor("attention_backward", "d_qkv_amax", a.d_qkv_amax, {1}, {DType::kF32});
  if (!a.scratch.empty()) {
    check_tensor("attention_backward", "scratch", a.scratch, {a.scratch.dim[0]}, {DType::kU8});
  }
  if (a.qkv.numel() == 0) return;
  PARKA_DISPATCH(attention_backward, device, a);
}

// No early return for no rows: all totals are 0 then, and the caller reads them.
void attention_statistics(Device& device, const AttentionStatistics& a) {
  check_attention("attention_statistics", a);
  check_tensor("attention_statistics", "d_out", a.d_out, {a.out.dim[0], a.out.dim[1]}, {a.qkv.dtype});
  check_tensor("attention_statistics", "totals", a.totals, {AttentionTotals::kCount}, {DType::kF32});
  if (a.rows < 0 || a.rows > a.qkv.dim[0]) {
    throw_internal("attention_statistics: {} rows of qkv, which is {}", a.rows, describe(a.qkv));
  }
  PARKA_DISPATCH(attention_statistics, device, a);
}

// Backward counts 2.5 times forward, for its five products.
OpCost cost_of(const AttentionForward& a) {
  return {all_bytes(a.qkv, a.out, a.lse), attention_flop(a), shape_with_mask(a), Products::kAttentionForward};
}
int64_t workspace_of(const AttentionForward&) { return cuda::kAttentionForwardWorkspaceBytes; }

OpCost cost_of(const AttentionBackward& a) {
  return {all_bytes(a.qkv, a.out, a.d_out, a.lse, a.cos_sin, a.d_qkv), 2.5 * attention_flop(a), shape_with_mask(a),
          Products::kAttentionBackward};
}
int64_t workspace_of(const AttentionBackward& a) {
  return cuda::attention_backward_workspace_bytes(a.qkv.dim[0], a.num_heads);
}

OpCost cost_of(const AttentionStatistics& a) {
  const double share = static_cast<double>(a.rows) / static_cast<double>(std::max<int64_t>(a.qkv.dim[0], 1));
  return moved(share * all_bytes(a.qkv, a.out, a.d_out, a.lse) + all_bytes(a.totals), a.out);
}
int64_t workspace_of(const AttentionStatistics&) { return cuda::kAttentionStatisticsWorkspaceBytes; }

void cache_append(Device& device, const CacheAppend& a) {
  check_cached("cache_append", a);
  if (a.qkv.numel() == 0) return;
  PARKA_DISPATCH(cache_append, device, a);
}

void attention_decode(Device& device, const AttentionDecode& a) {
  check_cached("attention_decode", a);
  const int64_t T = a.qkv.dim[0], D = a.qkv.dim[1] / (a.num_heads + 2 * a.num_kv_heads);
  check_tensor("attention_decode", "out", a.out, {T, a.num_heads * D}, {a.qkv.dtype});
  if (!a.out_amax.empty()) check_tensor("attention_decode", "out_amax", a.out_amax, {1}, {DType::kF32});
  if (a.qkv.numel() == 0) return;
  if (a.max_keys < 1 || a.max_keys > a.cache.dim[1]) {
    throw_internal("attention_decode: max_keys is {}, and the cache is {}", a.max_keys, describe(a.cache));
  }
  if (a.window < 0) throw_internal("attention_decode: a window of {} keys is none", a.window);
  PARKA_DISPATCH(attention_decode, device, a);
}

OpCost cost_of(const CacheAppend& a) {
  const double heads = static_cast<double>(a.num_heads + 2 * a.num_kv_heads);
  return moved(2 * bytes_of(a.qkv) * 2.0 * static_cast<double>(a.num_kv_heads) / heads, a.qkv);
}

// Every row counts with the most keys: positions are on the device.
OpCost cost_of(const AttentionDecode& a) {
  const double keys = static_cast<double>(most_keys(a));
  const double key_bytes = static_cast<double>(a.cache.dim[2] * size_of(a.cache.dtype));
  return {2 * bytes_of(a.out) + static_cast<double>(a.qkv.dim[0]) * keys * key_bytes,
          4.0 * static_cast<double>(a.out.numel()) * keys, shape_of(a.out)};
}
int64_t workspace_of(const AttentionDecode& a) {
  const int64_t D = a.qkv.dim[1] / (a.num_heads + 2 * a.num_kv_heads);
  return cuda::attention_decode_workspace_bytes(a.qkv.dim[0], a.num_heads, D, most_keys(a));
}

void split_heads(Device& device, const SplitHeads& a) {
  check_heads("split_heads", a.x, a.parts, a.num_heads, a.num_kv_heads);
  if (a.x.numel() == 0) return;
  PARKA_DISPATCH(split_heads, device, a);
}

void merge_heads(Device& device, const MergeHeads& a) {
  check_heads("merge_heads", a.x, a.parts, a.num_heads, a.num_kv_heads);
  if (a.x.numel() == 0) return;
  PARKA_DISPATCH(merge_heads, device, a);
}

OpCost cost_of(const SplitHeads& a) { return moved(all_bytes(a.x, a.parts), a.x); }

OpCost cost_of(const MergeHeads& a) { return moved(all_bytes(a.x, a.parts), a.x); }

}  // namespace parka
