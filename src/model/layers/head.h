#pragma once
#include <vector>

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
  // What follows needs forward(). Logits of some rows, until the next call: [count, V + padding()]. count is at
  // most max_rows().
  TensorView logits(const StepContext& step, int64_t first_row, int64_t count) const;
  int64_t max_rows() const { return chunk_; }
  // Columns behind the vocabulary, of no meaning: tensor cores want rows at multiples of 16 bytes.
  int64_t padding() const { return (kLogitsAlignment - vocab_size_ % kLogitsAlignment) % kLogitsAlignment; }
  // The loss of every token.
  void loss(const StepContext& step) const;
  // The same, and backward to the stream's d_residual, in FP8 too where GEMMs are; no further than to its own
  // weight where nothing below is trained.
  void loss_and_backward(const StepContext& step, const LossOptions& options, const ResidualStream& stream) const;
  // fp32 [T]
  TensorView losses(const StepContext& step) const { return step.vector(losses_, step.num_tokens()); }

 private:
  void chunk_loss(const StepContext& step, int64_t begin, int64_t count, const LossOptions& options,
                  bool gradient) const;

  static constexpr int64_t kLogitsAlignment = 16;

  int64_t vocab_size_;
  int64_t chunk_;  // rows
  int weight_;
  bool trains_weight_;
  bool has_backward_below_;  // of the norm, or of what is below it
  Norm norm_;
  TensorId targets_;  // [T] int32
  TensorId losses_;   // [T] fp32
  TensorId logits_;   // [chunk, V + padding()]; their gradient overwrites them
};

}  // namespace parka
