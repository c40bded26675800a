#include <algorithm>

#include "kernels/ops.h"
#include "model/pass.h"

namespace parka {

Model::Pass::Pass(const ModelConfig& config, const PrecisionConfig& precision, const BatchShape& shape,
                  int64_t logits_chunk_tokens, Activations::Purpose purpose, MemoryPlan& plan)
    : config_(config),
      precision_(precision),
      formats_(precision),
      max_shape_(shape),
      activations_(config, precision, shape, logits_chunk_tokens, purpose, plan) {}

void Model::Pass::bind(Device& device, const Arena& arena, const ParameterTable& table, const ModelWeights& weights,
                       const TensorView& cos_sin) {
  activations_.offload.bind(device, arena);
  arena_ = &arena;
  table_ = &table;
  weights_ = &weights;
  cos_sin_ = cos_sin;
}

void Model::Pass::before_forward(Device& device, int unit) const {
  if (hooks_ != nullptr) hooks_->before_forward(device, unit);
}

void Model::Pass::before_backward(Device& device, int unit) const {
  if (hooks_ != nullptr) hooks_->before_backward(device, unit);
}

void Model::Pass::after_backward(Device& device, int unit) const {
  if (hooks_ != nullptr) hooks_->after_backward(device, unit);
}

TensorView Model::Pass::tensor(TensorId id, int64_t rows, int64_t cols) const {
  if (!id.valid()) return {};
  const TensorView whole = (*arena_)[id];
  PARKA_REQUIRE(rows * cols <= whole.numel());
  return {whole.data, whole.dtype, {rows, cols}};
}

TensorView Model::Pass::vector(TensorId id, int64_t count) const {
  if (!id.valid()) return {};
  const TensorView whole = (*arena_)[id];
  PARKA_REQUIRE(count <= whole.numel());
  return {whole.data, whole.dtype, {count}};
}

TensorView Model::Pass::log_sum_exp(const BlockBuffers& block) const {
  const TensorView whole = (*arena_)[block.lse];
  return {whole.data, whole.dtype, {shape_.num_sequences, config_.num_heads, shape_.sequence_length}};
}

TensorView Model::Pass::first_keys() const {
  return shape_.separate_documents ? vector(activations_.first_keys, num_tokens_) : TensorView();
}

void Model::Pass::load(Device& device, const Batch& batch, bool keep) {
  shape_ = batch.shape;
  num_tokens_ = shape_.num_tokens();
  keep_ = keep;
  cache_ = nullptr;
  PARKA_REQUIRE(num_tokens_ <= max_shape_.num_tokens() && shape_.sequence_length <= max_shape_.sequence_length);
  PARKA_REQUIRE((batch.first_keys != nullptr) == shape_.separate_documents);
  if (device.op_recorder() != nullptr) return;  // which would read nothing
  const TensorView tokens = vector(activations_.tokens, num_tokens_);
  device.copy_to_device(tokens.data, batch.tokens, tokens.bytes());
  const TensorView targets = vector(activations_.targets, num_tokens_);
  device.copy_to_device(targets.data, batch.targets, targets.bytes());
  if (shape_.separate_documents) {
    PARKA_REQUIRE(max_shape_.separate_documents);
    device.copy_to_device(first_keys().data, batch.first_keys, first_keys().bytes());
  }
  if (!keep) return;
  const std::vector<TokenRow> order = embedding_order(batch.tokens, num_tokens_, config_.vocab_size);
  const TensorView token_order = tensor(activations_.token_order, num_tokens_, kTokenRowInts);
  device.copy_to_device(token_order.data, order.data(), token_order.bytes());
}

void Model::Pass::forward(Device& device) {
  device.section(StepSection::kEmbedding);
  before_forward(device, 0);
  const TensorView tokens = vector(activations_.tokens, num_tokens_);
  TensorView residual = tensor(activations_.blocks.front().attention_norm.residual, num_tokens_, config_.d_model);
  embedding_forward(device, {.ids = tokens, .table = weights_->plain(table_->embedding), .out = residual});
  TensorView branch;  // nothing to add before the first block
  device.section(StepSection::kBlockForward);
  for (int64_t l = 0; l < config_.num_layers; ++l) {
    before_forward(device, table_->block_unit(l));
    if (keep_) offload().before_forward(device, l);
    forward_block(device, l, residual, branch);
    if (keep_) offload().after_forward(l);
    residual = tensor(activations_.blocks[l].ffn_norm.residual, num_tokens_, config_.d_model);
    branch = tensor(activations_.branch, num_tokens_, config_.d_model);
  }
  final_norm(device);
}

void Model::Pass::norm_into(Device& device, const NormBuffers& norm, int weight, const TensorView& residual,
                            const TensorView& branch) {
  const int64_t d = config_.d_model;
  norm_forward(device,
               {.kind = config_.norm,
                .eps = static_cast<float>(config_.norm_eps),
                .residual = residual,
                .branch = branch,
                .weight = weights_->plain(weight),
                .residual_out = tensor(norm.residual, num_tokens_, d),
                .x = matrix(norm.x, num_tokens_, d),
                .y = matrix(norm.y, num_tokens_, d),
                // Not kept: backward makes it again.
                .y_t = keep_ && precision_.save_norm_output ? matrix(norm.y_t, d, num_tokens_) : ScaledView{},
                .mean = vector(norm.mean, num_tokens_),
                .rstd = vector(norm.rstd, num_tokens_)});
}

void Model::Pass::linear(Device& device, const ScaledView& x, int weight, const TensorView& out) {
  gemm(device, {.a = x,
                .b = formats_.fp8_gemm ? weights_->quantized(device, weight) : ScaledView(weights_->plain(weight)),
                .out = out,
                .fast_accumulation = precision_.fast_forward});
}

void Model::Pass::forward_block(Device& device, int64_t l, const TensorView& residual, const TensorView& branch) {
  const BlockBuffers& b = activations_.blocks[l];
  const BlockParameters& p = table_->blocks[l];
  const int64_t T = num_tokens_, d = config_.d_model, f = config_.d_ffn;
  const int64_t d_heads = config_.d_heads(), d_qkv = config_.d_qkv();
  const TensorView branch_out = tensor(activations_.branch, T, d);

  norm_into(device, b.attention_norm, p.attention_norm, residual, branch);
  sample_norm(device, l, b.attention_norm, p.attention_norm, QuantizedTensor::kAttentionNormInput,
              QuantizedTensor::kAttentionNormOutput);
  const TensorView qkv = tensor(b.qkv, T, d_qkv);
  linear(device, matrix(b.attention_norm.y, T, d), p.qkv, qkv);
  const ScaledView qkv_saved = matrix(b.qkv_saved, T, d_qkv);
  const TensorView qkv_sample = sample_turned(device, qkv, qkv_saved);
  rope_forward(device, {.qkv = qkv,
                        .cos_sin = rotations(),
                        .num_heads = config_.num_heads,
                        .num_kv_heads = config_.kv_heads(),
                        .saved = qkv_saved});
  sample(device, l, QuantizedTensor::kQkv, qkv_sample, qkv_saved);
  const TensorView attention = tensor(b.attention, T, d_heads);
  const TensorView attention_amax = vector(activations_.attention_amax, 1);
  if (cache_ != nullptr) append_to_cache(device, l, qkv);
  if (attends_to_cache()) {
    attend_to_cache(device, l, qkv, attention, attention_amax);
  } else {
    attention_forward(device, {.qkv = qkv,
                               .out = attention,
                               .lse = log_sum_exp(b),
                               .sequence_length = shape_.sequence_length,
                               .num_heads = config_.num_heads,
                               .num_kv_heads = config_.kv_heads(),
                               .scale = attention_scale(),
                               .out_amax = attention_amax,
                               .first_key = first_keys()});
  }
  ScaledView attention_input = attention;
  if (formats_.fp8_gemm) {
    attention_input = matrix(b.attention_fp8, T, d_heads);
    quantize(device, {.x = attention, .out = attention_input, .out_t = {}, .amax = attention_amax});
    sample(device, l, QuantizedTensor::kAttention, attention, attention_input);
  }
  linear(device, attention_input, p.attention_out, branch_out);

  norm_into(device, b.ffn_norm, p.ffn_norm, tensor(b.attention_norm.residual, T, d), branch_out);
  sample_norm(device, l, b.ffn_norm, p.ffn_norm, QuantizedTensor::kFfnNormInput, QuantizedTensor::kFfnNormOutput);
  const ScaledView up_gate = matrix(b.up_gate, T, 2 * f);
  const bool fp8_up_gate = b.up_gate_plain.valid();
  const TensorView up_gate_plain = fp8_up_gate ? tensor(b.up_gate_plain, T, 2 * f) : up_gate.data;
  linear(device, matrix(b.ffn_norm.y, T, d), p.up_gate, up_gate_plain);
  const ScaledView product = matrix(b.product, T, f);
  swiglu_forward(device, {.up_gate = up_gate,
                          .silu = matrix(b.silu, T, f),
                          .product = product,
                          .product_t = keep_ && precision_.save_product ? matrix(b.product_t, f, T) : ScaledView{},
                          .up_gate_plain = fp8_up_gate ? up_gate_plain : TensorView{}});
  sample_ffn(device, l, up_gate_plain);
  linear(device, product, p.down, branch_out);
}

void Model::Pass::final_norm(Device& device) {
  device.section(StepSection::kHead);
  before_forward(device, table_->head_unit());
  const int64_t T = num_tokens_, d = config_.d_model;
  norm_forward(device, {.kind = config_.norm,
                        .eps = static_cast<float>(config_.norm_eps),
                        .residual = tensor(activations_.blocks.back().ffn_norm.residual, T, d),
                        .branch = tensor(activations_.branch, T, d),
                        .weight = weights_->plain(table_->final_norm),
                        .residual_out = tensor(activations_.final_input, T, d),
                        .x = {},
                        .y = tensor(activations_.final_output, T, d),
                        .y_t = {},
                        .mean = vector(activations_.final_mean, T),
                        .rstd = vector(activations_.final_rstd, T)});
}

TensorView Model::Pass::logits(Device& device, int64_t first_row, int64_t count) {
  const TensorView out = tensor(activations_.logits, count, config_.vocab_size);
  gemm(device, {.a = tensor(activations_.final_output, num_tokens_, config_.d_model).rows(first_row, count),
                .b = weights_->plain(table_->head),
                .out = out});
  return out;
}

void Model::Pass::cross_entropy_chunk(Device& device, int64_t begin, int64_t count, const LossOptions& options,
                                      bool gradient) {
  cross_entropy(device, {.logits = logits(device, begin, count),
                         .targets = vector(activations_.targets, num_tokens_).rows(begin, count),
                         .loss = vector(activations_.losses, num_tokens_).rows(begin, count),
                         .z_loss_value = {},
                         .z_loss = options.z_loss,
                         .grad_scale = options.grad_scale,
                         .write_gradient = gradient,
                         .grad_factor = options.grad_factor});
}

void Model::Pass::loss(Device& device) {
  for (int64_t begin = 0; begin < num_tokens_; begin += activations_.logits_chunk) {
    const int64_t count = std::min(activations_.logits_chunk, num_tokens_ - begin);
    cross_entropy_chunk(device, begin, count, {.grad_scale = 1.0f}, false);
  }
}

std::vector<float> Model::Pass::losses(Device& device) const {
  std::vector<float> host(static_cast<size_t>(num_tokens_));
  device.copy_to_host(host.data(), (*arena_)[activations_.losses].data, num_tokens_ * int64_t{sizeof(float)});
  return host;
}

}  // namespace parka
