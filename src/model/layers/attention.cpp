#include "model/layers/attention.h"

#include <cmath>
#include <optional>
#include <utility>
#include <vector>

#include "kernels/op/workspace.h"
#include "kernels/ops/attention/attention.h"
#include "kernels/ops/quantize/quantize.h"

namespace parka {

void Attention::add_parameters(ParameterList& list, const ModelConfig& model, const std::string& prefix,
                               double depth) {
  const int64_t d = model.d_model;
  const int64_t keys = model.kv_heads() * model.head_dim();
  Linear::add_parameter(list, prefix + "qkv", model.d_qkv(), d, list.initial_std(d, 0));
  list.add_matrices(prefix, prefix + "qkv", d, {{"q_proj", model.d_heads()}, {"k_proj", keys}, {"v_proj", keys}});
  if (model.qkv_bias || model.is_encoder()) Linear::add_bias(list, prefix + "qkv", model.d_qkv());
  if (model.qk_norm != QkNormKind::kNone) {
    const bool full = model.qk_norm == QkNormKind::kFull;
    const int64_t D = model.head_dim();
    const auto add = [&](const char* name, int64_t heads) {
      list.add(prefix + name, 1, full ? heads * D : D, ParameterRole::kNorm, /*decayed=*/false, 0.0);
    };
    add("q_norm", model.num_heads);
    add("k_norm", model.kv_heads());
  }
  Linear::add_parameter(list, prefix + "attention_out", d, model.d_heads(), list.initial_std(d, depth));
  if (model.is_encoder()) Linear::add_bias(list, prefix + "attention_out", d);
  list.add_matrices(prefix, prefix + "attention_out", model.d_heads(), {{"o_proj", d}});
}

Attention::Attention(const ModelConfig& model, const PrecisionConfig& precision, const ParameterTable& table,
                     int64_t block, const std::string& prefix)
    : block_(block),
      num_heads_(model.num_heads),
      num_kv_heads_(model.kv_heads()),
      head_dim_(model.head_dim()),
      is_encoder_(model.is_encoder()),
      window_(model.is_windowed(block) ? model.sliding_window : 0),
      qk_norm_(model.qk_norm),
      norm_eps_(static_cast<float>(model.norm_eps)),
      norm_weight_offset_(model.norm_weight_offset()),
      scale_(1.0f / std::sqrt(static_cast<float>(model.pre_attn_scalar()))),
      q_norm_(table.index_of(prefix + "q_norm")),
      k_norm_(table.index_of(prefix + "k_norm")),
      qkv_layer_(precision, table, prefix + "qkv"),
      out_layer_(precision, table, prefix + "attention_out") {}

void Attention::declare(BufferScope& scope) {
  const int64_t T = scope.tokens();
  const Format& saved = scope.formats().qkv;
  const PhaseMask phases = scope.forward(kForwardAttention) | kBackwardAttentionOut | kBackwardAttention;
  if (saved.scaling != Scaling::kNone) {
    qkv_ = scope.workspace("qkv", scope.compute(), {T, d_qkv()}, phases);
    qkv_saved_ = scope.kept("qkv_fp8", saved, T, d_qkv());
    scope.sample(d_qkv());
  } else {
    qkv_ = scope.kept("qkv", scope.compute(), {T, d_qkv()});
  }
  if (has_qk_norm()) {
    // Backward makes them again: it is one pass over q, k and v.
    const PhaseMask again = scope.forward(kForwardAttention) | kBackwardAttention;
    rotated_ = qkv_saved_.valid() ? qkv_ : scope.workspace("qkv_rotated", scope.compute(), {T, d_qkv()}, again);
    rstd_ = scope.workspace("qk_norm_rstd", DType::kF32, {T, qk_norm_groups(qk_norm_, num_heads_, num_kv_heads_)},
                            again);
  }
  const BatchShape& shape = scope.shape();
  lse_ =
      scope.kept("lse", DType::kF32, {shape.num_sequences, num_heads_ / shape.context_size, shape.whole_length()});
  if (shape.context_size > 1) {
    const PhaseMask forward = scope.forward(kForwardAttention);
    parts_ = scope.workspace("context_parts", scope.compute(), {T, d_qkv()}, forward);
    whole_ = scope.workspace("context_whole", scope.compute(), {T, d_qkv()}, forward);
  }
  attention_ = scope.kept("attention", scope.compute(), {T, d_heads()});
  qkv_layer_.declare(scope, "qkv", scope.forward(kForwardAttention), kBackwardQkv);
  out_layer_.declare(scope, "attention_out", scope.forward(kForwardAttention), kBackwardAttentionOut);
  if (out_layer_.is_fp8()) declare_output(scope);
  if (scope.has_backward()) declare_backward(scope);
}

void Attention::declare_output(BufferScope& scope) {
  const int64_t T = scope.tokens();
  const Format& format = scope.formats().activation;
  const PhaseMask forward = scope.forward(kForwardAttention);
  // With exchanged heads quantize finds the maximum, on each rank for its own tokens.
  const bool is_forward = out_layer_.is_fp8_forward();
  if (is_forward && format.scaling == Scaling::kTensor && scope.shape().context_size == 1) {
    amax_ = scope.workspace("attention_amax", DType::kF32, {1}, forward);
  }
  const TensorId scale = is_forward ? scope.kept_scale("attention_fp8") : TensorId{};
  if (is_forward) attention_fp8_.row = scope.workspace("attention_fp8", format, T, d_heads(), forward, scale);
  if (!scope.has_backward() || !out_layer_.trains_weight()) return;
  attention_fp8_.transposed =
      scope.workspace("attention_fp8_t", format, d_heads(), T, kBackwardAttentionOut, scale);
}

void Attention::declare_backward(BufferScope& scope) {
  const int64_t T = scope.tokens();
  const BatchShape& shape = scope.shape();
  const Format& gradient = scope.formats().gradient;
  const bool is_fp8 = qkv_layer_.is_fp8();
  d_attention_ =
      scope.workspace("d_attention", scope.compute(), {T, d_heads()}, kBackwardAttentionOut | kBackwardAttention);
  // Read by GEMMs, or by what makes their FP8 inputs of it.
  d_qkv_ = scope.workspace("d_qkv", scope.compute(), {T, d_qkv()},
                           kBackwardAttention | (is_fp8 ? kBackwardQkvCodes : kBackwardQkv));
  const bool sees_earlier = !shape.separate_documents && (window_ == 0 || window_ >= shape.whole_length());
  if (scope.compute() == DType::kBF16 && sees_earlier && !is_encoder_) {
    // On every device, so that a plan holds for all: where it is large, attention is not what needs most memory.
    const int64_t B = shape.num_sequences, S = shape.whole_length(), H = num_heads_ / shape.context_size,
                  Hkv = num_kv_heads_ / shape.context_size;
    std::vector<int64_t> larger = cuda::attention_backward_scratch_choices(B, S, H, Hkv, head_dim_);
    if (!larger.empty()) {
      scratch_ = scope.growing_workspace("attention_scratch",
                                         cuda::attention_backward_scratch_bytes(B, S, H, Hkv, head_dim_),
                                         std::move(larger), kBackwardAttention);
    }
  }
  if (!is_fp8) return;
  if (gradient.scaling == Scaling::kTensor && (shape.context_size == 1 || has_qk_norm())) {  // as amax_
    d_qkv_amax_ = scope.workspace("d_qkv_amax", DType::kF32, {1}, kBackwardAttention | kBackwardQkvCodes);
  }
  constexpr PhaseMask kCodes = kBackwardQkvCodes | kBackwardQkv;
  d_qkv_fp8_.row = scope.workspace("d_qkv_fp8", gradient, T, d_qkv(), kCodes);
  if (!qkv_layer_.trains_weight()) return;
  d_qkv_fp8_.transposed = scope.workspace("d_qkv_fp8_t", gradient, d_qkv(), T, kCodes, d_qkv_fp8_.row.scale);
}

void Attention::forward(const StepContext& step, const ScaledView& x, const TensorView& out) const {
  const int64_t T = step.num_tokens();
  const TensorView qkv = step.tensor(qkv_, T, d_qkv());
  const TensorView attention = step.tensor(attention_, T, d_heads()), amax = step.vector(amax_, 1);
  project(step, x, qkv);
  attend(step, rotated(step), attention, amax);
  ScaledView projected = attention;
  if (attention_fp8_.row.valid()) {
    projected = step.matrix(attention_fp8_.row, T, d_heads());
    quantize(step.device, {.x = attention, .out = projected, .out_t = {}, .amax = amax});
    step.samples.add(step.device, block_, QuantizedTensor::kAttention, attention, projected);
  }
  out_layer_.forward(step, projected, out);
}

void Attention::backward(const StepContext& step, const GemmInput& d_out, const InputAgain& x,
                         const TensorView& d_x) const {
  const int64_t T = step.num_tokens();
  const TensorView qkv = step.tensor(qkv_, T, d_qkv()), attention = step.tensor(attention_, T, d_heads());
  const TensorView d_attention = step.tensor(d_attention_, T, d_heads()),
                   d_qkv_plain = step.tensor(d_qkv_, T, d_qkv());
  const TensorView d_qkv_amax = step.vector(d_qkv_amax_, 1);
  const ScaledView saved = step.matrix(qkv_saved_, T, d_qkv());
  if (!saved.empty() && !has_qk_norm()) quantize(step.device, {.x = saved, .out = qkv, .out_t = {}});
  out_layer_.input_gradient(step, d_out, d_attention);
  out_layer_.bias_gradient(step, d_out.plain);
  if (out_layer_.reads_input_again()) out_layer_.weight_gradient(step, d_out, output_again(step, attention));
  const ScaledView unnormalized = saved.empty() ? ScaledView(qkv) : saved;
  if (has_qk_norm()) normalize_and_rotate(step, unnormalized, {});
  // The maximum is of what the GEMMs read: the op that writes that finds it.
  attend_backward(step, rotated(step), attention, d_attention, d_qkv_plain,
                  has_qk_norm() ? TensorView{} : d_qkv_amax);
  if (has_qk_norm()) normalize_backward(step, unnormalized, d_qkv_plain, d_qkv_amax);
  qkv_layer_.bias_gradient(step, d_qkv_plain);
  GemmInput d_qkv_input = {d_qkv_plain, {}};
  if (d_qkv_fp8_.row.valid()) {
    d_qkv_input = {step.matrix(d_qkv_fp8_.row, T, d_qkv()), step.matrix(d_qkv_fp8_.transposed, d_qkv(), T)};
    quantize(step.device,
             {.x = d_qkv_plain, .out = d_qkv_input.row, .out_t = d_qkv_input.transposed, .amax = d_qkv_amax});
    step.samples.add(step.device, block_, QuantizedTensor::kQkvGradient, d_qkv_plain, d_qkv_input.row);
  }
  qkv_layer_.input_gradient(step, d_qkv_input, d_x);
  if (qkv_layer_.reads_input_again()) qkv_layer_.weight_gradient(step, d_qkv_input, x());
}

// The tensor that attention reads.
TensorView Attention::rotated(const StepContext& step) const {
  return step.tensor(has_qk_norm() ? rotated_ : qkv_, step.num_tokens(), d_qkv());
}

// q, k and v as attention reads them; and in FP8 for backward where that is what is kept.
void Attention::project(const StepContext& step, const ScaledView& x, const TensorView& qkv) const {
  const ScaledView saved = step.matrix(qkv_saved_, step.num_tokens(), d_qkv());
  std::optional<RopeProjection> both;  // where it may be one kernel
  if (qkv_layer_.is_product() && !saved.empty() && !has_qk_norm() && !is_encoder_) {
    both = RopeProjection{qkv_layer_.product(step, x, qkv), rotation(step, qkv, saved)};
  }
  const bool as_one = both && runs_as_one(step.device, *both);
  if (!both) {
    qkv_layer_.forward(step, x, qkv);
  } else if (!as_one || step.samples.active()) {
    // One kernel does not leave the projection, of which samples are taken; it overwrites qkv, and so comes after.
    gemm(step.device, both->projection);
  }
  const TensorView sample = sample_to_save(step, qkv);
  if (as_one) {
    rope_projection(step.device, *both);
  } else {
    rotate(step, qkv, saved);
  }
  step.samples.add(step.device, block_, QuantizedTensor::kQkv, sample, saved);
}

RopeForward Attention::rotation(const StepContext& step, const TensorView& qkv, const ScaledView& saved) const {
  return {.qkv = qkv,
          .cos_sin = positions(step).rotations,
          .num_heads = num_heads_,
          .num_kv_heads = num_kv_heads_,
          .saved = saved};
}

// From what the projection has written.
void Attention::rotate(const StepContext& step, const TensorView& qkv, const ScaledView& saved) const {
  if (has_qk_norm()) {
    normalize_and_rotate(step, qkv, saved);
  } else if (is_encoder_) {
    if (!saved.empty()) {
      quantize(step.device, {.x = qkv, .out = saved});
      quantize(step.device, {.x = saved, .out = qkv});  // attention reads the same, forward and backward
    }
  } else {
    rope_forward(step.device, rotation(step, qkv, saved));
  }
}

void Attention::normalize_and_rotate(const StepContext& step, const ScaledView& x, const ScaledView& saved) const {
  qk_norm_rope_forward(step.device, {.kind = qk_norm_,
                                     .x = x,
                                     .q_weight = step.weights.plain(q_norm_),
                                     .k_weight = step.weights.plain(k_norm_),
                                     .cos_sin = positions(step).rotations,
                                     .num_heads = num_heads_,
                                     .num_kv_heads = num_kv_heads_,
                                     .eps = norm_eps_,
                                     .saved = saved,
                                     .out = rotated(step),
                                     .rstd = step.tensor(rstd_, step.num_tokens(), step.arena[rstd_].dim[1]),
                                     .weight_offset = norm_weight_offset_});
}

// d_qkv, of what the norm has written, becomes that of what it reads.
void Attention::normalize_backward(const StepContext& step, const ScaledView& x, const TensorView& d_qkv,
                                   const TensorView& d_qkv_amax) const {
  qk_norm_backward(step.device, {.kind = qk_norm_,
                                 .x = x,
                                 .rstd = step.tensor(rstd_, step.num_tokens(), step.arena[rstd_].dim[1]),
                                 .q_weight = step.weights.plain(q_norm_),
                                 .k_weight = step.weights.plain(k_norm_),
                                 .d_qkv = d_qkv,
                                 .d_q_weight = step.gradient_to_add_to(q_norm_),
                                 .d_k_weight = step.gradient_to_add_to(k_norm_),
                                 .num_heads = num_heads_,
                                 .num_kv_heads = num_kv_heads_,
                                 .d_qkv_amax = d_qkv_amax,
                                 .weight_offset = norm_weight_offset_});
}

void Attention::attend(const StepContext& step, const TensorView& qkv, const TensorView& out,
                       const TensorView& amax) const {
  if (step.cache != nullptr) append_to_cache(step, qkv);
  if (step.attends_to_cache()) {
    attend_to_cache(step, qkv, out, amax);
    return;
  }
  if (step.context != nullptr) {
    attend_in_context(step, qkv, out);
    return;
  }
  step.clear_padding(out);
  AttentionForward arguments = forward_arguments(step, step.rows_of_sequences(qkv), step.rows_of_sequences(out));
  arguments.out_amax = amax;
  attention_forward(step.device, arguments);
}

// The arguments cover whole sequences, with the heads that this rank has of them.
AttentionForward Attention::forward_arguments(const StepContext& step, const TensorView& qkv,
                                              const TensorView& out) const {
  return {.qkv = qkv,
          .out = out,
          .lse = log_sum_exp(step),
          .sequence_length = step.shape.whole_length(),
          .num_heads = num_heads_ / step.shape.context_size,
          .num_kv_heads = num_kv_heads_ / step.shape.context_size,
          .scale = scale_,
          .first_key = positions(step).first_keys,
          .window = window(step),
          .causal = !is_encoder_};
}

// The input of the output projection as its weight gradient wants it.
GemmInput Attention::output_again(const StepContext& step, const TensorView& attention) const {
  if (!attention_fp8_.transposed.valid()) return {attention, {}};
  const int64_t T = step.num_tokens();
  const GemmInput again = {attention, step.matrix(attention_fp8_.transposed, d_heads(), T)};
  // With the scale that forward kept: the same codes.
  quantize(step.device,
           {.x = attention,
            .out = {},
            .out_t = again.transposed,
            .scale_given = again.transposed.scaling == Scaling::kTensor && out_layer_.is_fp8_forward()});
  return again;
}

void Attention::attend_backward(const StepContext& step, const TensorView& qkv, const TensorView& attention,
                                const TensorView& d_attention, const TensorView& d_qkv,
                                const TensorView& d_qkv_amax) const {
  if (step.context != nullptr) {
    attend_backward_in_context(step, qkv, attention, d_attention, d_qkv);
    return;
  }
  step.clear_padding(d_qkv);
  AttentionBackward arguments =
      backward_arguments(step, step.rows_of_sequences(qkv), step.rows_of_sequences(attention),
                         step.rows_of_sequences(d_attention), step.rows_of_sequences(d_qkv));
  arguments.d_qkv_amax = d_qkv_amax;
  step.samples.add_attention(step.device, block_, arguments);
  attention_backward(step.device, arguments);
}

// The same as in forward_arguments().
AttentionBackward Attention::backward_arguments(const StepContext& step, const TensorView& qkv,
                                                const TensorView& out, const TensorView& d_out,
                                                const TensorView& d_qkv) const {
  return {.qkv = qkv,
          .out = out,
          .d_out = d_out,
          .lse = log_sum_exp(step),
          .d_qkv = d_qkv,
          .sequence_length = step.shape.whole_length(),
          .num_heads = num_heads_ / step.shape.context_size,
          .num_kv_heads = num_kv_heads_ / step.shape.context_size,
          .scale = scale_,
          .first_key = positions(step).first_keys,
          .cos_sin = step.context != nullptr ? positions(step).whole_rotations : positions(step).rotations,
          .scratch = step.arena[scratch_],
          .window = window(step),
          .causal = !is_encoder_};
}

TensorView Attention::log_sum_exp(const StepContext& step) const {
  const TensorView whole = step.arena[lse_];
  const BatchShape& shape = step.shape;
  return {whole.data, whole.dtype, {shape.num_sequences, num_heads_ / shape.context_size, shape.whole_length()}};
}

// q, k and v before they are quantized, rotated unless there is a norm. Empty if no sample is wanted.
TensorView Attention::sample_to_save(const StepContext& step, const TensorView& qkv) const {
  if (!step.samples.active() || !qkv_saved_.valid()) return {};
  const TensorView sample = step.samples.buffer(d_qkv());
  quantize(step.device, {.x = step.samples.first_rows(qkv), .out = sample});
  if (!has_qk_norm()) rope_forward(step.device, rotation(step, sample, {}));
  return sample;
}

}  // namespace parka
