#pragma once
#include <optional>
#include <vector>

#include "model/layers/embedding.h"
#include "model/layers/head.h"
#include "model/layers/stack.h"
#include "model/model.h"
#include "model/side/side_network.h"
#include "model/vision/image_embedding.h"

namespace parka {

// The layers of a Model under one PrecisionConfig, in their order. It keeps nothing of a batch but load()'s.
class Model::Pass {
 public:
  Pass(const ModelConfig& model, const PrecisionConfig& precision, const ParameterTable& table,
       const BatchShape& shape, int64_t logits_chunk_tokens, BufferScope::Purpose purpose, MemoryPlan& plan);

  // The arguments must outlive the pass. `tables` are the rotary tables, [S, D], of whole sequences.
  struct RotaryTables {
    TensorView full, windowed;  // of blocks of full attention, and with a window; may be the same
  };
  void bind(Device& device, const Arena& arena, const ModelWeights& weights, const RotaryTables& tables,
            const RotaryTables& side_tables);

  const PrecisionConfig& precision() const { return precision_; }
  const Stack& stack() const { return stack_; }
  const Head& head() const { return head_; }
  const SampleBuffers& telemetry() const { return telemetry_; }
  void set_hooks(UnitHooks* hooks) { hooks_ = hooks; }
  void set_context(PeerExchange* context) { context_ = context; }
  void set_experts(PeerExchange* experts) { experts_ = experts; }

  // Copies the batch to the device. `keep`: forward is to leave what backward needs.
  StepContext load(Device& device, const Batch& batch, bool keep) const;
  // All up to the final norm: what head() makes losses and logits of.
  void forward(const StepContext& step) const;
  // Forward has run with step.keep. Loss, and gradients into step.gradients.
  void loss_and_backward(const StepContext& step, const LossOptions& options) const;

  // Like load(), for generation: row t is the token rows[t], and forward appends its keys and values to the cache.
  // With `newest` each row is the newest token of a sequence, and attends to the cache; else they are one sequence.
  StepContext load_cached(Device& device, const Caches& caches, const std::vector<CachedToken>& rows,
                          const BatchShape& shape, bool newest, const SequenceImages& images) const;

  // Telemetry, see Model. Declared before bind() and bound after it.
  void declare_telemetry(MemoryPlan& plan);
  void bind_telemetry(Device& device) { telemetry_.bind(device, *arena_); }
  // From here on the step leaves statistics.
  void start_sampling(StepContext& step) const;

 private:
  struct Scopes {
    BufferScope own;
    BufferScope blocks;  // of the decoder's: where gradients do not go through them, they keep nothing
  };
  Pass(const ModelConfig& model, const PrecisionConfig& precision, const ParameterTable& table,
       const BatchShape& shape, int64_t logits_chunk_tokens, Scopes&& scopes);

  void load_tokens(const StepContext& step, const Batch& batch) const;
  Positions positions(const TensorView& table, const TensorView& first_keys, const BatchShape& shape) const;
  void load_first_keys(StepContext& step, const int32_t* of_documents) const;

  PrecisionConfig precision_;
  const ParameterTable& table_;
  BatchShape max_shape_;
  int64_t window_;  // model.sliding_window
  int head_unit_;
  int first_trained_unit_;
  Stack stack_;
  Embedding embedding_;
  std::optional<ImageEmbedding> images_;  // of a model with a tower
  std::optional<SideNetwork> side_;       // of a model that has one
  Head head_;
  // [num_whole_tokens] int32 see AttentionForward: of documents; of windows shorter than sequences.
  TensorId first_keys_, windowed_first_keys_;
  TensorId dropout_position_;  // [3] int32, in training with LoraRules::dropout
  SampleNeeds sample_needs_;
  SampleBuffers telemetry_;

  const Arena* arena_ = nullptr;
  const ModelWeights* weights_ = nullptr;
  UnitHooks* hooks_ = nullptr;
  PeerExchange* context_ = nullptr;
  PeerExchange* experts_ = nullptr;
  RotaryTables tables_, side_tables_;
};

}  // namespace parka
