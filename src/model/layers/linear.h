#pragma once
#include <functional>
#include <string>
#include <vector>

#include "core/memory/memory_plan.h"
#include "core/tensor.h"
#include "kernels/ops/gemm/gemm.h"
#include "model/buffer_scope.h"
#include "model/model_config.h"
#include "model/parameter_table.h"

namespace parka {

struct StepContext;

// A matrix on its way into GEMMs: in rows, and with FP8 transposed for weight gradients.
struct GemmInput {
  ScaledView row, transposed;
  TensorView plain = {};  // gradients only: the same in the compute format, what a bias gradient sums up
};

// Makes the input of a linear layer again, as its weight gradient wants it, or finds what forward kept.
using InputAgain = std::function<GemmInput()>;

// out = x W^T + b, with the weight W [N, K] and, if the table has a parameter <name>_bias, the bias b [N]. If the
// layer has adapters, the columns of out that belong to one get + scale * (x A^T) B^T, in the compute
// format: FP8 operands are decoded for it. Adapters of one layer read one input, so their A are multiplied as one
// matrix. With dropout each adapter sees x without elements of its own choice, and has products of its own.
class Linear {
 public:
  // `std` is what the weight is drawn with at first. A weight of role kPlainLinear is FP8 under no precision.
  static void add_parameter(ParameterList& list, const std::string& name, int64_t rows, int64_t cols, double std,
                            ParameterRole role = ParameterRole::kLinear);
  static void add_bias(ParameterList& list, const std::string& name, int64_t rows);

  Linear(const PrecisionConfig& precision, const ParameterTable& table, const std::string& name);

  // The buffers of adapters, by the phases of forward, and of input_gradient() and weight_gradient().
  void declare(BufferScope& scope, const std::string& name, PhaseMask forward, PhaseMask backward);

  void forward(const StepContext& step, const ScaledView& x, const TensorView& out) const;
  // True if out is a GEMM alone, without bias or adapters; which one.
  bool is_product() const { return adapters_.empty() && bias_ < 0; }
  Gemm product(const StepContext& step, const ScaledView& x, const TensorView& out) const;
  void input_gradient(const StepContext& step, const GemmInput& d_out, const TensorView& d_x) const;
  // True if the weight is trained, and if it or an adapter is: else nobody needs the input again.
  bool trains_weight() const { return trains_weight_; }
  bool reads_input_again() const { return trains_weight_ || !adapters_.empty(); }
  // After input_gradient().
  void weight_gradient(const StepContext& step, const GemmInput& d_out, const GemmInput& x) const;
  // Sums d_out [T, N] before it is quantized. Does nothing without a bias that is trained.
  void bias_gradient(const StepContext& step, const TensorView& d_out) const;

 private:
  struct Adapter {
    int in, out;  // parameters
    int64_t first_row, rows;
    int64_t first_inner;  // column in what all adapters have of [T, rank]
  };
  // Columns of an adapter in a matrix of out's width, with padding(adapter) columns after them.
  TensorView columns(const TensorView& out, const Adapter& adapter) const;
  int64_t padding(const Adapter& adapter) const { return rows_ - adapter.rows; }
  // x A^T of all adapters, or its gradient unscaled, and an adapter's columns there, then inner_padding() ones.
  int64_t inner_width() const { return static_cast<int64_t>(adapters_.size()) * rank_; }
  int64_t inner_padding() const { return inner_width() - rank_; }
  TensorView inner(const StepContext& step, TensorId id) const;
  TensorView inner(const StepContext& step, TensorId id, const Adapter& adapter) const;
  // A of all adapters, [inner_width(), K]: where they are, if they lie one after the other in memory
  // (memory_order()), or copied to a buffer. Likewise their gradients are written.
  TensorView stacked_in(const StepContext& step) const;
  TensorView decoded(const StepContext& step, const ScaledView& x, TensorId buffer) const;
  // x A^T of all adapters, and their part of out; likewise for d_out. If possible their part of out or d_x is
  // written first, and the layer's own GEMM, whose arithmetic takes longer than its bytes, is added to it: adding
  // their GEMM of few terms last would read all of the other once more.
  void inner_products(const StepContext& step, const ScaledView& x) const;
  bool adapters_fill_output() const;  // no columns of out are without one
  void outer_products(const StepContext& step, const TensorView& out, bool accumulate) const;
  void inner_gradients(const StepContext& step, const ScaledView& d_out) const;
  void add_dropped_gradients(const StepContext& step, const TensorView& d_x) const;
  // x, [T, K] or `transposed`, as the adapter sees it: with elements left out, in a buffer until the next call.
  TensorView dropped(const StepContext& step, const Adapter& adapter, const TensorView& x, bool transposed) const;
  void drop(const StepContext& step, const Adapter& adapter, const TensorView& x, const TensorView& y,
            bool accumulate, bool transposed) const;
  void adapter_gradients(const StepContext& step, const ScaledView& d_out, const GemmInput& x) const;
  // The gradients of A. `input` is [T, K], or [K, T] unless `is_row`.
  void in_gradients(const StepContext& step, const TensorView& input, bool is_row) const;

  int weight_;
  int bias_;  // -1: none
  bool trains_weight_, trains_bias_;
  bool is_fp8_;
  int64_t rows_, cols_;  // N, K
  std::vector<Adapter> adapters_;
  int64_t rank_ = 0;
  float lora_scale_;
  double dropout_;
  uint64_t dropout_seed_;
  TensorId inner_, d_inner_;                   // [T, inner_width()]
  TensorId stacked_, stacked_gradient_;        // [inner_width(), K]; only of several adapters
  TensorId dropped_;                           // [T, K] or [K, T]; only with dropout
  TensorId decoded_input_, decoded_gradient_;  // [T, K] or [K, T], and [T, N]; only with adapters and FP8
};

}  // namespace parka
