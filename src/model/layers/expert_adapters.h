#pragma once
#include <string>
#include <vector>

#include "core/memory/memory_plan.h"
#include "core/tensor.h"
#include "model/buffer_scope.h"
#include "model/parameter_table.h"

namespace parka {

struct StepContext;

// Adapters of a matrix of each expert of a block, often none: a row of expert e gets + scale * B_e (A_e x) in the
// columns of out that belong to them. Rows are sorted by expert, and A and B of all experts lie one below the
// other, as GroupedGemm wants them. In the compute format.
class ExpertAdapters {
 public:
  ExpertAdapters() = default;
  ExpertAdapters(const ParameterTable& table, const std::string& layer);

  bool empty() const { return adapters_.empty(); }
  // The buffers for `rows`, by the phases of forward, and of the gradients.
  void declare(BufferScope& scope, const std::string& name, int64_t rows, PhaseMask forward, PhaseMask backward);

  struct Experts {
    TensorView offsets, counts;  // of SortByExpert
  };
  // forward() adds to out [R, N], or without it makes again what backward reads of x [R, K]. input_gradient() adds
  // to d_x and makes the gradients of B, and weight_gradient(), which follows, makes those of A.
  void forward(const StepContext& step, const Experts& experts, const TensorView& x, const TensorView& out) const;
  void input_gradient(const StepContext& step, const Experts& experts, const TensorView& d_out,
                      const TensorView& d_x) const;
  void weight_gradient(const StepContext& step, const Experts& experts, const TensorView& x) const;

 private:
  float scale() const { return static_cast<float>(rules_.scale); }
  // x A^T of the i-th, [R, rank], or its gradient.
  TensorView inner(const StepContext& step, TensorId id, size_t i, int64_t rows) const;

  std::vector<LoraAdapter> adapters_;
  LoraRules rules_;
  int64_t cols_ = 0, out_cols_ = 0;  // K, N
  TensorId inner_, d_inner_;         // [number of adapters * R, rank]
  TensorId part_;                    // [R, most of K and the columns of an adapter]
};

}  // namespace parka
