#pragma once
#include <cstdint>
#include <vector>
#include "kernels/op/op.h"

#include "core/tensor.h"

namespace parka {

// out[t,c] = table[ids[t],c] * scale, rounded once
struct EmbeddingForward {
  TensorView ids;    // [T]    int32, in; each in [0, V)
  TensorView table;  // [V, C] fp32 or bf16, in
  TensorView out;    // [T, C] as table, out
  float scale = 1;   // 1: the bits are copied
};
// Throws Error(kBadInput) on an id outside the table (CPU only; the loader has checked the ids that a GPU gets).
PARKA_OP(embedding_forward, EmbeddingForward);

// What embedding_backward needs to know about a row of d_out, to add the rows of each token in order.
struct alignas(16) TokenRow {  // loaded at once
  int32_t row;
  int32_t id;     // of the token
  int32_t rank;   // number of the token's rows before this one
  int32_t count;  // number of the token's rows
};
inline constexpr int64_t kTokenRowInts = 4;  // of a TokenRow in an int32 tensor
static_assert(sizeof(TokenRow) == kTokenRowInts * sizeof(int32_t));

// The rows 0 .. T - 1 in the order of (ids[t], t), in host memory. Rows with an id outside the vocabulary come
// last, as if they were of one token.
std::vector<TokenRow> embedding_order(const int32_t* ids, int64_t T, int64_t vocab_size);

// d_table[v,c] += scale * (sum over the rows t of token v of d_out[t,c])
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

}  // namespace parka
