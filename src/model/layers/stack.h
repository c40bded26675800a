#pragma once
#include <cstdint>
#include <functional>
#include <string_view>
#include <variant>
#include <vector>

#include "model/layers/attention.h"
#include "model/layers/branch.h"
#include "model/layers/mlp.h"
#include "model/layers/moe.h"
#include "model/layers/swiglu.h"

namespace parka {

// Transformer blocks one after another, with their buffers: the body of a model under one precision. Each is
// attention, then a feed-forward of one kind (FeedForward), each of the two in a branch of the residual stream. The
// stack knows nothing of where its input comes from, and what becomes of its output.
class Stack {
 public:
  // Names begin with `name`. Each block's parameters are a unit (ParameterInfo::unit), unless all are of this one.
  static void add_parameters(ParameterList& list, const ModelConfig& model, std::string_view name,
                             bool has_units = true);

  // The parameters of block l alone.
  static void add_block_parameters(ParameterList& list, const ModelConfig& model, std::string_view name, int64_t l);

  // The blocks' units are `first_unit` and following. Declares all buffers. Blocks below the lowest parameter that
  // is trained go forward only, and all where the scope has no backward.
  Stack(const ModelConfig& model, const ParameterTable& table, std::string_view name, int first_unit,
        BufferScope& scope);

  // Takes host memory for blocks that are offloaded.
  void bind(Device& device, const Arena& arena) { offload_.bind(device, arena); }
  int64_t num_blocks() const { return static_cast<int64_t>(blocks_.size()); }
  const ActivationOffload& offload() const { return offload_; }
  const ResidualStream& stream() const { return stream_; }
  // What the routers have done, after forward().
  const RouterLoads& router_loads() const { return router_loads_; }

  // [T, d] where the input of forward() is to be.
  TensorView input(const StepContext& step) const { return input(step, 0); }
  // Runs all blocks. Their result is residual + branch, which nobody has added yet. `between` is called before each
  // block l with the two terms that the block is to read as a sum, and with l = num_blocks() after the last; it may
  // add them, and say so.
  using Between = std::function<void(int64_t l, TensorView& residual, TensorView& branch)>;
  void forward(const StepContext& step, const Between& between = {}) const;
  TensorView residual(const StepContext& step) const { return residual(step, num_blocks() - 1); }
  TensorView branch(const StepContext& step) const { return stream_.branch(step); }
  // Block l by itself, of what is in its input(); what it leaves, and backward from the gradient of that.
  TensorView input(const StepContext& step, int64_t l) const { return block(l).attention.residual(step); }
  void forward_block(const StepContext& step, int64_t l, bool wants_branch = true) const;
  TensorView residual(const StepContext& step, int64_t l) const {
    return std::visit([&](const auto& ffn) { return ffn.residual(step); }, block(l).ffn);
  }
  void backward_block(const StepContext& step, int64_t l, bool quantize) const;
  // True if block l, or the last one, wants that gradient in FP8.
  bool reads_fp8_gradient(int64_t l) const {
    return std::visit([](const auto& ffn) { return ffn.reads_fp8_gradient(); }, block(l).ffn);
  }
  bool reads_fp8_gradient() const { return reads_fp8_gradient(num_blocks() - 1); }
  // From the gradient of what forward() has left to that of the lowest trained block's input, both d_residual.
  void backward(const StepContext& step) const;

 private:
  using FeedForward = std::variant<Branch<Swiglu>, Branch<Mlp>, Branch<Moe>>;
  // Calls f(std::in_place_type<Inner>, model) with the kind of feed-forward of block l, and the model as it sees
  // it.
  template <typename F>
  static auto with_ffn(const ModelConfig& model, int64_t l, const F& f);
  struct Block {
    Branch<Attention> attention;
    FeedForward ffn;
  };

  int unit(int64_t l) const { return first_unit_ + static_cast<int>(l); }
  const Block& block(int64_t l) const { return blocks_[static_cast<size_t>(l)]; }

  int first_unit_;
  int64_t first_backward_;  // the lowest block that goes backward
  bool reruns_;             // precision.recompute: backward runs the forward of each block again
  ResidualStream stream_;
  RouterLoads router_loads_;
  std::vector<Block> blocks_;
  ActivationOffload offload_;
};

}  // namespace parka
