#pragma once
#include <cstdint>
#include <vector>
#include "kernels/op/op.h"

#include "core/tensor.h"

namespace parka {

// The id of a row that an image feature has and not a token, as LLaVA has it: it is in no table. The embedding
// leaves such rows to scatter_rows, and their gradients to gather_rows.
inline constexpr int32_t kImageSlot = -200;

// out[t,c] = table[ids[t],c] * scale, rounded once; rows of image slots stay as they are
struct EmbeddingForward {
  TensorView ids;    // [T]    int32, in; each in [0, V) or kImageSlot
  TensorView table;  // [V, C] fp32 or bf16, in
  TensorView out;    // [T, C] as table, out
  float scale = 1;   // 1: the bits are copied
};
// Throws Error(kBadInput) on an id outside the table (CPU only; the loader has checked the ids that a GPU gets).
PARKA_OP(embedding_forward, EmbeddingForward);

// Describes a row of d_out to embedding_backward, which adds the rows of each token in order.
struct alignas(16) TokenRow {  // loaded at once
  int32_t row;
  int32_t id;     // of the token
  int32_t rank;   // number of the token's rows before this one
  int32_t count;  // number of the token's rows
};
inline constexpr int64_t kTokenRowInts = 4;  // of a TokenRow in an int32 tensor
static_assert(sizeof(TokenRow) == kTokenRowInts * sizeof(int32_t));

// The rows 0 .. T - 1 in the order of (ids[t], t), in host memory. Rows with an id outside the vocabulary come
// after them, as if they were of one token, and those of image slots last, as if they were of another.
std::vector<TokenRow> embedding_order(const int32_t* ids, int64_t T, int64_t vocab_size);

// d_table[v,c] += scale * (sum over the rows t of token v of d_out[t,c]), without the rows of image slots
// The rows of a token are summed in fp32 in pieces of kEmbeddingPiece rows, each piece in the order of t. Then the
// sums of the pieces are added in order, and the total, times the scale, is added to the table once. So many
// threads can share the rows of a frequent token.
inline constexpr int64_t kEmbeddingPiece = 64;
struct EmbeddingBackward {
  TensorView order;    // [T, kTokenRowInts] int32, in: from embedding_order
  TensorView d_out;    // [T, C] fp32 or bf16, in
  TensorView d_table;  // [V, C] fp32 or bf16, in/out
  float scale = 1;     // as in forward

  const TokenRow* rows() const { return reinterpret_cast<const TokenRow*>(order.as<int32_t>()); }
};
// Throws Error(kBadInput) on an id outside the table (CPU only).
PARKA_OP(embedding_backward, EmbeddingBackward);
int64_t workspace_of(const EmbeddingBackward& a);

// out[positions[n]] = x[n] for each n with a position that is not negative; other rows of `out` stay as they are.
// So image features enter the residual stream.
struct ScatterRows {
  TensorView positions;  // [N]    int32, in; different rows of out, or negative
  TensorView x;          // [N, C] fp32 or bf16, in
  TensorView out;        // [T, C] as x, in/out
};
// Throws Error(kBadInput) on a position outside of `out` or given twice (CPU only).
PARKA_OP(scatter_rows, ScatterRows);

// out[n] = x[positions[n]]; zeros where the position is negative. The gradient of scatter_rows by its x.
struct GatherRows {
  TensorView positions;  // [N]    int32, in; each below T
  TensorView x;          // [T, C] fp32 or bf16, in
  TensorView out;        // [N, C] as x, out
};
// Throws Error(kBadInput) on a position outside of `x` (CPU only).
PARKA_OP(gather_rows, GatherRows);

}  // namespace parka
