#include "model/layers/mlp.h"

#include "kernels/ops/quantize/quantize.h"

namespace parka {

void Mlp::add_parameters(ParameterList& list, const ModelConfig& model, const std::string& prefix, double depth) {
  const int64_t d = model.d_model, f = model.d_ffn;
  Linear::add_parameter(list, prefix + "fc1", f, d, list.initial_std(d, 0));
  Linear::add_bias(list, prefix + "fc1", f);
  Linear::add_parameter(list, prefix + "fc2", d, f, list.initial_std(f, depth));
  Linear::add_bias(list, prefix + "fc2", d);
}

Mlp::Mlp(const ModelConfig& model, const PrecisionConfig& precision, const ParameterTable& table, int64_t /*block*/,
         const std::string& prefix)
    : d_ffn_(model.d_ffn),
      activation_(model.mlp_activation),
      fc1_(precision, table, prefix + "fc1"),
      fc2_(precision, table, prefix + "fc2"),
      saves_product_(precision.save_product) {}

void Mlp::declare(BufferScope& scope) {
  const int64_t T = scope.tokens(), f = d_ffn_;
  const Formats& formats = scope.formats();
  const PhaseMask forward = scope.forward(kForwardFfn);
  if (formats.up_gate.scaling != Scaling::kNone) {
    hidden_ = scope.workspace("hidden", scope.compute(), {T, f}, forward | kBackwardDown | kBackwardSwiglu);
    hidden_saved_ = scope.kept("hidden_fp8", formats.up_gate, T, f);
  } else {
    hidden_ = scope.kept("hidden", scope.compute(), {T, f});
  }
  product_ = scope.gemm_input("product", f, saves_product_, forward, kBackwardSwiglu, fc2_.reads_input_again(),
                              fc2_.is_fp8(), fc2_.is_fp8());
  if (fc2_.is_fp8()) {
    activated_ = scope.workspace("activated", scope.compute(), {T, f}, forward | kBackwardSwiglu);
  }
  if (!scope.has_backward()) return;
  d_hidden_ =
      scope.workspace("d_hidden", scope.compute(), {T, f}, kBackwardDown | kBackwardSwiglu | kBackwardUpGate);
  if (!fc1_.is_fp8()) return;
  constexpr PhaseMask kCodes = kBackwardSwiglu | kBackwardUpGate;
  d_hidden_fp8_.row = scope.workspace("d_hidden_fp8", formats.gradient, T, f, kCodes);
  if (!fc1_.trains_weight()) return;
  d_hidden_fp8_.transposed =
      scope.workspace("d_hidden_fp8_t", formats.gradient, f, T, kCodes, d_hidden_fp8_.row.scale);
}

void Mlp::save_hidden(const StepContext& step, const TensorView& hidden) const {
  const ScaledView saved = step.matrix(hidden_saved_, step.num_tokens(), d_ffn_);
  if (saved.empty()) return;
  quantize(step.device, {.x = hidden, .out = saved});
  quantize(step.device, {.x = saved, .out = hidden});
}

// Into product_, or where it is quantized from.
TensorView Mlp::activate(const StepContext& step, const TensorView& hidden) const {
  const int64_t T = step.num_tokens();
  const TensorView out =
      activated_.valid() ? step.tensor(activated_, T, d_ffn_) : step.matrix(product_.row, T, d_ffn_).data;
  activation_forward(step.device, {.kind = activation_, .x = hidden, .y = out});
  return out;
}

void Mlp::forward(const StepContext& step, const ScaledView& x, const TensorView& out) const {
  const int64_t T = step.num_tokens(), f = d_ffn_;
  const TensorView hidden = step.tensor(hidden_, T, f);
  const ScaledView product = step.matrix(product_.row, T, f);
  fc1_.forward(step, x, hidden);
  save_hidden(step, hidden);
  const TensorView activated = activate(step, hidden);
  if (activated_.valid()) {
    const bool transposes = step.keep && saves_product_;
    quantize(step.device, {.x = activated,
                           .out = product,
                           .out_t = transposes ? step.matrix(product_.transposed, f, T) : ScaledView{}});
  }
  fc2_.forward(step, product, out);
}

// The input of fc2 as its weight gradient wants it: what forward kept, or made again.
GemmInput Mlp::product_again(const StepContext& step, const TensorView& hidden) const {
  const int64_t T = step.num_tokens(), f = d_ffn_;
  const bool is_fp8 = product_.transposed.valid();
  const GemmInput product = {is_fp8 ? ScaledView{} : step.matrix(product_.row, T, f),
                             step.matrix(product_.transposed, f, T)};
  if (saves_product_) return product;
  const TensorView activated = activate(step, hidden);
  if (is_fp8) {
    quantize(step.device, {.x = activated,
                           .out = {},
                           .out_t = product.transposed,
                           .scale_given = product.transposed.scaling == Scaling::kTensor});
  }
  return product;
}

void Mlp::backward(const StepContext& step, const GemmInput& d_out, const InputAgain& x,
                   const TensorView& d_x) const {
  const int64_t T = step.num_tokens(), f = d_ffn_;
  const TensorView hidden = step.tensor(hidden_, T, f), d_hidden = step.tensor(d_hidden_, T, f);
  const ScaledView saved = step.matrix(hidden_saved_, T, f);
  if (!saved.empty()) quantize(step.device, {.x = saved, .out = hidden});
  fc2_.input_gradient(step, d_out, d_hidden);
  fc2_.bias_gradient(step, d_out.plain);
  if (fc2_.reads_input_again()) fc2_.weight_gradient(step, d_out, product_again(step, hidden));
  activation_backward(step.device, {.kind = activation_, .x = hidden, .d_y = d_hidden, .d_x = d_hidden});
  fc1_.bias_gradient(step, d_hidden);
  GemmInput d_fc1 = {d_hidden, {}};
  if (d_hidden_fp8_.row.valid()) {
    d_fc1 = {step.matrix(d_hidden_fp8_.row, T, f), step.matrix(d_hidden_fp8_.transposed, f, T)};
    quantize(step.device, {.x = d_hidden, .out = d_fc1.row, .out_t = d_fc1.transposed});
  }
  fc1_.input_gradient(step, d_fc1, d_x);
  if (fc1_.reads_input_again()) fc1_.weight_gradient(step, d_fc1, x());
}

}  // namespace parka
