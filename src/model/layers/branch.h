#pragma once
#include <string>

#include "model/layers/norm.h"
#include "model/layers/residual_stream.h"

namespace parka {

// One half of a block: a norm, and behind it an inner layer, Attention or Swiglu, whose output the next norm adds
// to the residual stream.
//
// An inner layer begins and ends with a Linear. It declares its buffers, runs forward from the norm's output x to
// `out`, and runs backward from the gradient of `out` to that of x. Its constants say what a branch has to know:
//   kNormName                         of the norm in front
//   kForwardPhase                     in which forward runs
//   kRowsPhases, kTransposedPhases    in which backward reads the gradient of `out`, in rows and transposed
//   kLastBackwardPhase                in which it reads x again and writes the gradient of x
//   kNormInput, kNormOutput, kOutputGradient    what telemetry calls the tensors around it
template <typename Inner>
class Branch {
 public:
  // Block `block` of a stack; names of parameters begin with `prefix`.
  Branch(const ModelConfig& model, const PrecisionConfig& precision, const ParameterTable& table, int64_t block,
         const std::string& prefix)
      : block_(block),
        norm_(model, table, prefix + Inner::kNormName),
        inner_(model, precision, table, block, prefix) {}

  // `depth`: how many branches are added to the residual stream up to the end of the block.
  static void add_parameters(ParameterList& list, const ModelConfig& model, const std::string& prefix,
                             double depth) {
    Norm::add_parameter(list, model, prefix + Inner::kNormName);
    Inner::add_parameters(list, model, prefix, depth);
  }

  void declare(BufferScope& scope, bool is_first_of_block) {
    norm_.declare_in_branch(scope, Inner::kNormName, is_first_of_block, scope.forward(Inner::kForwardPhase),
                            Inner::kLastBackwardPhase);
    inner_.declare(scope);
  }

  // residual() = residual + branch; then the stream's branch is inner(norm(residual())).
  void forward(const StepContext& step, const ResidualStream& stream, const TensorView& residual,
               const TensorView& branch) const {
    norm_.forward(step, residual, branch);
    norm_.sample(step, block_, Inner::kNormInput, Inner::kNormOutput);
    inner_.forward(step, norm_.output(step), stream.branch(step));
  }
  TensorView residual(const StepContext& step) const { return norm_.sum(step); }

  // From the stream's d_residual, the gradient of residual() + inner(norm(residual())), to that of residual(), in
  // the same buffer. `quantize`: the branch before wants it in FP8 where GEMMs are.
  void backward(const StepContext& step, const ResidualStream& stream, bool quantize) const {
    const TensorView d_residual = stream.d_residual(step), d_norm_output = stream.d_norm_output(step);
    const GemmInput d_branch = stream.d_branch(step);
    step.samples.add(step.device, block_, Inner::kOutputGradient, d_residual, d_branch.row);
    inner_.backward(
        step, d_branch, [&] { return norm_.output_again(step); }, d_norm_output);
    norm_.backward(step, d_norm_output, d_residual, d_residual,
                   quantize ? stream.d_branch_codes(step) : GemmInput{});
  }

  void sample_weights(const StepContext& step) const { inner_.sample_weights(step); }
  SampleNeeds sample_needs() const {
    SampleNeeds needs = norm_.sample_needs();
    needs.add(inner_.sample_needs());
    return needs;
  }

 private:
  int64_t block_;
  Norm norm_;
  Inner inner_;
};

}  // namespace parka
