#pragma once
#include <optional>
#include <string>

#include "model/layers/norm.h"
#include "model/layers/residual_stream.h"

namespace parka {

// One half of a block: a norm, and after it an inner layer, Attention, Swiglu, Mlp or Moe, and by
// model.norm_placement another norm. The norm of the next branch adds what comes out to the residual stream.
//
// An inner layer begins and ends with linear layers. It declares its buffers, runs forward from the norm's output x
// to `out`, and runs backward from the gradient of `out` to that of x. Where `out` is empty, forward does what
// backward reads again and no more. Its constants say what a branch has to know:
//   kNormName, kPostNormName        of the pre-norm and the post-norm
//   kForwardPhase                     in which forward runs
//   kRowsPhases, kTransposedPhases    in which backward reads the gradient of `out`, in rows and transposed
//   kLastBackwardPhase                in which it reads x again and writes the gradient of x
// reads_input_again() says whether backward reads x at all, reads_fp8(), reads_fp8_forward() and
// reads_fp8_gradient() whether it wants x, x in forward and the gradient of `out` in FP8.
//   kReadsPlainInput, if there                   it wants x in the compute format as well
//   kNormInput, kNormOutput, kPostNormInput, kOutputGradient    what telemetry calls the tensors around it
template <typename Inner>
class Branch {
 public:
  // Block `block` of a stack; names of parameters begin with `prefix`.
  Branch(const ModelConfig& model, const PrecisionConfig& precision, const ParameterTable& table, int64_t block,
         const std::string& prefix)
      : block_(block),
        norm_(model.pre_norm(), model, table, prefix + Inner::kNormName),
        inner_(model, precision, table, block, prefix) {
    if (model.has_post_norm()) post_norm_.emplace(model.norm, model, table, prefix + Inner::kPostNormName);
  }

  // `depth`: how many branches are added to the residual stream up to the end of the block.
  static void add_parameters(ParameterList& list, const ModelConfig& model, const std::string& prefix,
                             double depth) {
    Norm::add_parameters(list, model.pre_norm(), model.d_model, prefix + Inner::kNormName);
    Inner::add_parameters(list, model, prefix, depth);
    if (model.has_post_norm()) {
      Norm::add_parameters(list, model.norm, model.d_model, prefix + Inner::kPostNormName);
    }
  }

  void declare(BufferScope& scope, bool is_first_of_block) {
    norm_.declare_in_branch(scope, Inner::kNormName, is_first_of_block, scope.forward(Inner::kForwardPhase),
                            Inner::kLastBackwardPhase, inner_.reads_input_again(), inner_.reads_fp8(),
                            inner_.reads_fp8_forward(), kReadsPlain);
    inner_.declare(scope);
    if (post_norm_) post_norm_->declare_for_sum(scope, Inner::kPostNormName);
  }

  // residual() = residual + branch; then the stream's branch is inner(norm(residual())), or the post-norm of
  // that. Without `wants_branch` it may be left as it is: backward alone reads what forward keeps.
  void forward(const StepContext& step, const ResidualStream& stream, const TensorView& residual,
               const TensorView& branch, bool wants_branch = true) const {
    norm_.forward(step, residual, branch);
    norm_.sample_input(step, block_, Inner::kNormInput);
    norm_.sample_output(step, block_, Inner::kNormOutput);
    const TensorView out = post_norm_ ? post_norm_->sum(step) : wants_branch ? stream.branch(step) : TensorView();
    if constexpr (kReadsPlain) {
      inner_.forward(step, norm_.output(step), norm_.plain_output(step), out);
    } else {
      inner_.forward(step, norm_.output(step), out);
    }
    if (!post_norm_) return;
    post_norm_->forward_of_sum(step, stream.branch(step));
    post_norm_->sample_input(step, block_, Inner::kPostNormInput);
  }
  TensorView residual(const StepContext& step) const { return norm_.sum(step); }
  bool reads_fp8_gradient() const { return inner_.reads_fp8_gradient(); }

  // From the stream's d_residual, the gradient of residual() and of the branch that is added to it, to that of
  // residual() alone, in the same buffer. `quantize`: the branch before wants it in FP8.
  void backward(const StepContext& step, const ResidualStream& stream, bool quantize) const {
    const TensorView d_residual = stream.d_residual(step), d_norm_output = stream.d_norm_output(step);
    const TensorView d_inner_plain = stream.d_inner_plain(step);
    const bool is_fp8 = inner_.reads_fp8_gradient();
    const GemmInput d_inner = stream.d_inner(step, is_fp8);
    if (post_norm_) {
      post_norm_->backward(step, d_residual, /*d_residual=*/{}, d_inner_plain,
                           is_fp8 ? stream.d_inner_codes(step) : GemmInput{});
    }
    step.samples.add(step.device, block_, Inner::kOutputGradient, d_inner_plain, d_inner.row);
    const InputAgain x = [&] { return norm_.output_again(step); };
    if constexpr (kReadsPlain) {
      inner_.backward(
          step, d_inner, x, [&] { return norm_.plain_output(step); }, d_norm_output);
    } else {
      inner_.backward(step, d_inner, x, d_norm_output);
    }
    norm_.backward(step, d_norm_output, d_residual, d_residual,
                   quantize ? stream.d_residual_codes(step) : GemmInput{});
  }

 private:
  static constexpr bool kReadsPlain = requires { Inner::kReadsPlainInput; };

  int64_t block_;
  Norm norm_;
  Inner inner_;
  std::optional<Norm> post_norm_;
};

}  // namespace parka
