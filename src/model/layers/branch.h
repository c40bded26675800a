#pragma once
#include <optional>
#include <string>

#include "model/layers/norm.h"
#include "model/layers/residual_stream.h"

namespace parka {

// One half of a block: a norm, and behind it an inner layer, Attention, Swiglu or Mlp, and by model.norm_placement
// another norm. The norm of the next branch adds what comes out to the residual stream.
//
// An inner layer begins and ends with a Linear. It declares its buffers, runs forward from the norm's output x to
// `out`, and runs backward from the gradient of `out` to that of x. Its constants say what a branch has to know:
//   kNormName, kNormBehindName        of the norms in front and behind
//   kForwardPhase                     in which forward runs
//   kRowsPhases, kTransposedPhases    in which backward reads the gradient of `out`, in rows and transposed
//   kLastBackwardPhase                in which it reads x again and writes the gradient of x
// reads_input_again() says whether backward reads x at all.
//   kNormInput, kNormOutput, kNormBehindInput, kOutputGradient    what telemetry calls the tensors around it
template <typename Inner>
class Branch {
 public:
  // Block `block` of a stack; names of parameters begin with `prefix`.
  Branch(const ModelConfig& model, const PrecisionConfig& precision, const ParameterTable& table, int64_t block,
         const std::string& prefix)
      : block_(block),
        norm_(model.norm_in_front(), model, table, prefix + Inner::kNormName),
        inner_(model, precision, table, block, prefix) {
    if (model.has_norm_behind()) norm_behind_.emplace(model.norm, model, table, prefix + Inner::kNormBehindName);
  }

  // `depth`: how many branches are added to the residual stream up to the end of the block.
  static void add_parameters(ParameterList& list, const ModelConfig& model, const std::string& prefix,
                             double depth) {
    Norm::add_parameters(list, model.norm_in_front(), model.d_model, prefix + Inner::kNormName);
    Inner::add_parameters(list, model, prefix, depth);
    if (model.has_norm_behind()) {
      Norm::add_parameters(list, model.norm, model.d_model, prefix + Inner::kNormBehindName);
    }
  }

  void declare(BufferScope& scope, bool is_first_of_block) {
    norm_.declare_in_branch(scope, Inner::kNormName, is_first_of_block, scope.forward(Inner::kForwardPhase),
                            Inner::kLastBackwardPhase, inner_.reads_input_again());
    inner_.declare(scope);
    if (norm_behind_) norm_behind_->declare_behind(scope, Inner::kNormBehindName);
  }

  // residual() = residual + branch; then the stream's branch is inner(norm(residual())), or the norm behind of
  // that.
  void forward(const StepContext& step, const ResidualStream& stream, const TensorView& residual,
               const TensorView& branch) const {
    norm_.forward(step, residual, branch);
    norm_.sample_input(step, block_, Inner::kNormInput);
    norm_.sample_output(step, block_, Inner::kNormOutput);
    if (!norm_behind_) {
      inner_.forward(step, norm_.output(step), stream.branch(step));
      return;
    }
    inner_.forward(step, norm_.output(step), norm_behind_->sum(step));
    norm_behind_->forward_behind(step, stream.branch(step));
    norm_behind_->sample_input(step, block_, Inner::kNormBehindInput);
  }
  TensorView residual(const StepContext& step) const { return norm_.sum(step); }

  // From the stream's d_residual, the gradient of residual() and of the branch that is added to it, to that of
  // residual() alone, in the same buffer. `quantize`: the branch before wants it in FP8 where GEMMs are.
  void backward(const StepContext& step, const ResidualStream& stream, bool quantize) const {
    const TensorView d_residual = stream.d_residual(step), d_norm_output = stream.d_norm_output(step);
    const TensorView d_inner_plain = stream.d_inner_plain(step);
    const GemmInput d_inner = stream.d_inner(step);
    if (norm_behind_) {
      norm_behind_->backward(step, d_residual, /*d_residual=*/{}, d_inner_plain, stream.d_inner_codes(step));
    }
    step.samples.add(step.device, block_, Inner::kOutputGradient, d_inner_plain, d_inner.row);
    inner_.backward(
        step, d_inner, [&] { return norm_.output_again(step); }, d_norm_output);
    norm_.backward(step, d_norm_output, d_residual, d_residual,
                   quantize ? stream.d_residual_codes(step) : GemmInput{});
  }

 private:
  int64_t block_;
  Norm norm_;
  Inner inner_;
  std::optional<Norm> norm_behind_;
};

}  // namespace parka
