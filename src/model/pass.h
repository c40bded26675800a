#pragma once
#include <vector>

#include "model/model.h"
#include "model/quantized_tensors.h"

namespace parka {

// Forward and backward of a Model under one PrecisionConfig. All sizes in comments are of the batch at hand:
// T tokens of width d, H query and Hkv key/value heads of size D, FFN width f, vocabulary V.
class Model::Pass {
 public:
  Pass(const ModelConfig& config, const PrecisionConfig& precision, const BatchShape& shape,
       int64_t logits_chunk_tokens, Activations::Purpose purpose, MemoryPlan& plan);

  // The tensors must outlive the pass.
  void bind(Device& device, const Arena& arena, const ParameterTable& table, const ModelWeights& weights,
            const TensorView& cos_sin);

  const ActivationOffload& offload() const { return activations_.offload; }
  void set_hooks(UnitHooks* hooks) { hooks_ = hooks; }

  // Copies the batch to the device. `keep`: forward is to leave what backward needs.
  void load(Device& device, const Batch& batch, bool keep);
  // All blocks and the final norm.
  void forward(Device& device);
  // Loss of every token; forward has run.
  void loss(Device& device);
  // Loss and gradients; forward has run with keep.
  void loss_and_backward(Device& device, const LossOptions& options, const std::vector<TensorView>& gradients,
                         Accumulation accumulation);
  // Logits of some rows into the logits buffer; count is at most its size.
  TensorView logits(Device& device, int64_t first_row, int64_t count);
  int64_t max_logit_rows() const { return activations_.logits_chunk; }
  std::vector<float> losses(Device& device) const;

  // Like load(), for generation: row t is the token rows[t], and forward appends its keys and values to the cache.
  enum class Attend {
    kToBatch,  // the rows are a sequence from its beginning on
    kToCache,  // each row is the newest token of a sequence
  };
  void load_cached(Device& device, const KvCache& cache, const std::vector<CachedToken>& rows,
                   const BatchShape& shape, Attend attend);
  const PrecisionConfig& precision() const { return precision_; }

  // Telemetry, see Model. Declared before bind() and bound after it; load() comes before start_sampling(), from
  // which on forward and backward leave statistics until stop_sampling().
  void declare_telemetry(MemoryPlan& plan);
  void bind_telemetry(Device& device);
  void start_sampling(Device& device);
  void stop_sampling() { sampled_rows_ = 0; }
  TensorView telemetry_statistics() const;

 private:
  // A gradient on its way into GEMMs: row-major for input gradients, transposed (FP8 only) for weight gradients.
  struct GemmInput {
    ScaledView row, transposed;
  };

  // What hooks are told of units; nothing without hooks.
  void before_forward(Device& device, int unit) const;
  void before_backward(Device& device, int unit) const;
  void after_backward(Device& device, int unit) const;

  // forward.cpp
  void forward_block(Device& device, int64_t l, const TensorView& residual, const TensorView& branch);
  void norm_into(Device& device, const NormBuffers& norm, int weight, const TensorView& residual,
                 const TensorView& branch);
  void final_norm(Device& device);
  void linear(Device& device, const ScaledView& x, int weight, const TensorView& out);
  void cross_entropy_chunk(Device& device, int64_t begin, int64_t count, const LossOptions& options, bool gradient);

  // generation.cpp
  TensorView rotations() const;  // the rotary table by rows of the batch, [S, D]
  float attention_scale() const;
  bool attends_to_cache() const { return cache_ != nullptr && attend_ == Attend::kToCache; }
  void append_to_cache(Device& device, int64_t l, const TensorView& qkv);
  void attend_to_cache(Device& device, int64_t l, const TensorView& qkv, const TensorView& out,
                       const TensorView& out_amax);

  // backward.cpp
  void backward_head(Device& device, const LossOptions& options);
  void backward_ffn(Device& device, int64_t l);
  void backward_attention(Device& device, int64_t l);
  void backward_norm(Device& device, const NormBuffers& norm, int weight, bool quantize_result);
  GemmInput norm_output(Device& device, const NormBuffers& norm, int weight);
  void input_gradient(Device& device, const GemmInput& d_y, int weight, const TensorView& d_x);
  void weight_gradient(Device& device, const GemmInput& d_y, const GemmInput& x, int weight);
  // The gradient of a weight for an op that only adds to it: zeros where accumulation begins. Empty for no weight.
  TensorView gradient_to_add_to(Device& device, int weight) const;
  GemmInput branch_gradient() const;

  // telemetry.cpp: all do nothing while no sample is taken. Those that return a tensor give back the original of
  // what the next op quantizes, for sample() after it; others call sample() themselves.
  void compare(Device& device, int64_t l, QuantizedTensor which, const TensorView& x, const ScaledView& q) const;
  void sample(Device& device, int64_t l, QuantizedTensor which, const TensorView& x, const ScaledView& q) const;
  void sample_norm(Device& device, int64_t l, const NormBuffers& norm, int weight, QuantizedTensor input,
                   QuantizedTensor output) const;
  TensorView sample_turned(Device& device, const TensorView& qkv, const ScaledView& saved) const;
  void sample_ffn(Device& device, int64_t l, const TensorView& up_gate_plain) const;
  void sample_up_gate_gradient(Device& device, int64_t l) const;
  TensorView sample_buffer(int64_t cols) const;

  // Views of declared buffers, cut to the batch at hand.
  TensorView tensor(TensorId id, int64_t rows, int64_t cols) const;
  TensorView vector(TensorId id, int64_t count) const;
  ScaledView matrix(const MatrixId& id, int64_t rows, int64_t cols) const { return id.view(*arena_, rows, cols); }
  TensorView log_sum_exp(const BlockBuffers& block) const;  // [B, H, S]
  TensorView first_keys() const;                            // [T]; empty unless documents are separate

  ModelConfig config_;
  PrecisionConfig precision_;
  Formats formats_;
  BatchShape max_shape_;
  Activations activations_;
  const Arena* arena_ = nullptr;
  const ParameterTable* table_ = nullptr;
  const ModelWeights* weights_ = nullptr;
  UnitHooks* hooks_ = nullptr;
  TensorView cos_sin_;

  // Of the batch at hand.
  BatchShape shape_;
  int64_t num_tokens_ = 0;
  bool keep_ = false;
  const KvCache* cache_ = nullptr;  // where keys and values go; nullptr: nowhere
  Attend attend_ = Attend::kToBatch;
  int64_t num_keys_ = 0;  // up to which the rows attend to the cache
  const std::vector<TensorView>* gradients_ = nullptr;
  Accumulation accumulation_ = Accumulation::kBegin;

  struct TelemetryIds {
    TensorId statistics;  // fp32 [blocks * kNumQuantizedTensors, QuantizationTotals::kCount]
    TensorId buffer;      // fp32 [rows, width of the widest]: originals that have to be computed again
    TensorId ones;        // bf16 [rows, f]
  };
  TelemetryIds telemetry_;
  int64_t sampled_rows_ = 0;  // of the batch at hand, by telemetry
};

}  // namespace parka
