#include "kernels/ops/attention/attention_decode.h"

#include <string_view>

#include "kernels/op/check.h"
#include "kernels/op/cost.h"
#include "kernels/op/dispatch.h"
#include "kernels/op/workspace.h"

namespace parka {
namespace {

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

}  // namespace

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

}  // namespace parka
