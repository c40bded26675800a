#pragma once
#include "model/buffer_scope.h"
#include "model/layers/linear.h"
#include "model/step_context.h"

namespace parka {

// out[t] = table[tokens[t]], times what model.embedding_scale stands for
class Embedding {
 public:
  static void add_parameter(ParameterList& list, const ModelConfig& model, bool decayed);

  Embedding(const ModelConfig& model, const ParameterTable& table, BufferScope& scope);

  // Copies num_tokens() tokens to the device, with what backward needs of them.
  void load(const StepContext& step, const int32_t* tokens) const;
  void forward(const StepContext& step, const TensorView& out) const;
  // A tied table has the gradient of the head by then. Nothing for a frozen one.
  void backward(const StepContext& step, const TensorView& d_out) const;

 private:
  int64_t vocab_size_;
  int weight_;
  bool is_tied_, is_trainable_;
  float scale_;
  TensorId tokens_;  // [T] int32
  TensorId
      order_;  // [T, kTokenRowInts] int32 what embedding_order makes of tokens; only where the table is trained
};

}  // namespace parka
