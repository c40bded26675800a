#include "model/layers/head.h"

#include <algorithm>

#include "kernels/ops/cross_entropy.h"
#include "kernels/ops/gemm.h"

namespace parka {

void Head::add_parameters(ParameterList& list, const ModelConfig& model) {
  Norm::add_parameters(list, model.norm, model.d_model, "final_norm");
  if (model.tie_embeddings) return;
  list.add("head", model.vocab_size, model.d_model, ParameterRole::kHead, /*decayed=*/true,
           list.initial_std(model.d_model, 0));
}

Head::Head(const ModelConfig& model, const ParameterTable& table, int64_t logits_chunk_tokens, BufferScope& scope)
    : vocab_size_(model.vocab_size),
      chunk_(std::min(scope.tokens(), logits_chunk_tokens)),
      weight_(table.head),
      norm_(model.norm, model, table, "final_norm") {
  targets_ = scope.batch("targets", DType::kI32, {scope.tokens()});
  losses_ = scope.batch("losses", DType::kF32, {scope.tokens()});
  norm_.declare_in_workspace(scope, "final", kHead);
  logits_ = scope.workspace("logits", scope.compute(), {chunk_, vocab_size_ + padding()}, kHead);
}

void Head::load(const StepContext& step, const int32_t* targets) const {
  const TensorView target = step.vector(targets_, step.num_tokens());
  step.device.copy_to_device(target.data, targets, target.bytes());
}

void Head::forward(const StepContext& step, const TensorView& residual, const TensorView& branch) const {
  norm_.forward(step, residual, branch);
}

TensorView Head::logits(const StepContext& step, int64_t first_row, int64_t count) const {
  const TensorView out = step.tensor(logits_, count, vocab_size_ + padding());
  gemm(step.device, {.a = norm_.output(step).data.rows(first_row, count),
                     .b = step.weights.plain(weight_),
                     .out = out,
                     .out_padding = padding()});
  return out;
}

void Head::chunk_loss(const StepContext& step, int64_t begin, int64_t count, const LossOptions& options,
                      bool gradient) const {
  cross_entropy(step.device, {.logits = logits(step, begin, count),
                              .targets = step.vector(targets_, step.num_tokens()).rows(begin, count),
                              .loss = losses(step).rows(begin, count),
                              .z_loss_value = {},
                              .z_loss = options.z_loss,
                              .grad_scale = options.grad_scale,
                              .write_gradient = gradient,
                              .grad_factor = options.grad_factor,
                              .padding = padding()});
}

void Head::loss(const StepContext& step) const {
  for (int64_t begin = 0; begin < step.num_tokens(); begin += chunk_) {
    const int64_t count = std::min(chunk_, step.num_tokens() - begin);
    chunk_loss(step, begin, count, {.grad_scale = 1.0f}, false);
  }
}

void Head::loss_and_backward(const StepContext& step, const LossOptions& options,
                             const ResidualStream& stream) const {
  const TensorView y = norm_.output(step).data, d_y = stream.d_norm_output(step);
  for (int64_t begin = 0; begin < step.num_tokens(); begin += chunk_) {
    const int64_t count = std::min(chunk_, step.num_tokens() - begin);
    chunk_loss(step, begin, count, options, true);
    const TensorView d_logits = step.tensor(logits_, count, vocab_size_ + padding());
    gemm(step.device, {.a = d_logits,
                       .b = step.weights.plain(weight_),
                       .b_transposed = true,
                       .out = d_y.rows(begin, count),
                       .a_padding = padding()});
    gemm(step.device, {.a = d_logits,
                       .b = y.rows(begin, count),
                       .a_transposed = true,
                       .b_transposed = true,
                       .out = step.gradient(weight_),
                       .accumulate = begin > 0 || step.adds_to_gradients(),
                       .a_padding = padding()});
  }
  norm_.backward(step, d_y, /*d_residual=*/{}, stream.d_residual(step), stream.d_residual_codes(step));
}

}  // namespace parka
