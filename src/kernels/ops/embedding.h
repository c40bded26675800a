#pragma once
#include <cstdint>
#include <vector>
#include "kernels/op/op.h"

#include "core/tensor.h"

namespace parka {

// out[t,c] = table[ids[t],c]
struct EmbeddingForward {
  TensorView ids;    // [T]    int32, in; each in [0, V)
  TensorView table;  // [V, C] fp32 or bf16, in
  TensorView out;    // [T, C] as table, out
};
// Throws Error(kBadInput) on an id outside the table (CPU; the loader has checked ids before a GPU sees them).
PARKA_OP(embedding_forward, EmbeddingForward);

// What embedding_backward has to know of a row of d_out, to add the rows of each token in order.
struct alignas(16) TokenRow {  // read as one
  int32_t row;
  int32_t id;     // the token's
  int32_t rank;   // how many of the token's rows come before this one
  int32_t count;  // of the token's rows
};
inline constexpr int64_t kTokenRowInts = 4;  // in a tensor of them
static_assert(sizeof(TokenRow) == kTokenRowInts * sizeof(int32_t));

// The rows 0 .. T - 1 in order of (ids[t], t), in host memory; those with an id outside the vocabulary last, as if
// of one token.
std::vector<TokenRow> embedding_order(const int32_t* ids, int64_t T, int64_t vocab_size);

// d_table[v,c] += sum over the rows t of token v of d_out[t,c]
// The rows of a token are summed in fp32 in pieces of kEmbeddingPiece rows, each in the order of t; then the pieces
// in order; then the whole is added once. So a frequent token's many rows can be summed by many at a time.
inline constexpr int64_t kEmbeddingPiece = 64;
struct EmbeddingBackward {
  TensorView order;    // [T, kTokenRowInts] int32, in: what embedding_order makes of the ids
  TensorView d_out;    // [T, C] fp32 or bf16, in
  TensorView d_table;  // [V, C] fp32 or bf16, in/out

  const TokenRow* rows() const { return reinterpret_cast<const TokenRow*>(order.as<int32_t>()); }
};
// Throws Error(kBadInput) on an id outside the table (CPU).
PARKA_OP(embedding_backward, EmbeddingBackward);
int64_t workspace_of(const EmbeddingBackward& a);

}  // namespace parka
