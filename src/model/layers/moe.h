#pragma once
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "model/buffer_scope.h"
#include "model/layers/swiglu.h"
#include "model/step_context.h"

namespace parka {

// What the routers of a stack did in a micro-batch (RouterLoad), block by block, and summed over its blocks.
struct RouterLoads {
  explicit RouterLoads(const ModelConfig& model)
      : num_blocks(model.moe.exists() ? model.num_layers - model.moe.dense_layers : 0),
        num_experts(model.moe.num_experts) {}

  int64_t num_blocks, num_experts;
  TensorId loads;  // [blocks with experts, 2 E + 1] fp32
  TensorId sum;    // [2 E + 1] fp32

  bool exists() const { return num_blocks > 0; }
  // Whoever declares them in one scope has the same.
  void declare(BufferScope& scope);
  TensorView all(const StepContext& step) const { return step.tensor(loads, num_blocks, columns()); }
  TensorView of_block(const StepContext& step, int64_t i) const {
    return all(step).rows(i, 1).reshaped({columns()});
  }
  TensorView summed(const StepContext& step) const { return step.vector(sum, columns()); }
  int64_t columns() const { return 2 * num_experts + 1; }
  // Adds up the loads of all blocks, which a pooled balance loss reads. After forward.
  void add_up(const StepContext& step) const;
  // What the loads of a step say, [blocks with experts, 2 E + 1] summed over micro-batches and ranks: of every
  // block.
  std::vector<ExpertUse> of_blocks(std::span<const float> loads, const MoeConfig& moe) const;
};

// out[t] = sum over the k experts e of token t of weight_te * expert_e(x_t), + shared(x_t): a mixture of experts of
// which each is a gated feed-forward. The router reads the norm's output before it is quantized; its logits and all
// that follows from them are fp32. Experts read the codes of x, sorted by expert (kernels/ops/moe/routing.h), and
// the weight of a row multiplies the input of its down projection: so backward needs no output of an expert, and
// the gradient of a weight is a product of numbers at hand. Forward keeps up and gate of all rows and, by
// precision.save_product, the input of the down projection: no other tensor of that size. Inner layer.
class Moe {
 public:
  static constexpr const char *kNormName = Swiglu::kNormName, *kPostNormName = Swiglu::kPostNormName;
  static constexpr PhaseMask kForwardPhase = Swiglu::kForwardPhase;
  static constexpr PhaseMask kRowsPhases = Swiglu::kRowsPhases, kTransposedPhases = Swiglu::kTransposedPhases;
  static constexpr PhaseMask kLastBackwardPhase = Swiglu::kLastBackwardPhase;
  static constexpr PhaseMask kBackwardPhases = kBackwardDown | kBackwardSwiglu | kBackwardUpGate;
  static constexpr auto kNormInput = Swiglu::kNormInput, kNormOutput = Swiglu::kNormOutput;
  static constexpr auto kPostNormInput = Swiglu::kPostNormInput, kOutputGradient = Swiglu::kOutputGradient;
  static constexpr bool kReadsPlainInput = true;

  static void add_parameters(ParameterList& list, const ModelConfig& model, const std::string& prefix,
                             double depth);

  Moe(const ModelConfig& model, const PrecisionConfig& precision, const ParameterTable& table, int64_t block,
      const std::string& prefix);

  void declare(BufferScope& scope);
  bool reads_input_again() const;
  // `plain` is x in the compute format.
  void forward(const StepContext& step, const ScaledView& x, const TensorView& plain, const TensorView& out) const;
  using PlainAgain = std::function<TensorView()>;
  void backward(const StepContext& step, const GemmInput& d_out, const InputAgain& x, const PlainAgain& plain,
                const TensorView& d_x) const;

 private:
  // The rows of a batch as SortByExpert leaves them.
  struct Rows {
    int64_t count;  // R
    TensorView offsets, counts, row_of_slot, slot_of_row, weights;
  };
  int64_t num_rows(int64_t tokens) const { return expert_rows(tokens * moe_.experts_per_token, moe_.num_experts); }
  TensorView experts(const StepContext& step) const;
  Rows sort(const StepContext& step) const;
  // x's rows in the order of experts, in rows and transposed where x has both; `buffers` have their codes.
  struct Gathered {
    TensorId row, transposed;
  };
  GemmInput gather(const StepContext& step, const Rows& rows, const GemmInput& x, const Gathered& buffers) const;
  ScaledView weight(const StepContext& step, int index) const;
  void input_gradient(const StepContext& step, const Rows& rows, const GemmInput& d_y, int weight,
                      const TensorView& d_x) const;
  void weight_gradient(const StepContext& step, const Rows& rows, const GemmInput& d_y, const GemmInput& x,
                       int weight) const;
  void router_backward(const StepContext& step, const Rows& rows, const TensorView& x, const TensorView& d_x) const;

  int64_t block_;
  MoeConfig moe_;
  int64_t width_, d_ffn_;
  GateActivation activation_;
  int router_, router_bias_, up_gate_weight_, down_weight_;  // parameters; a bias of -1: none
  bool trains_router_, trains_up_gate_, trains_down_;
  bool is_fp8_;
  bool saves_product_;
  bool samples_amax_ = false;
  std::optional<Swiglu> shared_;

  RouterLoads loads_;
  TensorId logits_;                                        // [T, E] fp32
  TensorId experts_, weights_;                             // [T, k] int32 and fp32
  TensorId offsets_, counts_, row_of_slot_, slot_of_row_;  // of SortByExpert
  TensorId row_weights_, d_row_weights_;                   // [R] fp32
  Gathered input_;                                         // [R, d] codes of x, or x; [d, R]
  TensorId up_gate_plain_;                                 // [R, 2f] where up_gate_ is not that
  MatrixId up_gate_;                                       // [R, 2f] rows: up, gate
  MatrixId silu_;                                          // [R, f] with precision.save_silu
  GemmInputIds product_;                                   // [R, f] input of the down projection
  TensorId rows_;                                          // [R, d] what experts leave, or its gradient
  Gathered d_rows_;                                        // [R, d] gradient of that, [d, R]
  TensorId d_product_;                                     // [R, f]
  GemmInputIds d_up_gate_;                                 // [R, 2f]
  TensorId d_logits_;                                      // [T, E]
};

}  // namespace parka
