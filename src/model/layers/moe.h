#pragma once
#include <algorithm>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "model/buffer_scope.h"
#include "model/layers/expert_adapters.h"
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
  // What the loads of a step say, [blocks with experts, 2 E + 1] summed over micro-batches and ranks, of which
  // `places` divide the experts: of every block.
  std::vector<ExpertUse> of_blocks(std::span<const float> loads, const MoeConfig& moe, int64_t places) const;
};

// out[t] = sum over the k experts e of token t of weight_te * expert_e(x_t), + shared(x_t): a mixture of experts of
// which each is a gated feed-forward. The router reads the norm's output before it is quantized; its logits and all
// that follows from them are fp32. Experts read the codes of x, sorted by expert (kernels/ops/moe/routing.h), and
// the weight of a row multiplies the input of its down projection: so backward needs no output of an expert, and
// the gradient of a weight is a product of numbers at hand. Forward keeps up and gate of all rows and, by
// precision.save_product, the input of the down projection: no other tensor of that size. Inner layer.
//
// Where P ranks divide the experts (PeerExchange), each gets the tokens of all and takes those of one rank after
// the other, its own first. So buffers are those of one rank, but for what is kept, and codes keep the scale of the
// rank that has made them. The sums of a rank's experts go back, and are added up in the order of ranks.
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
  bool reads_fp8() const { return is_fp8_; }
  bool reads_fp8_forward() const { return is_fp8_; }
  bool reads_fp8_gradient() const { return is_fp8_; }
  // `plain` is x in the compute format.
  void forward(const StepContext& step, const ScaledView& x, const TensorView& plain, const TensorView& out) const;
  using PlainAgain = std::function<TensorView()>;
  void backward(const StepContext& step, const GemmInput& d_out, const InputAgain& x, const PlainAgain& plain,
                const TensorView& d_x) const;

 private:
  // The rows of the tokens of one rank as SortByExpert leaves them.
  struct Rows {
    int64_t source, count;  // the rank's place, R
    TensorView offsets, counts, row_of_slot, slot_of_row, weights;
    ExpertAdapters::Experts experts() const { return {offsets, counts}; }
  };
  bool is_divided() const { return places_ > 1; }
  int64_t num_rows(int64_t tokens) const {
    return expert_rows(tokens * std::min(moe_.experts_per_token, num_here_), num_here_);
  }
  // [T, cols] of the rank at a place, in a tensor [P T, cols] of all.
  TensorView of_source(const StepContext& step, TensorId id, int64_t source, int64_t cols) const;
  TensorView experts(const StepContext& step, int64_t source) const {
    return of_source(step, experts_, source, moe_.experts_per_token);
  }
  TensorView weights(const StepContext& step, int64_t source) const {
    return of_source(step, weights_, source, moe_.experts_per_token);
  }
  Rows sort(const StepContext& step, int64_t source) const;
  // x of all ranks in a buffer of them.
  struct Shared {
    TensorId data, scale;
  };
  Shared declare_shared(BufferScope& scope, const std::string& name, const Format& format, PhaseMask phases) const;
  void share(const StepContext& step, const ScaledView& x, const Shared& all) const;
  ScaledView shared(const StepContext& step, const ScaledView& x, const Shared& all, int64_t source) const;
  // Adds up what all ranks have made of each other's tokens: `partial` of all sources to `out`, of this rank's.
  void add_up(const StepContext& step, TensorId partial, const TensorView& out, bool accumulate) const;
  // x's rows in the order of experts, in rows and transposed where x has both; `buffers` have their codes.
  struct Gathered {
    TensorId row, transposed;
  };
  GemmInput gather(const StepContext& step, const Rows& rows, const GemmInput& x, const Gathered& buffers) const;
  // Leaves the outputs of the experts in rows_, if somebody wants them.
  Rows forward_rows(const StepContext& step, int64_t source, const ScaledView& x, bool wants_out) const;
  // Leaves the gradients of the experts' inputs in rows_, and those of the rows' weights.
  void backward_rows(const StepContext& step, const Rows& rows, const GemmInput& d_out, const InputAgain& x,
                     const TensorView& d_x, bool adds) const;
  GemmInput output_gradient(const StepContext& step, const GemmInput& d_out, int64_t source) const;
  ScaledView weight(const StepContext& step, int index) const;
  void input_gradient(const StepContext& step, const Rows& rows, const GemmInput& d_y, int weight,
                      const TensorView& d_x) const;
  void weight_gradient(const StepContext& step, const Rows& rows, const GemmInput& d_y, const GemmInput& x,
                       int weight, bool adds) const;
  // For RouteBackward's row_of_slot and d_row_weights.
  void router_backward(const StepContext& step, const TensorView& row_of_slot, const TensorView& d_row_weights,
                       const TensorView& x, const TensorView& d_x) const;

  int64_t block_;
  MoeConfig moe_;
  int64_t width_, d_ffn_;
  int64_t place_, places_, num_here_;  // of the ranks that divide the experts, and the experts of this one
  GateActivation activation_;
  int router_, router_bias_, up_gate_weight_, down_weight_;  // parameters; a bias of -1: none
  bool trains_router_, trains_up_gate_, trains_down_;
  bool is_fp8_;
  bool saves_product_;
  ExpertAdapters up_gate_adapters_, down_adapters_;
  bool reads_product_again_;
  bool samples_amax_ = false;
  std::optional<Swiglu> shared_;

  RouterLoads loads_;
  TensorId logits_;                                        // [T, E] fp32
  TensorId experts_, weights_;                             // [P T, k] int32 and fp32
  TensorId offsets_, counts_, row_of_slot_, slot_of_row_;  // of SortByExpert
  TensorId row_weights_, d_row_weights_;                   // [R] fp32
  Gathered input_;                                         // [R, d] codes of x, or x; [d, R]
  TensorId up_gate_plain_;                                 // [R, 2f] where up_gate_ is not that
  struct OfSource {
    MatrixId up_gate;      // [R, 2f] rows: up, gate
    MatrixId silu;         // [R, f] with precision.save_silu
    GemmInputIds product;  // [R, f] input of the down projection
  };
  std::vector<OfSource> sources_;  // P
  TensorId rows_;                  // [R, d] what experts leave, or its gradient
  Gathered d_rows_;                // [R, d] gradient of that, [d, R]
  TensorId d_product_;             // [R, f]
  GemmInputIds d_up_gate_;         // [R, 2f]
  TensorId d_logits_;              // [T, E]
  // Where ranks divide experts: of all tokens.
  Shared shared_input_, shared_gradient_;  // [P T, d] x, transposed again in backward as [P, d T]; the output's
  TensorId gradient_t_;                    // [d, T] codes
  TensorId partial_;                       // [P T, d] of this rank's experts: outputs, or gradients of inputs
  TensorId d_weights_, own_d_weights_;     // [P T, k] and [T, k] fp32, of the slots
};

}  // namespace parka
