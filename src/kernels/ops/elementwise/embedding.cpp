#include "kernels/ops/elementwise/embedding.h"

#include "kernels/op/define.h"
#include "kernels/op/workspace.h"

namespace parka {

void embedding_forward(Device& device, const EmbeddingForward& a) {
  const int64_t T = a.ids.dim[0], V = a.table.dim[0], C = a.table.dim[1];
  check_tensor("embedding_forward", "ids", a.ids, {T}, {DType::kI32});
  check_tensor("embedding_forward", "table", a.table, {V, C}, {DType::kF32, DType::kBF16});
  check_tensor("embedding_forward", "out", a.out, {T, C}, {a.table.dtype});
  if (a.out.numel() == 0) return;
  PARKA_DISPATCH(embedding_forward, device, a);
}

void embedding_backward(Device& device, const EmbeddingBackward& a) {
  const int64_t T = a.d_out.dim[0], V = a.d_table.dim[0], C = a.d_table.dim[1];
  check_tensor("embedding_backward", "order", a.order, {T, kTokenRowInts}, {DType::kI32});
  PARKA_REQUIRE(reinterpret_cast<uintptr_t>(a.order.data) % alignof(TokenRow) == 0);
  check_tensor("embedding_backward", "d_out", a.d_out, {T, C}, {DType::kF32, DType::kBF16});
  check_tensor("embedding_backward", "d_table", a.d_table, {V, C}, {DType::kF32, DType::kBF16});
  if (a.d_out.numel() == 0) return;
  PARKA_DISPATCH(embedding_backward, device, a);
}

void scatter_rows(Device& device, const ScatterRows& a) {
  const int64_t N = a.x.dim[0], C = a.x.dim[1], T = a.out.dim[0];
  check_tensor("scatter_rows", "positions", a.positions, {N}, {DType::kI32});
  check_tensor("scatter_rows", "x", a.x, {N, C}, {DType::kF32, DType::kBF16});
  check_tensor("scatter_rows", "out", a.out, {T, C}, {a.x.dtype});
  if (a.x.numel() == 0) return;
  PARKA_DISPATCH(scatter_rows, device, a);
}

void gather_rows(Device& device, const GatherRows& a) {
  const int64_t N = a.out.dim[0], C = a.out.dim[1], T = a.x.dim[0];
  check_tensor("gather_rows", "positions", a.positions, {N}, {DType::kI32});
  check_tensor("gather_rows", "x", a.x, {T, C}, {DType::kF32, DType::kBF16});
  check_tensor("gather_rows", "out", a.out, {N, C}, {a.x.dtype});
  if (a.out.numel() == 0) return;
  PARKA_DISPATCH(gather_rows, device, a);
}

std::vector<TokenRow> embedding_order(const int32_t* ids, int64_t T, int64_t vocab_size) {
  PARKA_REQUIRE(T <= INT32_MAX);
  const int64_t unknown = vocab_size, slots = vocab_size + 1, buckets = vocab_size + 2;
  const auto bucket = [&](int64_t t) {
    if (ids[t] >= 0 && ids[t] < vocab_size) return int64_t{ids[t]};
    return ids[t] == kImageSlot ? slots : unknown;
  };
  std::vector<int32_t> begin(static_cast<size_t>(buckets + 1));  // where each bucket begins; then the end
  for (int64_t t = 0; t < T; ++t) ++begin[bucket(t) + 1];
  for (int64_t v = 0; v < buckets; ++v) begin[v + 1] += begin[v];
  std::vector<int32_t> taken(static_cast<size_t>(buckets));  // rows that a bucket has so far
  std::vector<TokenRow> order(static_cast<size_t>(T));
  for (int64_t t = 0; t < T; ++t) {
    const int64_t v = bucket(t);
    const int32_t rank = taken[v]++;
    order[begin[v] + rank] = {static_cast<int32_t>(t), ids[t], rank, begin[v + 1] - begin[v]};
  }
  return order;
}

OpCost cost_of(const EmbeddingForward& a) { return moved(bytes_of(a.ids) + 2 * bytes_of(a.out), a.out); }

// Every row of d_out may have an id of its own, whose row of d_table is then read and written.
OpCost cost_of(const EmbeddingBackward& a) {
  const double rows = static_cast<double>(std::min(a.d_out.dim[0], a.d_table.dim[0]));
  const double row_bytes = static_cast<double>(a.d_table.dim[1] * size_of(a.d_table.dtype));
  return moved(all_bytes(a.order, a.d_out) + 2 * rows * row_bytes, a.d_out);
}
int64_t workspace_of(const EmbeddingBackward& a) {
  return cuda::embedding_backward_workspace_bytes(a.d_out.dim[0], a.d_out.dim[1]);
}

OpCost cost_of(const ScatterRows& a) { return moved(bytes_of(a.positions) + 2 * bytes_of(a.x), a.x); }

OpCost cost_of(const GatherRows& a) { return moved(bytes_of(a.positions) + 2 * bytes_of(a.out), a.out); }

}  // namespace parka
