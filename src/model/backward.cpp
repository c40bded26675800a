#include <algorithm>
#include <cmath>

#include "kernels/ops.h"
#include "model/pass.h"

namespace parka {

TensorView Model::Pass::gradient_to_add_to(Device& device, int weight) const {
  if (weight < 0) return {};
  const TensorView& g = (*gradients_)[weight];
  if (accumulation_ == Accumulation::kBegin) device.fill_zero(g.data, g.bytes());
  return g.dim[0] == 1 ? g.reshaped({g.dim[1]}) : g;
}

// The gradient that flows into a branch (FFN or attention): the residual stream's, in FP8 where GEMMs are.
Model::Pass::GemmInput Model::Pass::branch_gradient() const {
  const BackwardBuffers& w = activations_.backward;
  const int64_t T = num_tokens_, d = config_.d_model;
  if (!formats_.fp8_gemm) return {tensor(w.d_residual, T, d), {}};
  return {matrix(w.d_branch, T, d), matrix(w.d_branch_t, d, T)};
}

void Model::Pass::input_gradient(Device& device, const GemmInput& d_y, int weight, const TensorView& d_x) {
  if (formats_.fp8_gemm) {
    gemm(device, {.a = d_y.row,
                  .b = weights_->transposed(device, weight),
                  .out = d_x,
                  .fast_accumulation = precision_.fast_input_gradient});
  } else {
    gemm(device, {.a = d_y.row, .b = weights_->plain(weight), .b_transposed = true, .out = d_x});
  }
}

void Model::Pass::weight_gradient(Device& device, const GemmInput& d_y, const GemmInput& x, int weight) {
  const TensorView out = (*gradients_)[weight];
  const bool accumulate = accumulation_ == Accumulation::kContinue;
  if (formats_.fp8_gemm) {
    gemm(device, {.a = d_y.transposed,
                  .b = x.transposed,
                  .out = out,
                  .accumulate = accumulate,
                  .fast_accumulation = precision_.fast_weight_gradient});
  } else {
    gemm(device, {.a = d_y.row,
                  .b = x.row,
                  .a_transposed = true,
                  .b_transposed = true,
                  .out = out,
                  .accumulate = accumulate});
  }
}

// The output of a norm as its GEMM's weight gradient wants it: what forward kept, or made again.
Model::Pass::GemmInput Model::Pass::norm_output(Device& device, const NormBuffers& norm, int weight) {
  const int64_t T = num_tokens_, d = config_.d_model;
  const GemmInput y = {formats_.fp8_gemm ? ScaledView{} : matrix(norm.y, T, d), matrix(norm.y_t, d, T)};
  if (precision_.save_norm_output) return y;
  const ScaledView x = norm.x.valid() ? matrix(norm.x, T, d) : ScaledView(tensor(norm.residual, T, d));
  norm_recompute(device, {.kind = config_.norm,
                          .x = x,
                          .weight = weights_->plain(weight),
                          .mean = vector(norm.mean, T),
                          .rstd = vector(norm.rstd, T),
                          .y = y.row,
                          .y_t = y.transposed});
  return y;
}

void Model::Pass::backward_norm(Device& device, const NormBuffers& norm, int weight, bool quantize_result) {
  const BackwardBuffers& w = activations_.backward;
  const int64_t T = num_tokens_, d = config_.d_model;
  const TensorView d_residual = tensor(w.d_residual, T, d);
  const GemmInput quantized = quantize_result && formats_.fp8_gemm ? branch_gradient() : GemmInput{};
  norm_backward(device, {.kind = config_.norm,
                         .x = norm.x.valid() ? matrix(norm.x, T, d) : ScaledView(tensor(norm.residual, T, d)),
                         .weight = weights_->plain(weight),
                         .mean = vector(norm.mean, T),
                         .rstd = vector(norm.rstd, T),
                         .d_y = tensor(w.d_norm_output, T, d),
                         .d_residual = d_residual,
                         .d_residual_out = d_residual,
                         .d_quantized = quantized.row,
                         .d_quantized_t = quantized.transposed,
                         .d_weight = gradient_to_add_to(device, weight)});
}

void Model::Pass::backward_head(Device& device, const LossOptions& options) {
  const BackwardBuffers& w = activations_.backward;
  const int64_t T = num_tokens_, d = config_.d_model;
  const TensorView y = tensor(activations_.final_output, T, d);
  const TensorView d_y = tensor(w.d_norm_output, T, d);
  for (int64_t begin = 0; begin < T; begin += activations_.logits_chunk) {
    const int64_t count = std::min(activations_.logits_chunk, T - begin);
    cross_entropy_chunk(device, begin, count, options, true);
    const TensorView d_logits = tensor(activations_.logits, count, config_.vocab_size);
    gemm(device,
         {.a = d_logits, .b = weights_->plain(table_->head), .b_transposed = true, .out = d_y.rows(begin, count)});
    gemm(device, {.a = d_logits,
                  .b = y.rows(begin, count),
                  .a_transposed = true,
                  .b_transposed = true,
                  .out = (*gradients_)[table_->head],
                  .accumulate = begin > 0 || accumulation_ == Accumulation::kContinue});
  }
  const GemmInput quantized = formats_.fp8_gemm ? branch_gradient() : GemmInput{};
  norm_backward(device, {.kind = config_.norm,
                         .x = tensor(activations_.final_input, T, d),
                         .weight = weights_->plain(table_->final_norm),
                         .mean = vector(activations_.final_mean, T),
                         .rstd = vector(activations_.final_rstd, T),
                         .d_y = d_y,
                         .d_residual = {},
                         .d_residual_out = tensor(w.d_residual, T, d),
                         .d_quantized = quantized.row,
                         .d_quantized_t = quantized.transposed,
                         .d_weight = gradient_to_add_to(device, table_->final_norm)});
}

void Model::Pass::backward_ffn(Device& device, int64_t l) {
  const BlockBuffers& b = activations_.blocks[l];
  const BlockParameters& p = table_->blocks[l];
  const BackwardBuffers& w = activations_.backward;
  const int64_t T = num_tokens_, d = config_.d_model, f = config_.d_ffn;
  const GemmInput d_out = branch_gradient();
  sample(device, l, QuantizedTensor::kDownGradient, tensor(w.d_residual, T, d), d_out.row);

  const TensorView d_product = tensor(w.d_product, T, f);
  input_gradient(device, d_out, p.down, d_product);
  const GemmInput product = {formats_.fp8_gemm ? ScaledView{} : matrix(b.product, T, f), matrix(b.product_t, f, T)};
  const GemmInput d_up_gate = {matrix(w.d_up_gate, T, 2 * f), matrix(w.d_up_gate_t, 2 * f, T)};
  const bool recompute = !precision_.save_product;
  swiglu_backward(device, {.up_gate = matrix(b.up_gate, T, 2 * f),
                           .silu = matrix(b.silu, T, f),
                           .d_product = d_product,
                           .d_up_gate = d_up_gate.row,
                           .d_up_gate_t = d_up_gate.transposed,
                           .product = recompute ? product.row : ScaledView{},
                           .product_t = recompute ? product.transposed : ScaledView{}});
  sample_up_gate_gradient(device, l);
  weight_gradient(device, d_out, product, p.down);
  input_gradient(device, d_up_gate, p.up_gate, tensor(w.d_norm_output, T, d));
  weight_gradient(device, d_up_gate, norm_output(device, b.ffn_norm, p.ffn_norm), p.up_gate);
  backward_norm(device, b.ffn_norm, p.ffn_norm, /*quantize_result=*/true);
}

void Model::Pass::backward_attention(Device& device, int64_t l) {
  const BlockBuffers& b = activations_.blocks[l];
  const BlockParameters& p = table_->blocks[l];
  const BackwardBuffers& w = activations_.backward;
  const int64_t T = num_tokens_, d = config_.d_model, d_qkv = config_.d_qkv();
  const int64_t d_heads = config_.d_heads();
  const GemmInput d_out = branch_gradient();
  sample(device, l, QuantizedTensor::kAttentionOutGradient, tensor(w.d_residual, T, d), d_out.row);

  const TensorView qkv = tensor(b.qkv, T, d_qkv);
  if (b.qkv_saved.valid()) quantize(device, {.x = matrix(b.qkv_saved, T, d_qkv), .out = qkv, .out_t = {}});
  const TensorView attention = tensor(b.attention, T, d_heads);
  const bool kept_fp8 = precision_.attention_output == Storage::kFp8;
  if (kept_fp8) quantize(device, {.x = matrix(b.attention_fp8, T, d_heads), .out = attention, .out_t = {}});

  const TensorView d_attention = tensor(w.d_attention, T, d_heads);
  input_gradient(device, d_out, p.attention_out, d_attention);
  GemmInput attention_input = {attention, {}};
  if (formats_.fp8_gemm) {
    attention_input.transposed = matrix(b.attention_fp8_t, d_heads, T);
    // From the FP8 copy code for code, or from the BF16 one with the scale that forward kept: the same codes.
    quantize(device, {.x = kept_fp8 ? matrix(b.attention_fp8, T, d_heads) : ScaledView(attention),
                      .out = {},
                      .out_t = attention_input.transposed,
                      .scale_given = b.attention_fp8_t.format.scaling == Scaling::kTensor});
  }
  weight_gradient(device, d_out, attention_input, p.attention_out);

  const TensorView d_qkv_plain = tensor(w.d_qkv, T, d_qkv), d_qkv_amax = vector(w.d_qkv_amax, 1);
  attention_backward(device,
                     {.qkv = qkv,
                      .out = attention,
                      .d_out = d_attention,
                      .lse = log_sum_exp(b),
                      .d_qkv = d_qkv_plain,
                      .sequence_length = shape_.sequence_length,
                      .num_heads = config_.num_heads,
                      .num_kv_heads = config_.kv_heads(),
                      .scale = 1.0f / std::sqrt(static_cast<float>(config_.head_dim())),
                      .first_key = first_keys(),
                      .cos_sin = cos_sin_.rows(0, shape_.sequence_length),
                      .d_qkv_amax = d_qkv_amax,
                      .scratch = w.attention_scratch.valid() ? (*arena_)[w.attention_scratch] : TensorView()});
  GemmInput d_qkv_input = {d_qkv_plain, {}};
  if (formats_.fp8_gemm) {
    d_qkv_input = {matrix(w.d_qkv_fp8, T, d_qkv), matrix(w.d_qkv_fp8_t, d_qkv, T)};
    quantize(device,
             {.x = d_qkv_plain, .out = d_qkv_input.row, .out_t = d_qkv_input.transposed, .amax = d_qkv_amax});
    sample(device, l, QuantizedTensor::kQkvGradient, d_qkv_plain, d_qkv_input.row);
  }
  input_gradient(device, d_qkv_input, p.qkv, tensor(w.d_norm_output, T, d));
  weight_gradient(device, d_qkv_input, norm_output(device, b.attention_norm, p.attention_norm), p.qkv);
  // Nothing below the first block wants the gradient in FP8: the embedding takes it as it is.
  backward_norm(device, b.attention_norm, p.attention_norm, /*quantize_result=*/l > 0);
}

void Model::Pass::loss_and_backward(Device& device, const LossOptions& options,
                                    const std::vector<TensorView>& gradients, Accumulation accumulation) {
  PARKA_REQUIRE(keep_);
  gradients_ = &gradients;
  accumulation_ = accumulation;
  before_backward(device, table_->head_unit());
  backward_head(device, options);
  after_backward(device, table_->head_unit());
  if (!options.loss_sum.empty()) {
    add_sum(device, {.x = vector(activations_.losses, num_tokens_), .total = options.loss_sum});
  }
  device.section(StepSection::kBlockBackward);
  for (int64_t l = config_.num_layers - 1; l >= 0; --l) {
    before_backward(device, table_->block_unit(l));
    offload().before_backward(device, l);
    if (precision_.recompute == Recompute::kBlock) {
      forward_block(device, l, tensor(activations_.blocks[l].attention_norm.residual, num_tokens_, config_.d_model),
                    {});
    }
    backward_ffn(device, l);
    backward_attention(device, l);
    offload().after_backward(l);
    after_backward(device, table_->block_unit(l));
  }
  device.section(StepSection::kEmbedding);
  before_backward(device, 0);
  const bool has_head_gradient = table_->ties_head();  // which a GEMM has written already
  embedding_backward(device, {.order = tensor(activations_.token_order, num_tokens_, kTokenRowInts),
                              .d_out = tensor(activations_.backward.d_residual, num_tokens_, config_.d_model),
                              .d_table = has_head_gradient ? (*gradients_)[table_->embedding]
                                                           : gradient_to_add_to(device, table_->embedding)});
  after_backward(device, 0);
}

}  // namespace parka
