#pragma once
#include "model/layers/norm.h"
#include "model/layers/residual_stream.h"

namespace parka {

// The final norm, the logits, some rows at a time, and the loss.
class Head {
 public:
  static void add_parameters(ParameterList& list, const ModelConfig& model);

  Head(const ModelConfig& model, const ParameterTable& table, int64_t logits_chunk_tokens, BufferScope& scope);

  // Copies num_tokens() targets to the device.
  void load(const StepContext& step, const int32_t* targets) const;
  // The norm of residual + branch.
  void forward(const StepContext& step, const TensorView& residual, const TensorView& branch) const;
  // [T, d] that norm, of which the logits are made. Whoever changes it does so before them.
  TensorView hidden(const StepContext& step) const { return norm_.output(step).data; }
  // Logits of at most max_rows() rows, until the next call: [count, V + padding()]. First comes forward().
  TensorView logits(const StepContext& step, int64_t first_row, int64_t count) const {
    return logits(step, weight(step), first_row, count);
  }
  int64_t max_rows() const { return chunk_; }
  // Columns after the vocabulary, of no meaning: tensor cores want rows at multiples of 16 bytes.
  int64_t padding() const { return (kLogitsAlignment - vocab_size_ % kLogitsAlignment) % kLogitsAlignment; }
  // The loss of every token.
  void loss(const StepContext& step) const;
  // The same, and backward to the stream's d_residual, with `quantize` in FP8 too, or only to its own weight.
  void loss_and_backward(const StepContext& step, const LossOptions& options, const ResidualStream& stream,
                         bool quantize) const;
  // Backward no further than to the gradient of hidden(), [T, d].
  void loss_and_backward(const StepContext& step, const LossOptions& options, const TensorView& d_hidden) const;
  // fp32 [T]
  TensorView losses(const StepContext& step) const { return step.vector(losses_, step.num_tokens()); }

 private:
  // Rows [begin, begin + count) of the batch.
  struct Chunk {
    int64_t begin, count;
  };
  template <typename F>
  void for_each_chunk(const StepContext& step, const F& f) const;
  void declare_codes(BufferScope& scope);
  // The weight as the logits' GEMM reads it.
  ScaledView weight(const StepContext& step) const;
  TensorView logits(const StepContext& step, const ScaledView& weight, int64_t first_row, int64_t count) const;
  void chunk_loss(const StepContext& step, const Chunk& chunk, const TensorView& logits, const LossOptions& options,
                  const GemmInput& d_logits) const;
  // From the chunk's d_logits to the gradients of the norm's output and of the weight.
  void chunk_backward(const StepContext& step, const Chunk& chunk, const TensorView& d_y) const;
  void chunk_backward_fp8(const StepContext& step, const Chunk& chunk, const ScaledView& weight_t,
                          const TensorView& d_y) const;
  GemmInput d_logits_codes(const StepContext& step, int64_t count) const;
  bool adds_to_gradient(const StepContext& step, const Chunk& chunk) const {
    return chunk.begin > 0 || step.adds_to_gradients();
  }

  static constexpr int64_t kLogitsAlignment = 16;

  int64_t vocab_size_;
  int64_t width_;
  int64_t chunk_;  // rows
  int weight_;
  bool is_fp8_;
  bool trains_weight_;
  bool has_backward_below_;  // of the norm, or of what is below it
  Norm norm_;
  TensorId targets_;  // [T] int32
  TensorId losses_;   // [T] fp32
  TensorId logits_;   // [chunk, V + padding()]; their gradient overwrites them, unless it is FP8
  // FP8 alone: [chunk, d] rows of the norm's output; [chunk, V + padding()] the logits' gradient.
  GemmInputIds input_, d_logits_;
};

}  // namespace parka
