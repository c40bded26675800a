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
  check_tensor("embedding_backward", "d_out", a.d_out, {T, C}, {DType::kF32, DType::kBF16});
  check_tensor("embedding_backward", "d_table", a.d_table, {V, C}, {DType::kF32, DType::kBF16});
  if (a.d_out.numel() == 0) return;
  PARKA_DISPATCH(embedding_backward, device, a);
}

}  // namespace parka
