#include "model/layers/stack.h"

#include <algorithm>

namespace parka {

void Stack::add_parameters(ParameterList& list, const ModelConfig& model, std::string_view name, bool has_units) {
  for (int64_t l = 0; l < model.num_layers; ++l) {
    if (has_units) list.begin_unit();
    add_block_parameters(list, model, name, l);
  }
}

template <typename F>
auto Stack::with_ffn(const ModelConfig& model, int64_t l, const F& f) {
  if (model.is_encoder()) return f(std::in_place_type<Mlp>, model);
  if (model.has_experts(l)) return f(std::in_place_type<Moe>, model);
  return f(std::in_place_type<Swiglu>, model.moe.exists() ? model.with_one_ffn(model.moe.dense_width) : model);
}

void Stack::add_block_parameters(ParameterList& list, const ModelConfig& model, std::string_view name, int64_t l) {
  const std::string prefix = block_prefix(name, l);
  const double depth = 2.0 * static_cast<double>(l + 1);
  Branch<Attention>::add_parameters(list, model, prefix, depth);
  with_ffn(model, l, [&]<typename Inner>(std::in_place_type_t<Inner>, const ModelConfig& of_ffn) {
    Branch<Inner>::add_parameters(list, of_ffn, prefix, depth);
  });
}

Stack::Stack(const ModelConfig& model, const ParameterTable& table, std::string_view name, int first_unit,
             BufferScope& scope)
    : first_unit_(first_unit),
      first_backward_(scope.purpose() == BufferScope::Purpose::kForwardOnly
                          ? model.num_layers
                          : std::clamp<int64_t>(table.first_trained_unit - first_unit, 0, model.num_layers)),
      reruns_(scope.precision().recompute == Recompute::kBlock),
      router_loads_(model),
      offload_(model.num_layers, scope.has_backward() ? scope.precision().offload_blocks : 0, first_backward_) {
  for (int64_t l = 0; l < model.num_layers; ++l) {
    scope.enter_block(name, l, offload_, /*goes_backward=*/l >= first_backward_);
    const std::string prefix = block_prefix(name, l);
    Block block{Branch<Attention>(model, scope.precision(), table, l, prefix),
                with_ffn(model, l, [&]<typename Inner>(std::in_place_type_t<Inner>, const ModelConfig& of_ffn) {
                  return FeedForward(Branch<Inner>(of_ffn, scope.precision(), table, l, prefix));
                })};
    block.attention.declare(scope, /*is_first_of_block=*/true);
    std::visit([&](auto& ffn) { ffn.declare(scope, /*is_first_of_block=*/false); }, block.ffn);
    blocks_.push_back(std::move(block));
    offload_.add_to_buffer(l, scope.kept_in_block());
  }
  scope.leave_blocks();
  router_loads_.declare(scope);
  bool any_fp8 = false, any_plain = false;
  for (int64_t l = 0; l < num_blocks(); ++l) {
    for (const bool is_fp8 : {block(l).attention.reads_fp8_gradient(), reads_fp8_gradient(l)}) {
      (is_fp8 ? any_fp8 : any_plain) = true;
    }
  }
  // A shared expert goes through all phases of backward before the others do.
  const PhaseMask shared = model.moe.shared_width > 0 ? Moe::kBackwardPhases : PhaseMask{0};
  stream_.declare(scope, model.d_model,
                  {.rows = Attention::kRowsPhases | Swiglu::kRowsPhases | shared,
                   .transposed = Attention::kTransposedPhases | Swiglu::kTransposedPhases | shared,
                   .d_norm_output = Attention::kLastBackwardPhase | Swiglu::kLastBackwardPhase | shared},
                  model.has_post_norm(), any_fp8, any_plain);
}

// Attention adds what comes in to the residual stream, and the second branch adds what attention leaves.
void Stack::forward(const StepContext& step, const Between& between) const {
  step.weights.forget_decoded();
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
  if (step.router_losses.is_pooled) router_loads_.add_up(step);
}

void Stack::forward_block(const StepContext& step, int64_t l, bool wants_branch) const {
  block(l).attention.forward(step, stream_, input(step, l), {});
  const auto forward = [&](const auto& ffn) {
    ffn.forward(step, stream_, input(step, l), stream_.branch(step), wants_branch);
  };
  std::visit(forward, block(l).ffn);
}

void Stack::backward(const StepContext& step) const {
  step.weights.forget_decoded();  // the head has taken their memory
  for (int64_t l = num_blocks(); l-- > first_backward_;) {
    step.before_backward(unit(l));
    offload_.before_backward(step.device, l);
    // Nothing below wants the gradient of the lowest block in FP8.
    backward_block(step, l, /*quantize=*/l > first_backward_ && reads_fp8_gradient(l - 1));
    offload_.after_backward(l);
    step.after_backward(unit(l));
  }
}

void Stack::backward_block(const StepContext& step, int64_t l, bool quantize) const {
  if (reruns_) forward_block(step, l, /*wants_branch=*/false);  // the blocks above have read it
  const auto& attention = block(l).attention;
  std::visit([&](const auto& ffn) { ffn.backward(step, stream_, attention.reads_fp8_gradient()); }, block(l).ffn);
  step.weights.forget_decoded();  // attention takes their memory
  attention.backward(step, stream_, quantize);
}

}  // namespace parka
