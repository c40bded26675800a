#pragma once
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "model/activation_offload.h"
#include "model/formats.h"
#include "model/micro_batch.h"
#include "model/phases.h"

namespace parka {

// The category of the memory plan with what forward keeps for backward.
inline constexpr const char* kSavedActivationsCategory = "saved activations";

// The input of a linear layer, declared: in rows for forward, and with FP8 transposed for the weight gradient.
struct GemmInputIds {
  MatrixId row, transposed;
};

// Columns of the widest original that telemetry computes again, and of the ones that it takes for that.
struct SampleNeeds {
  int64_t buffer_cols = 0, ones_cols = 0;
};

// Layers declare their buffers here; stacks of different sizes have a scope each. A layer says what it needs, and
// of what phases; the scope decides which category that is, and which blocks share it:
//   workspace: all blocks, whatever the layer
//   kept:      for backward. Each block has its own. With recompute = block one set serves all blocks, but for
//              inputs; blocks that take turns in a buffer (ActivationOffload) share what any of them
//              declares. Evaluation keeps nothing: one set serves all blocks, in memory that training uses at other
//              times.
// A buffer that is declared again under its name and with its format is the same buffer, of the phases of both.
class BufferScope {
 public:
  enum class Purpose {
    kTraining,     // keeps what backward needs
    kForwardOnly,  // within steps of training, of what is frozen: no backward, and nothing is kept
    kEvaluation,   // forward only
  };
  // `shape` is the largest batch. All arguments must outlive the scope.
  BufferScope(const PrecisionConfig& precision, const BatchShape& shape, Purpose purpose, MemoryPlan& plan);

  const PrecisionConfig& precision() const { return precision_; }
  Purpose purpose() const { return purpose_; }
  MemoryPlan& plan() const { return plan_; }
  const Formats& formats() const { return formats_; }
  const BatchShape& shape() const { return shape_; }
  int64_t tokens() const { return shape_.num_tokens(); }
  DType compute() const { return formats_.compute.dtype; }
  // True if there is a backward to declare for.
  bool has_backward() const { return !evaluation_ && !is_forward_only_; }
  // The phases of a part of a block's forward, with the one in which backward runs it again, if it does.
  PhaseMask forward(PhaseMask phases) const { return phases | (reruns_ ? PhaseMask{kRerun} : PhaseMask{0}); }

  // All that is declared from here on belongs to block l of a stack of that name, until the next call. Without
  // `goes_backward` the block keeps nothing: all such blocks share one set of buffers.
  void enter_block(std::string_view stack, int64_t l, const ActivationOffload& offload, bool goes_backward = true);
  // Or to no block.
  void leave_blocks() { is_forward_only_ = purpose_ == Purpose::kForwardOnly; }
  // Tensors that this block saves in buffers that it is the first to use.
  std::vector<TensorId> kept_in_block() const;

  // The tokens of the batch and what comes with them.
  TensorId batch(const std::string& name, DType dtype, std::vector<int64_t> dims);

  // `shared_scale` is that of the other copy, in rows or transposed, of a kTensor matrix; others have their own.
  TensorId workspace(const std::string& name, DType dtype, std::vector<int64_t> dims, PhaseMask phases);
  MatrixId workspace(const std::string& name, const Format& format, int64_t rows, int64_t cols, PhaseMask phases,
                     TensorId shared_scale = {});

  // Bytes of which more are welcome (MemoryPlan::add_growing).
  TensorId growing_workspace(const std::string& name, int64_t bytes, std::vector<int64_t> larger, PhaseMask phases);

  TensorId kept(const std::string& name, DType dtype, std::vector<int64_t> dims);
  MatrixId kept(const std::string& name, const Format& format, int64_t rows, int64_t cols,
                TensorId shared_scale = {});
  // [T, width] the residual stream as a norm of the block reads it: saved if backward reads it, too. With recompute
  // = block each block has its own for its first norm, and saves nothing else.
  TensorId residual(const std::string& name, int64_t width, bool is_first_of_block, bool keep);

  // The input [T, width] of a linear layer, which its weight gradient reads again: kept if `save`, else workspace
  // that backward refills. FP8 is kept transposed, as the weight gradient wants it. `forward` and `backward` are
  // the phases in which it is written and read. `is_read_again`: there is a weight gradient. `rows` are those of
  // experts, other than T, and `kept_suffix` tells what is kept of one source of them from that of others.
  // `is_fp8`: its products are. With `is_fp8_forward` false its rows are plain all the same, and backward quantizes
  // them.
  GemmInputIds gemm_input(const std::string& name, int64_t width, bool save, PhaseMask forward, PhaseMask backward,
                          bool is_read_again, bool is_fp8, bool is_fp8_forward, int64_t rows = 0,
                          const std::string& kept_suffix = {});
  // The kTensor scale of such an input, to be kept while its codes are workspace: with the scale at hand backward
  // makes the same codes again in one pass. Invalid for other scalings.
  TensorId kept_scale(const std::string& name);

  // Asks for room to sample a layer's tensors, see SampleNeeds. Inputs of linear layers are counted already.
  void sample(int64_t cols, int64_t ones_cols = 0);
  const SampleNeeds& sample_needs() const { return sample_needs_; }

 private:
  TensorId declare(const std::string& category, const std::string& name, DType dtype, std::vector<int64_t> dims,
                   PhaseMask phases);
  MatrixId declare(const std::string& category, const std::string& name, const Format& format, int64_t rows,
                   int64_t cols, PhaseMask phases, TensorId shared_scale);
  std::string kept_category() const {
    return is_forward_only_ ? workspace_category() : evaluation_ ? "evaluation" : kSavedActivationsCategory;
  }
  std::string workspace_category() const { return evaluation_ ? "evaluation" : "workspace"; }
  PhaseMask kept_phases() const {
    return evaluation_ ? PhaseMask{kEvaluation} : is_forward_only_ ? kBlockForward | kWholeHead : kStep;
  }
  PhaseMask workspace_phases(PhaseMask training) const { return evaluation_ ? PhaseMask{kEvaluation} : training; }

  const PrecisionConfig& precision_;
  Formats formats_;
  BatchShape shape_;
  Purpose purpose_;
  bool evaluation_;
  bool reruns_;           // backward runs the forward of each block again
  bool is_forward_only_;  // the block at hand has no backward, in training
  MemoryPlan& plan_;
  SampleNeeds sample_needs_;
  std::map<std::pair<std::string, DType>, TensorId> declared_;
  std::string input_prefix_, kept_prefix_;  // of the block at hand
  size_t first_entry_ = 0;                  // of the block at hand, in the plan
};

}  // namespace parka
