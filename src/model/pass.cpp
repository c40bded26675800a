#include "model/pass.h"

#include <algorithm>
#include <vector>

#include "kernels/ops/elementwise/embedding.h"
#include "kernels/ops/optimizer/grad_norm.h"

namespace parka {
namespace {

using Purpose = BufferScope::Purpose;

Purpose purpose_of_blocks(const ParameterTable& table, Purpose purpose) {
  return table.side.exists() && purpose == Purpose::kTraining ? Purpose::kForwardOnly : purpose;
}

}  // namespace

Model::Pass::Pass(const ModelConfig& model, const PrecisionConfig& precision, const ParameterTable& table,
                  const BatchShape& shape, int64_t logits_chunk_tokens, BufferScope::Purpose purpose,
                  MemoryPlan& plan)
    : Pass(model, precision, table, shape, logits_chunk_tokens,
           Scopes{BufferScope(precision, shape, purpose, plan),
                  BufferScope(precision, shape, purpose_of_blocks(table, purpose), plan)}) {}

Model::Pass::Pass(const ModelConfig& model, const PrecisionConfig& precision, const ParameterTable& table,
                  const BatchShape& shape, int64_t logits_chunk_tokens, Scopes&& scopes)
    : precision_(precision),
      max_shape_(shape),
      window_(model.sliding_window),
      head_unit_(table.head_unit()),
      first_trained_unit_(table.first_trained_unit),
      stack_(model, table, kDecoder, table.block_unit(0), scopes.blocks),
      embedding_(model, table, scopes.own),
      head_(model, table, logits_chunk_tokens, scopes.own) {
  BufferScope& scope = scopes.own;
  if (model.vision.exists() && shape.images_per_sequence > 0) images_.emplace(model, table, scope);
  if (table.side.exists()) side_.emplace(model, table, scope);
  if (shape.separate_documents) first_keys_ = scope.batch("first_keys", DType::kI32, {shape.num_whole_tokens()});
  if (window_ > 0 && window_ < shape.whole_length()) {
    windowed_first_keys_ = scope.batch("windowed_first_keys", DType::kI32, {shape.num_whole_tokens()});
  }
  if (table.lora_dropout > 0 && scope.has_backward()) {
    dropout_position_ = scope.batch("dropout_position", DType::kI32, {3});
  }
}

void Model::Pass::bind(Device& device, const Arena& arena, const ModelWeights& weights, const RotaryTables& tables,
                       const RotaryTables& side_tables) {
  stack_.bind(device, arena);
  if (images_) images_->bind(device, arena);
  arena_ = &arena;
  weights_ = &weights;
  tables_ = tables;
  side_tables_ = side_tables;
}

Positions Model::Pass::positions(const TensorView& table, const TensorView& first_keys,
                                 const BatchShape& shape) const {
  const int64_t S = shape.sequence_length;
  if (shape.context_size == 1) return {.rotations = table.rows(0, S), .first_keys = first_keys};
  return {table.rows(context_->place() * S, S), table.rows(0, shape.whole_length()), first_keys};
}

StepContext Model::Pass::load(Device& device, const Batch& batch, bool keep) const {
  const BatchShape& shape = batch.shape;
  PARKA_REQUIRE(shape.num_tokens() <= max_shape_.num_tokens() &&
                shape.sequence_length <= max_shape_.sequence_length);
  PARKA_REQUIRE((batch.first_keys != nullptr) == shape.separate_documents);
  PARKA_REQUIRE(shape.context_size == max_shape_.context_size);
  PARKA_REQUIRE(shape.context_size == 1 || (context_ != nullptr && shape.padding == 0));
  PARKA_REQUIRE(shape.num_images() <= max_shape_.num_images());
  PARKA_REQUIRE(!keep || !images_ || shape.num_images() > 0);  // all gradients are written
  StepContext step{.device = device, .arena = *arena_, .weights = *weights_, .hooks = hooks_};
  step.shape = shape;
  if (shape.context_size > 1) step.context = context_;
  step.keep = keep;
  PARKA_REQUIRE(!shape.separate_documents || max_shape_.separate_documents);
  load_first_keys(step, batch.first_keys);
  step.positions = positions(tables_.full, step.positions.first_keys, shape);
  step.windowed_positions = positions(tables_.windowed, step.windowed_positions.first_keys, shape);
  if (side_) {
    step.side_positions = positions(side_tables_.full, step.positions.first_keys, shape);
    step.side_windowed_positions = positions(side_tables_.windowed, step.windowed_positions.first_keys, shape);
  }
  if (keep && dropout_position_.valid()) step.dropout_position = (*arena_)[dropout_position_];
  if (device.op_recorder() != nullptr) return step;  // its memory is never read
  if (!step.dropout_position.empty()) {
    const int32_t position[] = {batch.place.step, batch.place.first_sequence, batch.place.stride};
    device.copy_to_device(step.dropout_position.data, position, sizeof(position));
  }
  load_tokens(step, batch);
  head_.load(step, batch.targets);
  return step;
}

// The ids of tokens in whose place are rows of images belong to no embedding.
void Model::Pass::load_tokens(const StepContext& step, const Batch& batch) const {
  if (step.shape.num_images() == 0) {
    embedding_.load(step, batch.tokens);
    return;
  }
  std::vector<int32_t> tokens(batch.tokens, batch.tokens + step.num_tokens());
  for (int64_t i = 0; i < step.shape.num_images() * images_->num_slots(); ++i) {
    if (batch.image_positions[i] >= 0) tokens.at(static_cast<size_t>(batch.image_positions[i])) = kImageSlot;
  }
  embedding_.load(step, tokens.data());
  images_->load(step, batch.pixels, batch.image_positions);
}

// Windows that are not shorter than the sequences leave what documents do: nothing, mostly, for which attention has
// faster kernels.
void Model::Pass::load_first_keys(StepContext& step, const int32_t* of_documents) const {
  const int64_t T = step.shape.num_whole_tokens(), S = step.shape.whole_length();
  const bool is_recorded = step.device.op_recorder() != nullptr;
  TensorView &full = step.positions.first_keys, &windowed = step.windowed_positions.first_keys;
  if (of_documents != nullptr) {
    full = step.vector(first_keys_, T);
    if (!is_recorded) step.device.copy_to_device(full.data, of_documents, full.bytes());
  }
  if (window_ == 0 || window_ >= S) {
    windowed = full;
    return;
  }
  windowed = step.vector(windowed_first_keys_, T);
  if (is_recorded) return;
  std::vector<int32_t> first_keys(static_cast<size_t>(T));
  for (int64_t t = 0; t < T; ++t) {
    const auto of_window = static_cast<int32_t>(std::max<int64_t>(t % S - window_ + 1, 0));
    first_keys[t] = of_documents == nullptr ? of_window : std::max(of_window, of_documents[t]);
  }
  step.device.copy_to_device(windowed.data, first_keys.data(), windowed.bytes());
}

void Model::Pass::forward(const StepContext& step) const {
  step.device.section(StepSection::kEmbedding);
  step.before_forward(0);
  embedding_.forward(step, stack_.input(step));
  if (step.shape.num_images() > 0) images_->forward(step, stack_.input(step));
  step.device.section(StepSection::kBlockForward);
  forward_blocks(step);
  step.device.section(StepSection::kHead);
  step.before_forward(head_unit_);
  if (!side_) {
    head_.forward(step, stack_.residual(step), stack_.branch(step));
    return;
  }
  head_.forward(step, side_->frozen_output(step), {});
  side_->forward_output(step, head_.hidden(step));
}

// A model with a side network runs both at a time, block by block, so that weights are gathered once.
void Model::Pass::forward_blocks(const StepContext& step) const {
  if (!side_) {
    stack_.forward(step);
    return;
  }
  StepContext frozen = step;
  frozen.keep = false;
  stack_.forward(frozen, [&](int64_t l, TensorView& residual, TensorView& branch) {
    side_->forward(step, l, residual, branch);
  });
}

void Model::Pass::loss_and_backward(const StepContext& step, const LossOptions& options) const {
  PARKA_REQUIRE(step.keep && step.gradients != nullptr);
  const ResidualStream& stream = stack_.stream();
  step.before_backward(head_unit_);
  if (side_) {
    head_.loss_and_backward(step, options, side_->d_hidden(step));
    side_->backward_output(step);
  } else {
    head_.loss_and_backward(step, options, stream);
  }
  if (!options.loss_sum.empty()) add_sum(step.device, {.x = losses(step), .total = options.loss_sum});
  step.after_backward(head_unit_);  // which may look at the loss
  if (first_trained_unit_ == head_unit_) return;
  step.device.section(StepSection::kBlockBackward);
  side_ ? side_->backward(step) : stack_.backward(step);
  if (first_trained_unit_ > 0) return;
  step.device.section(StepSection::kEmbedding);
  step.before_backward(0);
  if (side_) {
    side_->backward_input(step);
  } else {
    embedding_.backward(step, stream.d_residual(step));
  }
  if (images_) images_->backward(step, stream.d_residual(step));
  step.after_backward(0);
}

void Model::Pass::declare_telemetry(MemoryPlan& plan) {
  telemetry_.declare(stack_.num_blocks(), max_shape_.num_tokens(), precision_.has_fp8(), stack_.sample_needs(),
                     plan);
}

void Model::Pass::start_sampling(StepContext& step) const {
  step.samples = telemetry_.start(step.device, step.num_tokens());
  stack_.sample_weights(step);
}

}  // namespace parka
