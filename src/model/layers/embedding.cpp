#include "model/layers/embedding.h"

#include <cmath>
#include <vector>

#include "core/number_formats.h"
#include "kernels/ops/elementwise/embedding.h"

namespace parka {
namespace {

float scale_of(const ModelConfig& model, DType compute) {
  if (model.embedding_scale == EmbeddingScale::kNone) return 1.0f;
  const auto scale = static_cast<float>(std::sqrt(static_cast<double>(model.d_model)));
  return compute == DType::kBF16 ? decode_bf16(encode_bf16(scale)) : scale;
}

}  // namespace

void Embedding::add_parameter(ParameterList& list, const ModelConfig& model, bool decayed) {
  list.add("embedding", model.vocab_size, model.d_model,
           model.tie_embeddings ? ParameterRole::kTiedEmbedding : ParameterRole::kEmbedding, decayed,
           list.initial_std(model.d_model, 0));
}

Embedding::Embedding(const ModelConfig& model, const ParameterTable& table, BufferScope& scope)
    : vocab_size_(model.vocab_size),
      weight_(table.embedding),
      is_tied_(table.ties_head()),
      is_trainable_(table.is_trainable(table.embedding)),
      scale_(scale_of(model, scope.compute())) {
  tokens_ = scope.batch("tokens", DType::kI32, {scope.tokens()});
  if (scope.has_backward() && is_trainable_)
    order_ = scope.batch("token_order", DType::kI32, {scope.tokens(), kTokenRowInts});
}

void Embedding::load(const StepContext& step, const int32_t* tokens) const {
  const int64_t T = step.num_tokens();
  const TensorView ids = step.vector(tokens_, T);
  step.device.copy_to_device(ids.data, tokens, ids.bytes());
  if (!step.keep || !is_trainable_) return;
  const std::vector<TokenRow> order = embedding_order(tokens, T, vocab_size_);
  const TensorView rows = step.tensor(order_, T, kTokenRowInts);
  step.device.copy_to_device(rows.data, order.data(), rows.bytes());
}

void Embedding::forward(const StepContext& step, const TensorView& out) const {
  const TensorView ids = step.vector(tokens_, step.num_tokens());
  embedding_forward(step.device, {.ids = ids, .table = step.weights.plain(weight_), .out = out, .scale = scale_});
}

void Embedding::backward(const StepContext& step, const TensorView& d_out) const {
  if (!is_trainable_) return;
  const TensorView& table = step.gradient(weight_);
  const TensorView d_table =
      is_tied_ ? table : step.gradient_to_add_to(weight_).reshaped({table.dim[0], table.dim[1]});
  embedding_backward(step.device, {.order = step.tensor(order_, step.num_tokens(), kTokenRowInts),
                                   .d_out = d_out,
                                   .d_table = d_table,
                                   .scale = scale_});
}

}  // namespace parka
