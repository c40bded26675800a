#pragma once
#include <string>
#include <vector>

#include "core/memory/memory_plan.h"
#include "core/tensor.h"
#include "model/buffer_scope.h"
#include "model/parameter_table.h"

namespace parka {

struct GemmInput;
struct StepContext;

// A matrix without its first columns; its rows still are as far from each other.
TensorView from_column(TensorView matrix, int64_t first);

// The adapters of one layer out = x W^T with a weight W [N, K]; often none. The columns of out that belong to one
// get + scale * (x A^T) B^T, in the compute format: FP8 operands are decoded for it. All read one input, so their A
// are multiplied as one matrix. With dropout each sees x without elements of its own choice, and has products of
// its own.
//
// The layer calls before_...() and after_...() around its own GEMM. Adapters that can write the whole result do so
// before, and the GEMM, whose arithmetic takes longer than its bytes, is then added to it: adding their GEMM of few
// terms last would read all of the other once more.
class Adapters {
 public:
  Adapters() = default;
  Adapters(const ParameterTable& table, const std::string& layer, bool reads_fp8);

  bool empty() const { return adapters_.empty(); }
  // The buffers, by the phases of forward, and of the layer's gradients.
  void declare(BufferScope& scope, const std::string& name, PhaseMask forward, PhaseMask backward);

  // Makes again what backward reads.
  void forward_again(const StepContext& step, const ScaledView& x) const;
  // True if the layer is to add to what is in out; likewise in d_x.
  bool before_product(const StepContext& step, const ScaledView& x, const TensorView& out) const;
  void after_product(const StepContext& step, const TensorView& out) const;
  bool before_input_gradient(const StepContext& step, const ScaledView& d_out, const TensorView& d_x) const;
  void after_input_gradient(const StepContext& step, const TensorView& d_x) const;
  // Those of A and B. After the input gradient, which leaves the decoded d_out and the gradient of x A^T.
  void weight_gradients(const StepContext& step, const ScaledView& d_out, const GemmInput& x) const;

 private:
  struct Adapter : LoraAdapter {
    int64_t first_inner;  // column in what all adapters have of [T, rank]
  };
  float scale() const { return static_cast<float>(rules_.scale); }
  // Columns after those of an adapter in a matrix of out's width, and in what all have of [T, rank].
  int64_t padding(const Adapter& adapter) const { return rows_ - adapter.rows; }
  int64_t inner_padding() const { return inner_width() - rules_.rank; }
  int64_t inner_width() const { return static_cast<int64_t>(adapters_.size()) * rules_.rank; }
  // x A^T of all adapters, or its gradient unscaled, from a column on.
  TensorView inner(const StepContext& step, TensorId id, int64_t first = 0) const;
  // A of all adapters, [inner_width(), K], or what its gradient is to be written or added to: where they are, if
  // they lie one after the other in memory (memory_order()), or copied to a buffer.
  TensorView stacked(const StepContext& step, bool gradients) const;
  TensorView decoded(const StepContext& step, const ScaledView& x, TensorId buffer) const;
  void outer_products(const StepContext& step, const TensorView& out, bool accumulate) const;
  // x, [T, K] or `transposed`, as the adapter sees it, with elements left out: added to `sum`, or if that is empty
  // in a buffer until the next call.
  TensorView dropped(const StepContext& step, const Adapter& adapter, const TensorView& x, bool transposed,
                     const TensorView& sum = {}) const;

  std::vector<Adapter> adapters_;
  LoraRules rules_;
  bool reads_fp8_ = false;
  int64_t rows_ = 0, cols_ = 0;                // N, K
  int64_t bare_rows_ = 0;                      // those of W without an adapter
  TensorId inner_, d_inner_;                   // [T, inner_width()]
  TensorId stacked_, stacked_gradient_;        // [inner_width(), K]; only of several adapters
  TensorId dropped_;                           // [T, K] or [K, T]; only with dropout
  TensorId decoded_input_, decoded_gradient_;  // [T, K] or [K, T], and [T, N]; only with FP8
};

}  // namespace parka
