#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "core/accumulation.h"
#include "kernels/device/arena.h"
#include "model/kv_cache.h"
#include "model/micro_batch.h"
#include "model/model_config.h"
#include "model/parameter_table.h"
#include "model/quantized_tensors.h"
#include "model/unit_hooks.h"
#include "model/weights.h"

namespace parka {

struct StepContext;
class PeerExchange;

// A decoder-only transformer (OLMo v1 or Llama), which may see images through a tower (vision/image_embedding.h):
// blocks of attention and SwiGLU, written once against the ops of kernels/ops.h. The PrecisionConfig decides the
// number format of each tensor, see formats.h.
//
// Order of use: construct (declares everything in the plan), plan.finish(), make an Arena, bind(), fill weights(),
// weights_changed(); then any number of accumulate_gradients() and evaluate().
class Model {
 public:
  enum class Use { kTraining, kInference };
  // `shape` is the largest batch. Throws Error(kBadInput) on a config that validate() would refuse. `rules` say
  // which parameters are trained; backward computes no gradients of others, and ends at the lowest that is.
  Model(const ModelConfig& config, const PrecisionConfig& precision, bool decay_embeddings, const BatchShape& shape,
        int64_t logits_chunk_tokens, Use use, const Zero& zero, MemoryPlan& plan, const ParameterRules& rules = {});
  ~Model();

  const ParameterTable& parameters() const { return table_; }
  // The largest batch.
  const BatchShape& shape() const { return max_shape_; }
  // For training with telemetry; before plan.finish(). Declares ("telemetry") statistics, and samples of any FP8.
  void declare_telemetry(MemoryPlan& plan);
  // Position-dependent tables go to the device here.
  void bind(Device& device, const Arena& arena);

  const ModelWeights& weights() const { return weights_; }
  // Must be called after weights were written, where this rank has all of them whole: refreshes their FP8 copies.
  void weights_changed(Device& device) const {
    weights_.find_amax(device);
    weights_.quantize(device);
  }

  // From now on these are called as forward and backward go from unit to unit, as long as `hooks` is set; or null.
  void set_hooks(UnitHooks* hooks);

  // The ranks that share each sequence, before the first batch. `context` must live as long as the model runs.
  void set_context(PeerExchange* context);
  // Likewise the ranks that divide the experts, whose batches are of one size.
  void set_experts(PeerExchange* experts);
  bool divides_experts() const { return expert_places() > 1; }

  // Tokens and targets of a batch on the host, num_tokens() each. targets[t] is the token that position t should
  // predict, or kIgnoreTarget. With shape.separate_documents, which the Model's own shape must then have too,
  // first_keys[t] is the position in its sequence at which the document of token t begins, for all tokens of its
  // sequences, num_whole_tokens(); null otherwise. The batch shares its sequences with as many ranks as the
  // largest. With shape.images_per_sequence, which training a model with a tower needs to be its own shape's, and
  // which may be 0 otherwise: pixels [num_images(), 3, size, size], and for each row that an image is to have the
  // token of the batch in whose place it is, or -1, [num_images(), ImageEmbedding::num_slots()]. These tokens are
  // not looked up.
  struct Batch {
    const int32_t* tokens;
    const int32_t* targets;
    BatchShape shape;
    const int32_t* first_keys = nullptr;
    // With LoraRules::dropout: the step, the place of its first sequence in the step's batch, and their distance.
    struct Place {
      int32_t step = 0, first_sequence = 0, stride = 1;
    };
    Place place = {};
    const uint8_t* pixels = nullptr;
    const int32_t* image_positions = nullptr;
  };

  // A sum of gradients over micro-batches begins by overwriting them, so that nobody needs to clear them: the GEMM
  // of a weight gradient then writes without reading. Whatever was there, NaN included, is lost.
  using Accumulation = parka::Accumulation;
  using LossOptions = parka::LossOptions;

  // Forward and backward: the gradients of grad_scale * (sum of the loss over all targets) are written to
  // `gradients` or added to them, in the order of the parameter table; views of frozen parameters are empty.
  // losses() has the per-token losses afterwards. The host does not wait.
  enum class Queueing : uint8_t {  // all give the same bits
    kMayReplay,      // the device may record the work and queue the recording instead: where hooks queue nothing
    kEachTime,       // op by op
    kWithTelemetry,  // likewise, and leaves telemetry(); declare_telemetry() was called
  };
  void accumulate_gradients(Device& device, const Batch& batch, const LossOptions& options,
                            const std::vector<TensorView>& gradients, Accumulation accumulation,
                            Queueing queueing = Queueing::kMayReplay);
  // Quantization errors of the last such micro-batch: one row of QuantizationTotals for each QuantizedTensor of
  // each block, fp32 [blocks * kNumQuantizedTensors, QuantizationTotals::kCount]; zeros for tensors that are not in
  // FP8. Empty if none is, or without declare_telemetry(). Activations and gradients count with their first
  // kTelemetryRows tokens, weights with all rows.
  TensorView telemetry() const;
  // Sums of attention's backward in that micro-batch: an AttentionTotals for each block, fp32 [blocks,
  // AttentionTotals::kCount], of the first kTelemetryRows tokens. Empty without declare_telemetry().
  TensorView attention_telemetry() const;

  // How many numbers a micro-batch adds to LossOptions::sums, the loss of all targets first; and what a step of so
  // many targets reports of their sums over its micro-batches and all ranks, the loss first.
  int64_t num_sums() const;
  std::vector<StepScalar> scalars(const std::vector<float>& sums, int64_t num_targets) const;
  std::vector<ExpertUse> expert_use(const std::vector<float>& sums) const;  // of each block; empty without experts

  // Host memory that bind() takes for offloaded blocks.
  int64_t host_bytes(const MemoryPlan& plan) const;

  // Forward only, in the evaluation precision; losses() has the per-token losses afterwards.
  void evaluate(Device& device, const Batch& batch);

  // Loss of every token of the last batch, fp32 on the host; 0 where the target is ignored. Waits for the device.
  std::vector<float> losses(Device& device) const;

  // Generation, in the evaluation precision and for inference only: keys and values of sequences that grow are
  // kept, each in a slot of its own, so that every token is computed once. To be declared before plan.finish();
  // neither measure may be more than the largest batch has, in sequence length and in tokens.
  void declare_cache(const CacheShape& shape, MemoryPlan& plan);
  // Starts the sequence of a slot anew with `tokens`; the logits of the token that follows them, fp32 [V].
  std::vector<float> prefill(Device& device, int64_t slot, const std::vector<int32_t>& tokens,
                             const SequenceImages& images = {});
  // Adds a token to each of some sequences, after their last; the logits that follow, fp32 [next.size(), V].
  struct CachedToken {
    int32_t slot, position, token;
  };
  std::vector<float> decode(Device& device, const std::vector<CachedToken>& next);

  // Forward in the evaluation precision; the logits of rows [first_row, first_row + count) as fp32 [count, V].
  std::vector<float> logits(Device& device, const Batch& batch, int64_t first_row, int64_t count);

 private:
  class Pass;  // activations under one precision and what runs on them

  // Key and value caches of generation.
  struct Caches {
    const KvCache *model, *side;  // side: of a side network, nullptr where there is none
  };
  Caches caches() const { return {&*cache_, side_cache_ ? &*side_cache_ : nullptr}; }
  int64_t expert_places() const;  // ranks that divide the experts
  std::vector<float> read_logits(const Pass& pass, const StepContext& step, int64_t first_row, int64_t count) const;

  ModelConfig config_;
  BatchShape max_shape_;
  ParameterTable table_;
  ModelWeights weights_;
  // Rotary tables, [S, D] fp32, of whole sequences. Blocks with a window have another one with
  // model.local_rope_theta or rope_scaling.
  struct RotaryIds {
    TensorId full, windowed;
  };
  RotaryIds rotations_;
  RotaryIds side_rotations_;          // the same of a side network, [S, its head dim]
  std::unique_ptr<Pass> training_;    // absent for inference
  std::unique_ptr<Pass> evaluation_;  // absent when evaluation uses training's numerics and buffers
  std::optional<KvCache> cache_;
  std::optional<KvCache> side_cache_;  // of a side network
  TensorView losses_;                  // [T] fp32 of the last batch

  // The graph that accumulate_gradients() has recorded, and its arguments.
  struct RecordedWith {
    BatchShape shape;
    float grad_scale, z_loss;
    const void *grad_factor, *sums;
    std::vector<const void*> gradients;
    RouterLosses router;
    bool operator==(const RecordedWith&) const = default;
  };
  std::map<Accumulation, std::unique_ptr<Recording>> recordings_;
  std::optional<RecordedWith> recorded_with_;
  bool with_telemetry_ = false;
  Pass& evaluating() const { return evaluation_ ? *evaluation_ : *training_; }
};

}  // namespace parka
