#pragma once
#include <string_view>
#include <vector>

#include "model/layers/block.h"

namespace parka {

// Blocks one after another, with their buffers: the body of a model under one precision. It knows nothing of where
// its input comes from, and what becomes of its output.
class Stack {
 public:
  // Names begin with `name`. Each block's parameters are a unit of their own (ParameterInfo::unit), unless all are
  // to be of the unit at hand.
  static void add_parameters(ParameterList& list, const ModelConfig& model, std::string_view name,
                             bool has_units = true);

  // The blocks' units are `first_unit` and following. Declares all buffers. Blocks below the lowest parameter that
  // is trained go forward only.
  Stack(const ModelConfig& model, const ParameterTable& table, std::string_view name, int first_unit,
        BufferScope& scope);

  // Takes host memory for blocks that are offloaded.
  void bind(Device& device, const Arena& arena) { offload_.bind(device, arena); }
  int64_t num_blocks() const { return static_cast<int64_t>(blocks_.size()); }
  const ActivationOffload& offload() const { return offload_; }
  const ResidualStream& stream() const { return stream_; }

  // [T, d] where the input of forward() is to be.
  TensorView input(const StepContext& step) const { return blocks_.front().input(step); }
  // All blocks. What they leave is residual + branch, which nobody has added yet.
  void forward(const StepContext& step) const;
  TensorView residual(const StepContext& step) const { return blocks_.back().residual(step); }
  TensorView branch(const StepContext& step) const { return stream_.branch(step); }
  // From the gradient of what forward() has left to that of the input of the lowest block that goes backward; both
  // are the stream's d_residual.
  void backward(const StepContext& step) const;

  void sample_weights(const StepContext& step) const;
  SampleNeeds sample_needs() const;

 private:
  int unit(size_t l) const { return first_unit_ + static_cast<int>(l); }

  int first_unit_;
  size_t first_backward_;  // the lowest block that goes backward
  bool reruns_;            // precision.recompute: backward runs the forward of each block again
  ResidualStream stream_;
  std::vector<Block> blocks_;
  ActivationOffload offload_;
};

}  // namespace parka
