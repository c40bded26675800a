#pragma once
#include <cstdint>

#include "core/tensor.h"
#include "kernels/op/op.h"

// The two layouts between which ranks that share sequences exchange attention's tensors, so that each attends with
// some of the heads to whole sequences (DeepSpeed-Ulysses, Jacobs et al. 2023, arXiv 2309.14509, section 3). A rank
// has a slice of L tokens of each of B sequences, with all heads: [B * L, (H + 2 Hkv) * D], query heads, key heads,
// value heads, or query heads alone where Hkv is 0. It exchanges [B, C, L, w] with C ranks, w a C-th of the
// columns: part p has query heads [p H / C, (p + 1) H / C), then key heads [p Hkv / C, (p + 1) Hkv / C), then value
// heads likewise, each in their order. C divides H and Hkv, so each query head stays with its key head.
namespace parka {

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
