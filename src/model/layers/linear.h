#pragma once
#include <functional>
#include <string>

#include "core/tensor.h"
#include "model/model_config.h"
#include "model/parameter_table.h"
#include "model/quantized_tensors.h"

namespace parka {

struct StepContext;

// A matrix on its way into GEMMs: in rows for outputs and input gradients, transposed (FP8 only) for weight
// gradients.
struct GemmInput {
  ScaledView row, transposed;
  TensorView plain = {};  // gradients only: the same in the compute format, what a bias gradient sums up
};

// Makes the input of a linear layer again, as its weight gradient wants it, or finds what forward kept.
using InputAgain = std::function<GemmInput()>;

// out = x W^T + b, with the weight W [N, K] and, where the table has a parameter <name>_bias, the bias b [N].
class Linear {
 public:
  // `std` is what the weight is drawn with at first. A weight of role kPlainLinear is FP8 under no precision.
  static void add_parameter(ParameterList& list, const std::string& name, int64_t rows, int64_t cols, double std,
                            ParameterRole role = ParameterRole::kLinear);
  static void add_bias(ParameterList& list, const std::string& name, int64_t rows);

  Linear(const PrecisionConfig& precision, const ParameterTable& table, const std::string& name);

  void forward(const StepContext& step, const ScaledView& x, const TensorView& out) const;
  void input_gradient(const StepContext& step, const GemmInput& d_out, const TensorView& d_x) const;
  // Whether the weight is trained: else weight_gradient() is not to be called, and nobody needs the input again.
  bool trains_weight() const { return trains_weight_; }
  void weight_gradient(const StepContext& step, const GemmInput& d_out, const GemmInput& x) const;
  // Of d_out [T, N] before it is quantized. Nothing without a bias that is trained.
  void bias_gradient(const StepContext& step, const TensorView& d_out) const;

  // Of the weight's FP8 copy.
  void sample_weight(const StepContext& step, int64_t block, QuantizedTensor which) const;

 private:
  int weight_;
  int bias_;  // -1: none
  bool trains_weight_, trains_bias_;
  bool is_fp8_;
  bool fast_forward_, fast_input_gradient_, fast_weight_gradient_;
};

}  // namespace parka
