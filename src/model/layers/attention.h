#pragma once
#include <string>

#include "kernels/ops/attention/rope.h"
#include "kernels/ops/norm/qk_norm.h"
#include "model/buffer_scope.h"
#include "model/layers/linear.h"
#include "model/step_context.h"

namespace parka {

// out = W_out attend(rotate(W_qkv x)), causal within each sequence or document, through a window in the blocks that
// model.sliding_window is for. With model.qkv_bias q, k and v have a bias, and with model.qk_norm the queries and
// keys are then normalised before they are rotated. An encoder has out = W_out attend(W_qkv x) over all of a
// sequence, both with biases. An inner layer of Branch. The only one that knows q, k and v.
class Attention {
 public:
  static constexpr const char *kNormName = "attention_norm", *kPostNormName = "attention_post_norm";
  static constexpr PhaseMask kForwardPhase = kForwardAttention;
  static constexpr PhaseMask kRowsPhases = kBackwardAttentionOut, kTransposedPhases = kBackwardAttentionOut;
  static constexpr PhaseMask kLastBackwardPhase = kBackwardQkv;
  static constexpr auto kNormInput = QuantizedTensor::kAttentionNormInput;
  static constexpr auto kNormOutput = QuantizedTensor::kAttentionNormOutput;
  static constexpr auto kPostNormInput = QuantizedTensor::kAttentionPostNormInput;
  static constexpr auto kOutputGradient = QuantizedTensor::kAttentionOutGradient;

  static void add_parameters(ParameterList& list, const ModelConfig& model, const std::string& prefix,
                             double depth);

  Attention(const ModelConfig& model, const PrecisionConfig& precision, const ParameterTable& table, int64_t block,
            const std::string& prefix);

  void declare(BufferScope& scope);
  bool reads_input_again() const { return qkv_layer_.reads_input_again(); }
  bool reads_fp8() const { return qkv_layer_.is_fp8(); }
  bool reads_fp8_forward() const { return qkv_layer_.is_fp8_forward(); }
  bool reads_fp8_gradient() const { return out_layer_.is_fp8(); }
  void forward(const StepContext& step, const ScaledView& x, const TensorView& out) const;
  void backward(const StepContext& step, const GemmInput& d_out, const InputAgain& x, const TensorView& d_x) const;

 private:
  int64_t d_heads() const { return num_heads_ * head_dim_; }
  int64_t d_qkv() const { return (num_heads_ + 2 * num_kv_heads_) * head_dim_; }

  void declare_output(BufferScope& scope);
  void declare_backward(BufferScope& scope);

  const Positions& positions(const StepContext& step) const {
    return window_ > 0 ? step.windowed_positions : step.positions;
  }
  // The window that attention's ops get: 0 where no row has earlier keys.
  int64_t window(const StepContext& step) const { return positions(step).first_keys.empty() ? 0 : window_; }

  bool has_qk_norm() const { return qk_norm_ != QkNormKind::kNone; }
  TensorView rotated(const StepContext& step) const;
  void project(const StepContext& step, const ScaledView& x, const TensorView& qkv) const;
  void rotate(const StepContext& step, const TensorView& qkv, const ScaledView& saved) const;
  RopeForward rotation(const StepContext& step, const TensorView& qkv, const ScaledView& saved) const;
  void normalize_and_rotate(const StepContext& step, const ScaledView& x, const ScaledView& saved) const;
  void normalize_backward(const StepContext& step, const ScaledView& x, const TensorView& d_qkv,
                          const TensorView& d_qkv_amax) const;
  void attend(const StepContext& step, const TensorView& qkv, const TensorView& out, const TensorView& amax) const;
  GemmInput output_again(const StepContext& step, const TensorView& attention) const;
  void attend_backward(const StepContext& step, const TensorView& qkv, const TensorView& attention,
                       const TensorView& d_attention, const TensorView& d_qkv, const TensorView& d_qkv_amax) const;
  TensorView log_sum_exp(const StepContext& step) const;
  AttentionForward forward_arguments(const StepContext& step, const TensorView& qkv, const TensorView& out) const;
  AttentionBackward backward_arguments(const StepContext& step, const TensorView& qkv, const TensorView& out,
                                       const TensorView& d_out, const TensorView& d_qkv) const;

  // Sequences that ranks share (attention_context.cpp).
  void attend_in_context(const StepContext& step, const TensorView& qkv, const TensorView& out) const;
  void attend_backward_in_context(const StepContext& step, const TensorView& qkv, const TensorView& attention,
                                  const TensorView& d_attention, const TensorView& d_qkv) const;

  // Generation (attention_cache.cpp).
  void append_to_cache(const StepContext& step, const TensorView& qkv) const;
  void attend_to_cache(const StepContext& step, const TensorView& qkv, const TensorView& out,
                       const TensorView& amax) const;

  TensorView sample_to_save(const StepContext& step, const TensorView& qkv) const;

  int64_t block_;
  int64_t num_heads_, num_kv_heads_, head_dim_;
  bool is_encoder_;
  int64_t window_;  // keys that a query attends to; 0: all
  QkNormKind qk_norm_;
  float norm_eps_, norm_weight_offset_;
  float scale_;          // of the scores
  int q_norm_, k_norm_;  // their weights; -1: none
  Linear qkv_layer_, out_layer_;

  // [T, (H + 2 Hkv) D] rotated q, k, and v, which attention reads. With a norm and no FP8 copy: as projected.
  TensorId qkv_;
  // The same in FP8, or with a norm q, k and v as they are projected; invalid: qkv_ itself is kept.
  MatrixId qkv_saved_;
  TensorId rotated_;    // with a norm only: what attention reads; qkv_ where it has an FP8 copy
  TensorId rstd_;       // with a norm only: [T, groups] its statistics
  TensorId lse_;        // [B, H, S]; where C ranks share sequences [B, H / C, whole length]
  TensorId attention_;  // [T, H D] attention's output
  // [1] fp32 of it; only where its FP8 copies have a tensor-wide scale, and attention writes what they are made of
  TensorId amax_;
  GemmInputIds attention_fp8_;   // [T, H D] input of the output projection; invalid without FP8 GEMMs
  TensorId d_attention_;         // [T, H D]
  TensorId d_qkv_, d_qkv_amax_;  // as qkv_; [1] fp32 as amax_
  TensorId scratch_;             // [bytes] u8; invalid where attention_backward has no use for it
  TensorId parts_, whole_;       // where ranks share sequences: as qkv_; what forward sends and receives
  GemmInputIds d_qkv_fp8_;       // as qkv_
};

}  // namespace parka
