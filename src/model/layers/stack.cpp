#include "model/layers/stack.h"

#include <algorithm>

namespace parka {

void Stack::add_parameters(ParameterList& list, const ModelConfig& model, std::string_view name, bool has_units) {
  for (int64_t l = 0; l < model.num_layers; ++l) {
    if (has_units) list.begin_unit();
    add_block_parameters(list, model, name, l);
  }
}

void Stack::add_block_parameters(ParameterList& list, const ModelConfig& model, std::string_view name, int64_t l) {
  const std::string prefix = block_prefix(name, l);
  const double depth = 2.0 * static_cast<double>(l + 1);
  Branch<Attention>::add_parameters(list, model, prefix, depth);
  if (model.is_encoder()) {
    Branch<Mlp>::add_parameters(list, model, prefix, depth);
  } else {
    Branch<Swiglu>::add_parameters(list, model, prefix, depth);
  }
}

Stack::Stack(const ModelConfig& model, const ParameterTable& table, std::string_view name, int first_unit,
             BufferScope& scope)
    : first_unit_(first_unit),
      first_backward_(scope.purpose() == BufferScope::Purpose::kForwardOnly
                          ? model.num_layers
                          : std::clamp<int64_t>(table.first_trained_unit - first_unit, 0, model.num_layers)),
      reruns_(scope.precision().recompute == Recompute::kBlock),
      offload_(model.num_layers, scope.has_backward() ? scope.precision().offload_blocks : 0, first_backward_) {
  for (int64_t l = 0; l < model.num_layers; ++l) {
    scope.enter_block(name, l, offload_, /*goes_backward=*/l >= first_backward_);
    const auto branch = [&]<typename Inner>(std::in_place_type_t<Inner>) {
      return Branch<Inner>(model, scope.precision(), table, l, block_prefix(name, l));
    };
    Block block{branch(std::in_place_type<Attention>), model.is_encoder()
                                                           ? FeedForward(branch(std::in_place_type<Mlp>))
                                                           : FeedForward(branch(std::in_place_type<Swiglu>))};
    block.attention.declare(scope, /*is_first_of_block=*/true);
    std::visit([&](auto& ffn) { ffn.declare(scope, /*is_first_of_block=*/false); }, block.ffn);
    blocks_.push_back(std::move(block));
    offload_.add_to_buffer(l, scope.kept_in_block());
  }
  scope.leave_blocks();
  stream_.declare(scope, model.d_model,
                  {.rows = Attention::kRowsPhases | Swiglu::kRowsPhases,
                   .transposed = Attention::kTransposedPhases | Swiglu::kTransposedPhases,
                   .d_norm_output = Attention::kLastBackwardPhase | Swiglu::kLastBackwardPhase},
                  model.has_post_norm());
}

// Attention adds what comes in to the residual stream, and the second branch adds what attention leaves.
void Stack::forward(const StepContext& step, const Between& between) const {
  TensorView residual = input(step), branch;  // nothing to add before the first block
  StepContext forward_only = step;
  forward_only.keep = false;
  for (int64_t l = 0; l < num_blocks(); ++l) {
    if (between) between(l, residual, branch);
    step.before_forward(unit(l));
    if (step.keep) offload_.before_forward(step.device, l);
    const StepContext& own = l < first_backward_ ? forward_only : step;
    block(l).attention.forward(own, stream_, residual, branch);
    std::visit([&](const auto& ffn) { ffn.forward(own, stream_, input(step, l), stream_.branch(step)); },
               block(l).ffn);
    if (step.keep) offload_.after_forward(l);
    residual = this->residual(step, l);
    branch = stream_.branch(step);
  }
  if (between) between(num_blocks(), residual, branch);
}

void Stack::forward_block(const StepContext& step, int64_t l) const {
  block(l).attention.forward(step, stream_, input(step, l), {});
  std::visit([&](const auto& ffn) { ffn.forward(step, stream_, input(step, l), stream_.branch(step)); },
             block(l).ffn);
}

void Stack::backward(const StepContext& step) const {
  for (int64_t l = num_blocks(); l-- > first_backward_;) {
    step.before_backward(unit(l));
    offload_.before_backward(step.device, l);
    // Nothing below wants the gradient of the lowest block in FP8.
    backward_block(step, l, /*quantize=*/l > first_backward_);
    offload_.after_backward(l);
    step.after_backward(unit(l));
  }
}

void Stack::backward_block(const StepContext& step, int64_t l, bool quantize) const {
  if (reruns_) forward_block(step, l);
  std::visit([&](const auto& ffn) { ffn.backward(step, stream_, /*quantize=*/true); }, block(l).ffn);
  block(l).attention.backward(step, stream_, quantize);
}

}  // namespace parka
