#include "kernels/ops/attention/context_heads.h"

#include "kernels/op/check.h"
#include "kernels/op/cost.h"
#include "kernels/op/dispatch.h"

namespace parka {
namespace {

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
