#include "model/op_workspace.h"

#include <algorithm>

#include "kernels/op/workspace.h"

namespace parka {

TensorId declare_op_workspace(const ModelConfig& model, const PrecisionConfig& precision, int64_t tokens,
                              const ParameterTable& table, MemoryPlan& plan, const CacheShape& cache) {
  int64_t pieces = 0;
  for (const ParameterInfo& parameter : table.all) pieces += cuda::sum_of_squares_pieces(parameter.numel());
  int64_t gemm_bytes = cuda::kGemmWorkspaceBytes;
  if (precision.gemm == GemmPrecision::kFp8Block) {
    for (const int index : table.linear_weights(table.block_unit(0))) {
      const int64_t rows = table.all[index].rows, cols = table.all[index].cols;
      gemm_bytes = std::max({gemm_bytes, cuda::block_scaled_gemm_workspace_bytes(tokens, rows, cols),
                             cuda::block_scaled_gemm_workspace_bytes(tokens, cols, rows),
                             cuda::block_scaled_gemm_workspace_bytes(rows, cols, tokens)});
    }
  }
  const int64_t bytes = std::max(
      {gemm_bytes, cuda::norm_backward_workspace_bytes(model.d_model),
       cuda::embedding_backward_workspace_bytes(tokens, model.d_model),
       cuda::attention_backward_workspace_bytes(tokens, model.num_heads),
       cuda::attention_decode_workspace_bytes(cache.num_slots, model.num_heads, model.head_dim(), cache.max_length),
       cuda::sum_of_squares_workspace_bytes(pieces, static_cast<int64_t>(table.all.size()))});
  return plan.add("workspace of GPU kernels", "op_workspace", DType::kU8, {bytes});
}

}  // namespace parka
