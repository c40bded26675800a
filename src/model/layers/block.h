#pragma once
#include "model/layers/attention.h"
#include "model/layers/branch.h"
#include "model/layers/swiglu.h"

namespace parka {

// A transformer block: attention, then SwiGLU, each in a branch of the residual stream.
class Block {
 public:
  // Block l's, named `prefix` and what follows.
  static void add_parameters(ParameterList& list, const ModelConfig& model, const std::string& prefix, int64_t l) {
    const double depth = 2.0 * static_cast<double>(l + 1);
    Branch<Attention>::add_parameters(list, model, prefix, depth);
    Branch<Swiglu>::add_parameters(list, model, prefix, depth);
  }

  Block(const ModelConfig& model, const PrecisionConfig& precision, const ParameterTable& table, int64_t l,
        const std::string& prefix)
      : attention_(model, precision, table, l, prefix), ffn_(model, precision, table, l, prefix) {}

  void declare(BufferScope& scope) {
    attention_.declare(scope, /*is_first_of_block=*/true);
    ffn_.declare(scope, /*is_first_of_block=*/false);
  }

  // input() = residual + branch, which may be the input itself and nothing. The block leaves residual(), to which
  // the stream's branch is still to be added.
  void forward(const StepContext& step, const ResidualStream& stream, const TensorView& residual,
               const TensorView& branch) const {
    attention_.forward(step, stream, residual, branch);
    ffn_.forward(step, stream, input(step), stream.branch(step));
  }
  TensorView input(const StepContext& step) const { return attention_.residual(step); }
  TensorView residual(const StepContext& step) const { return ffn_.residual(step); }

  // The stream's d_residual goes from the gradient of the block's output to that of its input, in FP8 as well if
  // `quantize`.
  void backward(const StepContext& step, const ResidualStream& stream, bool quantize) const {
    ffn_.backward(step, stream, /*quantize=*/true);
    attention_.backward(step, stream, quantize);
  }

  void sample_weights(const StepContext& step) const {
    attention_.sample_weights(step);
    ffn_.sample_weights(step);
  }
  SampleNeeds sample_needs() const {
    SampleNeeds needs = attention_.sample_needs();
    needs.add(ffn_.sample_needs());
    return needs;
  }

 private:
  Branch<Attention> attention_;
  Branch<Swiglu> ffn_;
};

}  // namespace parka
