#include "model/layers/swiglu.h"

#include <utility>

#include "kernels/ops/quantize/quantize.h"
#include "kernels/ops/swiglu/swiglu.h"

namespace parka {
namespace {

// One kernel where the device has that.
void project(const StepContext& step, const SwigluProjection& a) {
  const bool as_one = runs_as_one(step.device, a);
  if (as_one) swiglu_projection(step.device, a);
  // One kernel leaves none of the projection, of which samples are taken.
  if (!as_one || step.samples.active()) gemm(step.device, a.projection);
  if (!as_one) swiglu_forward(step.device, a.swiglu);
}

}  // namespace

void Swiglu::add_parameters(ParameterList& list, const ModelConfig& model, const std::string& prefix,
                            double depth) {
  const int64_t d = model.d_model, f = model.d_ffn;
  Linear::add_parameter(list, prefix + "up_gate", 2 * f, d, list.initial_std(d, 0));
  list.add_matrices(prefix, prefix + "up_gate", d, {{"up_proj", f}, {"gate_proj", f}});
  Linear::add_parameter(list, prefix + "down", d, f, list.initial_std(f, depth));
  list.add_matrices(prefix, prefix + "down", f, {{"down_proj", d}});
}

Swiglu::Swiglu(const ModelConfig& model, const PrecisionConfig& precision, const ParameterTable& table,
               int64_t block, const std::string& prefix, std::string buffers)
    : block_(block),
      buffers_(std::move(buffers)),
      d_ffn_(model.d_ffn),
      activation_(model.activation),
      up_gate_layer_(precision, table, prefix + "up_gate"),
      down_layer_(precision, table, prefix + "down"),
      saves_product_(precision.save_product) {}

void Swiglu::declare(BufferScope& scope) {
  const int64_t T = scope.tokens(), f = d_ffn_;
  const Formats& formats = scope.formats();
  const PhaseMask forward = scope.forward(kForwardFfn);
  up_gate_layer_.declare(scope, buffers_ + "up_gate", forward, kBackwardUpGate);
  down_layer_.declare(scope, buffers_ + "down", forward, kBackwardDown | kBackwardSwiglu);
  if (formats.up_gate.scaling != Scaling::kNone) {
    up_gate_plain_ = scope.workspace(buffers_ + "up_gate", scope.compute(), {T, 2 * f}, forward);
  }
  up_gate_ = scope.kept(buffers_ + "up_gate", formats.up_gate, T, 2 * f);
  if (scope.precision().save_silu) {
    silu_ = scope.kept(buffers_ + "silu", formats.silu, T, f);
    scope.sample(2 * f, f);
  }
  product_ = scope.gemm_input(buffers_ + "product", f, saves_product_, forward, kBackwardSwiglu,
                              down_layer_.reads_input_again(), down_layer_.is_fp8(), down_layer_.is_fp8_forward());
  if (!scope.has_backward()) return;
  constexpr PhaseMask kGradient = kBackwardSwiglu | kBackwardUpGate;
  d_product_ = scope.workspace(buffers_ + "d_product", scope.compute(), {T, f}, kBackwardDown | kBackwardSwiglu);
  const bool is_fp8 = up_gate_layer_.is_fp8();
  const Format& gradient = formats.gradient_of(is_fp8);
  samples_amax_ = formats.samples_gradient_amax && is_fp8;
  d_up_gate_.row = scope.workspace(buffers_ + "d_up_gate", gradient, T, 2 * f, kGradient);
  if (is_fp8) scope.sample(2 * f);
  if (!is_fp8 || !up_gate_layer_.trains_weight()) return;
  d_up_gate_.transposed =
      scope.workspace(buffers_ + "d_up_gate_t", gradient, 2 * f, T, kGradient, d_up_gate_.row.scale);
}

void Swiglu::forward(const StepContext& step, const ScaledView& x, const TensorView& out) const {
  const int64_t T = step.num_tokens(), f = d_ffn_;
  const ScaledView up_gate = step.matrix(up_gate_, T, 2 * f), product = step.matrix(product_.row, T, f);
  const TensorView up_gate_plain = step.tensor(up_gate_plain_, T, 2 * f);
  const TensorView projected = up_gate_plain.empty() ? up_gate.data : up_gate_plain;
  const SwigluForward swiglu = {.up_gate = up_gate,
                                .silu = step.matrix(silu_, T, f),
                                .product = product,
                                .product_t = step.keep && saves_product_ && down_layer_.is_fp8_forward()
                                                 ? step.matrix(product_.transposed, f, T)
                                                 : ScaledView{},
                                .up_gate_plain = up_gate_plain,
                                .activation = activation_};
  if (up_gate_layer_.is_product() && !up_gate_plain.empty()) {
    project(step, {up_gate_layer_.product(step, x, projected), swiglu});
  } else {
    up_gate_layer_.forward(step, x, projected);
    swiglu_forward(step.device, swiglu);
  }
  step.samples.add(step.device, block_, swiglu, projected, /*is_more=*/is_beside_experts());
  down_layer_.forward(step, product, out);
}

void Swiglu::backward(const StepContext& step, const GemmInput& d_out, const InputAgain& x,
                      const TensorView& d_x) const {
  const int64_t T = step.num_tokens(), f = d_ffn_;
  const TensorView d_product = step.tensor(d_product_, T, f);
  const bool is_fp8 = product_.transposed.valid(), is_plain = !down_layer_.is_fp8_forward(),
             makes_product = down_layer_.reads_input_again() && !saves_product_;
  const GemmInput product = {is_fp8 && !is_plain ? ScaledView{} : step.matrix(product_.row, T, f),
                             step.matrix(product_.transposed, f, T)};
  const GemmInput d_up_gate = {step.matrix(d_up_gate_.row, T, 2 * f), step.matrix(d_up_gate_.transposed, 2 * f, T)};
  down_layer_.input_gradient(step, d_out, d_product);
  const SwigluBackward swiglu = {.up_gate = step.matrix(up_gate_, T, 2 * f),
                                 .silu = step.matrix(silu_, T, f),
                                 .d_product = d_product,
                                 .d_up_gate = d_up_gate.row,
                                 .d_up_gate_t = d_up_gate.transposed,
                                 .samples_amax = samples_amax_,
                                 .product = makes_product ? product.row : ScaledView{},
                                 .product_t = makes_product && !is_plain ? product.transposed : ScaledView{},
                                 .activation = activation_};
  swiglu_backward(step.device, swiglu);
  step.samples.add(step.device, block_, swiglu);
  if (is_fp8 && is_plain) quantize(step.device, {.x = product.row, .out = {}, .out_t = product.transposed});
  if (down_layer_.reads_input_again()) down_layer_.weight_gradient(step, d_out, product);
  up_gate_layer_.input_gradient(step, d_up_gate, d_x);
  if (up_gate_layer_.reads_input_again()) up_gate_layer_.weight_gradient(step, d_up_gate, x());
}

}  // namespace parka
