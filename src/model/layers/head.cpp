#include "model/layers/head.h"

#include <algorithm>

#include "kernels/ops/elementwise/cross_entropy.h"
#include "kernels/ops/gemm/gemm.h"
#include "kernels/ops/quantize/quantize.h"

namespace parka {
namespace {

// The first rows of a matrix of codes whose scales are for the whole or for pieces of rows.
ScaledView first_rows(const ScaledView& x, int64_t count) {
  PARKA_REQUIRE(x.scaling == Scaling::kTensor || x.scaling == Scaling::kGroup);
  const TensorView scale = x.scaling == Scaling::kGroup ? x.scale.rows(0, count) : x.scale;
  return {x.data.rows(0, count), scale, x.scaling, x.group};
}

}  // namespace

void Head::add_parameters(ParameterList& list, const ModelConfig& model) {
  Norm::add_parameters(list, model.norm, model.d_model, "final_norm");
  if (model.tie_embeddings) return;
  list.add("head", model.vocab_size, model.d_model, ParameterRole::kHead, /*decayed=*/true,
           list.initial_std(model.d_model, 0));
}

Head::Head(const ModelConfig& model, const ParameterTable& table, int64_t logits_chunk_tokens, BufferScope& scope)
    : vocab_size_(model.vocab_size),
      width_(model.d_model),
      chunk_(std::min(scope.tokens(), logits_chunk_tokens)),
      weight_(table.head),
      is_fp8_(scope.formats().fp8_head && table.all[static_cast<size_t>(table.head)].quantized),
      trains_weight_(table.is_trainable(weight_)),
      has_backward_below_(table.first_trained_unit < table.head_unit() || table.is_trainable(table.final_norm)),
      norm_(model.norm, model, table, "final_norm") {
  targets_ = scope.batch("targets", DType::kI32, {scope.tokens()});
  losses_ = scope.batch("losses", DType::kF32, {scope.tokens()});
  norm_.declare_in_workspace(scope, "final", kWholeHead);
  logits_ = scope.workspace("logits", scope.compute(), {chunk_, vocab_size_ + padding()}, kHead);
  if (is_fp8_) declare_codes(scope);
}

void Head::declare_codes(BufferScope& scope) {
  const Format &activation = scope.formats().activation, &gradient = scope.formats().logits_gradient;
  const int64_t cols = vocab_size_ + padding();
  PARKA_REQUIRE(cols == head_copy_rows(vocab_size_));
  input_.row = scope.workspace("head_input", activation, chunk_, width_, kHead);
  if (!scope.has_backward()) return;
  d_logits_.row = scope.workspace("d_logits", gradient, chunk_, cols, kHead);
  if (!trains_weight_) return;
  input_.transposed = scope.workspace("head_input_t", activation, width_, chunk_, kHead, input_.row.scale);
  d_logits_.transposed = scope.workspace("d_logits_t", gradient, cols, chunk_, kHead, d_logits_.row.scale);
}

void Head::load(const StepContext& step, const int32_t* targets) const {
  const TensorView target = step.vector(targets_, step.num_tokens());
  step.device.copy_to_device(target.data, targets, target.bytes());
}

void Head::forward(const StepContext& step, const TensorView& residual, const TensorView& branch) const {
  norm_.forward(step, residual, branch);
}

ScaledView Head::weight(const StepContext& step) const {
  return is_fp8_ ? step.weights.quantized(step.device, weight_) : ScaledView(step.weights.plain(weight_));
}

TensorView Head::logits(const StepContext& step, const ScaledView& weight, int64_t first_row, int64_t count) const {
  const TensorView out = step.tensor(logits_, count, vocab_size_ + padding());
  const TensorView y = norm_.output(step).data.rows(first_row, count);
  if (!is_fp8_) {
    gemm(step.device, {.a = y, .b = weight, .out = out, .out_padding = padding()});
    return out;
  }
  const ScaledView x = step.matrix(input_.row, count, width_);
  const bool is_read_again = step.keep && trains_weight_;
  quantize(
      step.device,
      {.x = y, .out = x, .out_t = is_read_again ? step.matrix(input_.transposed, width_, count) : ScaledView{}});
  gemm(step.device, {.a = x, .b = weight, .out = out, .fast_accumulation = true});
  return out;
}

void Head::chunk_loss(const StepContext& step, const Chunk& chunk, const TensorView& logits,
                      const LossOptions& options, const GemmInput& d_logits) const {
  cross_entropy(step.device, {.logits = logits,
                              .targets = step.vector(targets_, step.num_tokens()).rows(chunk.begin, chunk.count),
                              .loss = losses(step).rows(chunk.begin, chunk.count),
                              .z_loss_value = {},
                              .z_loss = options.z_loss,
                              .grad_scale = options.grad_scale,
                              .write_gradient = step.keep,
                              .grad_factor = options.grad_factor,
                              .padding = padding(),
                              .d_logits = d_logits.row,
                              .d_logits_t = d_logits.transposed});
}

template <typename F>
void Head::for_each_chunk(const StepContext& step, const F& f) const {
  for (int64_t begin = 0; begin < step.num_tokens(); begin += chunk_) {
    f(Chunk{begin, std::min(chunk_, step.num_tokens() - begin)});
  }
}

void Head::loss(const StepContext& step) const {
  const ScaledView w = weight(step);
  for_each_chunk(step, [&](const Chunk& chunk) {
    chunk_loss(step, chunk, logits(step, w, chunk.begin, chunk.count), {.grad_scale = 1.0f}, {});
  });
}

GemmInput Head::d_logits_codes(const StepContext& step, int64_t count) const {
  const int64_t cols = vocab_size_ + padding();
  return {step.matrix(d_logits_.row, count, cols),
          trains_weight_ ? step.matrix(d_logits_.transposed, cols, count) : ScaledView{}};
}

void Head::loss_and_backward(const StepContext& step, const LossOptions& options, const ResidualStream& stream,
                             bool quantize) const {
  const TensorView d_y = stream.d_norm_output(step);
  loss_and_backward(step, options, d_y);
  if (!has_backward_below_) return;
  norm_.backward(step, d_y, /*d_residual=*/{}, stream.d_residual(step),
                 quantize ? stream.d_residual_codes(step) : GemmInput{});
}

void Head::loss_and_backward(const StepContext& step, const LossOptions& options, const TensorView& d_y) const {
  const ScaledView w = weight(step);
  const ScaledView w_t =
      is_fp8_ && has_backward_below_ ? step.weights.transposed(step.device, weight_) : ScaledView{};
  for_each_chunk(step, [&](const Chunk& chunk) {
    const TensorView rows = logits(step, w, chunk.begin, chunk.count);
    chunk_loss(step, chunk, rows, options, is_fp8_ ? d_logits_codes(step, chunk.count) : GemmInput{});
    if (is_fp8_) {
      chunk_backward_fp8(step, chunk, w_t, d_y.rows(chunk.begin, chunk.count));
    } else {
      chunk_backward(step, chunk, d_y.rows(chunk.begin, chunk.count));
    }
  });
}

void Head::chunk_backward(const StepContext& step, const Chunk& chunk, const TensorView& d_y) const {
  const TensorView d_logits = step.tensor(logits_, chunk.count, vocab_size_ + padding());
  if (has_backward_below_) {
    gemm(step.device, {.a = d_logits,
                       .b = step.weights.plain(weight_),
                       .b_transposed = true,
                       .out = d_y,
                       .a_padding = padding()});
  }
  if (!trains_weight_) return;
  gemm(step.device, {.a = d_logits,
                     .b = norm_.output(step).data.rows(chunk.begin, chunk.count),
                     .a_transposed = true,
                     .b_transposed = true,
                     .out = step.gradient(weight_),
                     .accumulate = adds_to_gradient(step, chunk),
                     .a_padding = padding()});
}

void Head::chunk_backward_fp8(const StepContext& step, const Chunk& chunk, const ScaledView& weight_t,
                              const TensorView& d_y) const {
  const GemmInput d_logits = d_logits_codes(step, chunk.count);
  // Without fast accumulation: most terms of this sum are small beside the target's, and many.
  if (has_backward_below_) gemm(step.device, {.a = d_logits.row, .b = weight_t, .out = d_y});
  if (!trains_weight_) return;
  gemm(step.device, {.a = first_rows(d_logits.transposed, vocab_size_),
                     .b = step.matrix(input_.transposed, width_, chunk.count),
                     .out = step.gradient(weight_),
                     .accumulate = adds_to_gradient(step, chunk)});
}

}  // namespace parka
