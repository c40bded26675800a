#pragma once
#include <utility>
#include <variant>

#include "model/layers/attention.h"
#include "model/layers/branch.h"
#include "model/layers/mlp.h"
#include "model/layers/swiglu.h"

namespace parka {

// A transformer block: attention, then SwiGLU or, of an encoder, an MLP without a gate, each in a branch of the
// residual stream.
class Block {
 public:
  // Block l's, named `prefix` and what follows.
  static void add_parameters(ParameterList& list, const ModelConfig& model, const std::string& prefix, int64_t l) {
    const double depth = 2.0 * static_cast<double>(l + 1);
    Branch<Attention>::add_parameters(list, model, prefix, depth);
    if (model.is_encoder()) {
      Branch<Mlp>::add_parameters(list, model, prefix, depth);
    } else {
      Branch<Swiglu>::add_parameters(list, model, prefix, depth);
    }
  }

  Block(const ModelConfig& model, const PrecisionConfig& precision, const ParameterTable& table, int64_t l,
        const std::string& prefix)
      : attention_(model, precision, table, l, prefix),
        ffn_(model.is_encoder()
                 ? FeedForward(std::in_place_type<Branch<Mlp>>, model, precision, table, l, prefix)
                 : FeedForward(std::in_place_type<Branch<Swiglu>>, model, precision, table, l, prefix)) {}

  void declare(BufferScope& scope) {
    attention_.declare(scope, /*is_first_of_block=*/true);
    std::visit([&](auto& ffn) { ffn.declare(scope, /*is_first_of_block=*/false); }, ffn_);
  }

  // input() = residual + branch, which may be the input itself and nothing. The block leaves residual(), to which
  // the stream's branch is still to be added.
  void forward(const StepContext& step, const ResidualStream& stream, const TensorView& residual,
               const TensorView& branch) const {
    attention_.forward(step, stream, residual, branch);
    std::visit([&](const auto& ffn) { ffn.forward(step, stream, input(step), stream.branch(step)); }, ffn_);
  }
  TensorView input(const StepContext& step) const { return attention_.residual(step); }
  TensorView residual(const StepContext& step) const {
    return std::visit([&](const auto& ffn) { return ffn.residual(step); }, ffn_);
  }

  // The stream's d_residual goes from the gradient of the block's output to that of its input, in FP8 as well if
  // `quantize`.
  void backward(const StepContext& step, const ResidualStream& stream, bool quantize) const {
    std::visit([&](const auto& ffn) { ffn.backward(step, stream, /*quantize=*/true); }, ffn_);
    attention_.backward(step, stream, quantize);
  }

  void sample_weights(const StepContext& step) const {
    attention_.sample_weights(step);
    std::visit([&](const auto& ffn) { ffn.sample_weights(step); }, ffn_);
  }
  SampleNeeds sample_needs() const {
    SampleNeeds needs = attention_.sample_needs();
    needs.add(std::visit([](const auto& ffn) { return ffn.sample_needs(); }, ffn_));
    return needs;
  }

 private:
  using FeedForward = std::variant<Branch<Swiglu>, Branch<Mlp>>;

  Branch<Attention> attention_;
  FeedForward ffn_;
};

}  // namespace parka
