#pragma once
#include <functional>
#include <string>

#include "core/tensor.h"
#include "kernels/ops/gemm/gemm.h"
#include "model/buffer_scope.h"
#include "model/formats.h"
#include "model/layers/adapters.h"
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

// out = x W^T + b, with the weight W [N, K] and, if the table has a parameter <name>_bias, the bias b [N]; and what
// adapters of the layer add to that.
class Linear {
 public:
  // `std` is what the weight is drawn with at first. A weight of role kPlainLinear is FP8 under no precision.
  static void add_parameter(ParameterList& list, const std::string& name, int64_t rows, int64_t cols, double std,
                            ParameterRole role = ParameterRole::kLinear);
  static void add_bias(ParameterList& list, const std::string& name, int64_t rows);

  Linear(const PrecisionConfig& precision, const ParameterTable& table, const std::string& name);

  // The buffers of adapters, by the phases of forward, and of input_gradient() and weight_gradient(); and those of
  // INT8 codes of the input.
  void declare(BufferScope& scope, const std::string& name, PhaseMask forward, PhaseMask backward);

  // Without `out`: what backward reads of it, once more.
  void forward(const StepContext& step, const ScaledView& x, const TensorView& out) const;
  // True if out is a GEMM alone, without bias or adapters, and not of INT8; which one.
  bool is_product() const { return adapters_.empty() && bias_ < 0 && !is_int8_forward_; }
  Gemm product(const StepContext& step, const ScaledView& x, const TensorView& out) const;
  void input_gradient(const StepContext& step, const GemmInput& d_out, const TensorView& d_x) const;
  // Whether its products are FP8: those of backward, and that of forward.
  bool is_fp8() const { return is_fp8_; }
  bool is_fp8_forward() const { return is_fp8_forward_; }
  // True if the weight is trained, and if it or an adapter is: else nobody needs the input again.
  bool trains_weight() const { return trains_weight_; }
  bool reads_input_again() const { return trains_weight_ || !adapters_.empty(); }
  // After input_gradient().
  void weight_gradient(const StepContext& step, const GemmInput& d_out, const GemmInput& x) const;
  // Sums d_out [T, N] before it is quantized. Does nothing without a bias that is trained.
  void bias_gradient(const StepContext& step, const TensorView& d_out) const;

 private:
  int weight_;
  int bias_;  // -1: none
  bool trains_weight_, trains_bias_;
  bool is_fp8_, is_fp8_forward_, is_int8_forward_;
  int64_t cols_;
  MatrixId codes_;  // of the input, in INT8
  Adapters adapters_;
};

}  // namespace parka
