#pragma once
#include <vector>

#include "model/layers/stack.h"
#include "model/side/downsample.h"

namespace parka {

// The sizes of a side network's blocks: those of the model's, with width and feed-forward width divided by
// SideRules::reduction and rounded up to multiples of 16; where the model has experts, one feed-forward of the
// width that a token goes through. Its heads have head_dim numbers, as many as are needed for the width, and share
// keys and values as the model's do.
ModelConfig side_stack(const ModelConfig& model, const SideRules& rules);

// The network of Quantized Side Tuning (arXiv 2401.07159, section 3), beside a model of N blocks whose weights are
// frozen. h_0 is what its embedding hands on, and h_i its block i:
//   g_0 = down_0(h_0),   g_i = block_i((1 - b_i) down_i(h_i) + b_i g_{i-1}),   b_i = 1 / (1 + exp(-gate_i))
// where block_i is a block like the model's, of sizes side_stack(). With n the model's final norm of h_N, the
// logits are made of n + up norm(g_N), or of mix n + (1 - mix) up norm(g_N): SideRules::mix.
//
// No gradient goes through the model: its blocks go forward alone, and keep nothing but h_i for the weights of
// down_i, or not even that with pooling. The side network is in the compute format, whatever recipe the model has.
// Its parameters are in the units of the blocks beside which they are used.
class SideNetwork {
 public:
  // The parameters of the model, with the side network's own among them.
  static void add_parameters(ParameterList& list, const ModelConfig& model, const SideRules& rules);

  // Takes its shape from table.side, which exists.
  SideNetwork(const ModelConfig& model, const ParameterTable& table, BufferScope& scope);

  // For each i from 0 to N, where h_i = residual + branch: adds them, and continues with g_i.
  void forward(const StepContext& step, int64_t i, TensorView& residual, TensorView& branch) const;
  TensorView frozen_output(const StepContext& step) const { return downs_.back().input(step); }  // h_N
  // hidden [T, d] goes from n to what the logits are made of.
  void forward_output(const StepContext& step, const TensorView& hidden) const;
  // [T, d] where the gradient of hidden is to be when backward begins.
  TensorView d_hidden(const StepContext& step) const { return step.tensor(d_hidden_, step.num_tokens(), d_model_); }
  // In this order: back to g_N, with the head's unit; through the blocks, with their units; and down_0.
  void backward_output(const StepContext& step) const;
  void backward(const StepContext& step) const;
  void backward_input(const StepContext& step) const;

 private:
  struct PlainScope;
  SideNetwork(const ModelConfig& model, const ParameterTable& table, const Format& kept_fp8, PlainScope&& plain);
  // And down_ids_.
  std::vector<Downsample> make_downs(const ParameterTable& table, const Format& kept_fp8, BufferScope& scope);

  // The step that the side network's layers see: without units and telemetry.
  StepContext side_step(const StepContext& step) const;
  TensorView wide(const StepContext& step, TensorId id) const {
    return step.tensor(id, step.num_tokens(), d_model_);
  }
  TensorView narrow(const StepContext& step, TensorId id) const {
    return step.tensor(id, step.num_tokens(), config_.d_model);
  }
  TensorView scalar(const StepContext& step, int weight) const { return step.weights.plain(weight).reshaped({1}); }
  const TensorId& down(int64_t i) const { return down_ids_[static_cast<size_t>(i)]; }

  SideRules rules_;
  ModelConfig config_;  // side_stack()
  int64_t d_model_;     // of the model
  int first_unit_;
  std::vector<TensorId>
      down_ids_;  // [T, s] their outputs. For h_1 and on forward leaves g_{i-1} - down_i(h_i) there
  std::vector<Downsample> downs_;  // of h_0 ... h_N
  Stack stack_;
  Norm norm_;
  Linear up_;
  int up_weight_, mix_;     // -1: SideMix::kAdditive
  std::vector<int> gates_;  // of each block
  TensorId d_down_;         // [T, s]
  TensorId up_output_;      // [T, d] with mix_ alone: what `up` makes; then n minus that
  TensorId d_hidden_;       // [T, d]
};

}  // namespace parka
