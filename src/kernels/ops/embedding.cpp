#include "kernels/ops/embedding.h"

#include "kernels/backend.h"
#include "kernels/check.h"
#include "kernels/cpu/embedding.h"
#include "kernels/cuda/embedding.h"

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
  const int64_t T = a.ids.dim[0], V = a.d_table.dim[0], C = a.d_table.dim[1];
  check_tensor("embedding_backward", "ids", a.ids, {T}, {DType::kI32});
  check_tensor("embedding_backward", "order", a.order, {T}, {DType::kI32});
  check_tensor("embedding_backward", "d_out", a.d_out, {T, C}, {DType::kF32, DType::kBF16});
  check_tensor("embedding_backward", "d_table", a.d_table, {V, C}, {DType::kF32, DType::kBF16});
  if (a.d_out.numel() == 0) return;
  PARKA_DISPATCH(embedding_backward, device, a);
}

std::vector<int32_t> embedding_order(const int32_t* ids, int64_t T, int64_t vocab_size) {
  PARKA_REQUIRE(T <= INT32_MAX);
  const auto bucket = [&](int64_t t) { return ids[t] >= 0 && ids[t] < vocab_size ? ids[t] : vocab_size; };
  std::vector<int64_t> next(static_cast<size_t>(vocab_size + 2));  // where the next row of each bucket goes
  for (int64_t t = 0; t < T; ++t) ++next[bucket(t) + 1];
  for (int64_t v = 0; v < vocab_size; ++v) next[v + 1] += next[v];
  std::vector<int32_t> order(static_cast<size_t>(T));
  for (int64_t t = 0; t < T; ++t) order[next[bucket(t)]++] = static_cast<int32_t>(t);
  return order;
}

}  // namespace parka
