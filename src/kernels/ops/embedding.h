#pragma once
#include <cstdint>
#include <vector>

#include "core/tensor.h"

namespace parka {
class Device;

// out[t,c] = table[ids[t],c]
struct EmbeddingForward {
  TensorView ids;    // [T]    int32, in; each in [0, V)
  TensorView table;  // [V, C] fp32 or bf16, in
  TensorView out;    // [T, C] as table, out
};
// Throws Error(kBadInput) on an id outside the table (CPU; the loader has checked ids before a GPU sees them).
void embedding_forward(Device& device, const EmbeddingForward& a);

// d_table[v,c] += sum over t with ids[t] == v of d_out[t,c]
// The rows of a token are summed in fp32 in pieces of kEmbeddingPiece rows, each in the order of t; then the pieces
// in order; then the whole is added once. So a frequent token's many rows can be summed by many at a time.
inline constexpr int64_t kEmbeddingPiece = 64;
struct EmbeddingBackward {
  TensorView ids;      // [T]    int32, in
  TensorView order;    // [T]    int32, in: the rows in order of (ids[t], t), from embedding_order
  TensorView d_out;    // [T, C] fp32 or bf16, in
  TensorView d_table;  // [V, C] fp32 or bf16, in/out
};
void embedding_backward(Device& device, const EmbeddingBackward& a);

// The rows 0 .. T - 1 in order of (ids[t], t), in host memory; those with an id outside the vocabulary last.
std::vector<int32_t> embedding_order(const int32_t* ids, int64_t T, int64_t vocab_size);

}  // namespace parka
