#include "model/layers/stack.h"

#include <algorithm>

namespace parka {

void Stack::add_parameters(ParameterList& list, const ModelConfig& model, std::string_view name, bool has_units) {
  for (int64_t l = 0; l < model.num_layers; ++l) {
    if (has_units) list.begin_unit();
    add_block_parameters(list, model, name, l);
  }
}

Stack::Stack(const ModelConfig& model, const ParameterTable& table, std::string_view name, int first_unit,
             BufferScope& scope)
    : first_unit_(first_unit),
      first_backward_(static_cast<size_t>(
          scope.purpose() == BufferScope::Purpose::kForwardOnly
              ? model.num_layers
              : std::clamp<int64_t>(table.first_trained_unit - first_unit, 0, model.num_layers))),
      reruns_(scope.precision().recompute == Recompute::kBlock),
      offload_(model.num_layers, scope.has_backward() ? scope.precision().offload_blocks : 0,
               static_cast<int64_t>(first_backward_)) {
  for (int64_t l = 0; l < model.num_layers; ++l) {
    scope.enter_block(name, l, offload_, /*goes_backward=*/static_cast<size_t>(l) >= first_backward_);
    blocks_.emplace_back(model, scope.precision(), table, l, block_prefix(name, l)).declare(scope);
    offload_.add_to_buffer(l, scope.kept_in_block());
  }
  scope.leave_blocks();
  stream_.declare(scope, model.d_model,
                  {.rows = Attention::kRowsPhases | Swiglu::kRowsPhases,
                   .transposed = Attention::kTransposedPhases | Swiglu::kTransposedPhases,
                   .d_norm_output = Attention::kLastBackwardPhase | Swiglu::kLastBackwardPhase},
                  model.has_norm_behind());
}

void Stack::forward(const StepContext& step, const Between& between) const {
  TensorView residual = input(step), branch;  // nothing to add before the first block
  StepContext forward_only = step;
  forward_only.keep = false;
  for (size_t l = 0; l < blocks_.size(); ++l) {
    if (between) between(static_cast<int64_t>(l), residual, branch);
    step.before_forward(unit(l));
    if (step.keep) offload_.before_forward(step.device, static_cast<int64_t>(l));
    blocks_[l].forward(l < first_backward_ ? forward_only : step, stream_, residual, branch);
    if (step.keep) offload_.after_forward(static_cast<int64_t>(l));
    residual = blocks_[l].residual(step);
    branch = stream_.branch(step);
  }
  if (between) between(num_blocks(), residual, branch);
}

void Stack::forward_block(const StepContext& step, int64_t l) const {
  block(l).forward(step, stream_, input(step, l), {});
}

void Stack::backward(const StepContext& step) const {
  for (size_t l = blocks_.size(); l-- > first_backward_;) {
    step.before_backward(unit(l));
    offload_.before_backward(step.device, static_cast<int64_t>(l));
    // Nothing below wants the gradient of the lowest block in FP8.
    backward_block(step, static_cast<int64_t>(l), /*quantize=*/l > first_backward_);
    offload_.after_backward(static_cast<int64_t>(l));
    step.after_backward(unit(l));
  }
}

void Stack::backward_block(const StepContext& step, int64_t l, bool quantize) const {
  if (reruns_) forward_block(step, l);
  block(l).backward(step, stream_, quantize);
}

SampleNeeds Stack::sample_needs() const {
  SampleNeeds needs;
  for (const Block& block : blocks_) needs.add(block.sample_needs());
  return needs;
}

void Stack::sample_weights(const StepContext& step) const {
  for (const Block& block : blocks_) block.sample_weights(step);
}

}  // namespace parka
