#include "model/layers/moe.h"

#include <algorithm>
#include <cmath>

#include "kernels/ops/elementwise/pointwise.h"
#include "kernels/ops/moe/grouped_gemm.h"
#include "kernels/ops/moe/routing.h"
#include "kernels/ops/swiglu/swiglu.h"

namespace parka {

void RouterLoads::declare(BufferScope& scope) {
  if (!exists()) return;
  loads = scope.workspace("router_loads", DType::kF32, {num_blocks, columns()}, kStep);  // backward reads all
  sum = scope.workspace("router_loads_sum", DType::kF32, {columns()}, kStep);
}

void RouterLoads::add_up(const StepContext& step) const {
  const TensorView total = summed(step);
  step.device.fill_zero(total.data, total.bytes());
  bias_backward(step.device, {.d_y = all(step), .d_bias = total});
}

// The losses are those of the step as one micro-batch, before their weights: see RouterLosses.
std::vector<ExpertUse> RouterLoads::of_blocks(std::span<const float> loads, const MoeConfig& moe) const {
  std::vector<ExpertUse> blocks(exists() ? static_cast<size_t>(moe.dense_layers) : 0);
  const auto E = static_cast<double>(num_experts);
  for (int64_t block = 0; block < num_blocks; ++block) {
    const auto of_block = loads.subspan(static_cast<size_t>(block * columns()), static_cast<size_t>(columns()));
    ExpertUse& use = blocks.emplace_back();
    double slots = 0, most = 0, idle = 0;
    for (int64_t e = 0; e < num_experts; ++e) {
      slots += of_block[e];
      most = std::max(most, double{of_block[e]});
      if (of_block[e] == 0) ++idle;
    }
    const double tokens = slots / static_cast<double>(moe.experts_per_token);
    use = {E * most / slots, idle / E, num_experts == 1 ? 1.0 : 0.0, 0.0, of_block[2 * num_experts] / tokens};
    for (int64_t e = 0; e < num_experts; ++e) {
      const double share = of_block[e] / slots;
      if (share > 0 && num_experts > 1) use.entropy -= share * std::log(share) / std::log(E);
      use.balance_loss += E * share * of_block[num_experts + e] / tokens;
    }
  }
  return blocks;
}

void Moe::add_parameters(ParameterList& list, const ModelConfig& model, const std::string& prefix, double depth) {
  const int64_t d = model.d_model, f = model.d_ffn, E = model.moe.num_experts;
  list.add(prefix + "router", E, d, ParameterRole::kRouter, /*decayed=*/true, list.initial_std(d, 0));
  if (model.moe.correction_bias) {
    list.add(prefix + "router_bias", 1, E, ParameterRole::kRouterBias, /*decayed=*/false, 0.0);
  }
  list.add(prefix + "experts.up_gate", E * 2 * f, d, ParameterRole::kExperts, /*decayed=*/true,
           list.initial_std(d, 0));
  list.stack(model.moe, {f, f});
  list.add(prefix + "experts.down", E * d, f, ParameterRole::kExperts, /*decayed=*/true,
           list.initial_std(f, depth));
  list.stack(model.moe, {d});
  if (model.moe.shared_width > 0) {
    Swiglu::add_parameters(list, model.with_one_ffn(model.moe.shared_width), prefix + "shared.", depth);
  }
}

Moe::Moe(const ModelConfig& model, const PrecisionConfig& precision, const ParameterTable& table, int64_t block,
         const std::string& prefix)
    : block_(block - model.moe.dense_layers),
      moe_(model.moe),
      width_(model.d_model),
      d_ffn_(model.d_ffn),
      activation_(model.activation),
      router_(table.index_of(prefix + "router")),
      router_bias_(table.index_of(prefix + "router_bias")),
      up_gate_weight_(table.index_of(prefix + "experts.up_gate")),
      down_weight_(table.index_of(prefix + "experts.down")),
      trains_router_(table.is_trainable(router_)),
      trains_up_gate_(table.is_trainable(up_gate_weight_)),
      trains_down_(table.is_trainable(down_weight_)),
      is_fp8_(precision.gemm != GemmPrecision::kCompute),
      saves_product_(precision.save_product),
      loads_(model) {
  if (moe_.shared_width > 0) {
    shared_.emplace(model.with_one_ffn(moe_.shared_width), precision, table, block, prefix + "shared.", "shared.");
  }
}

bool Moe::reads_input_again() const {
  return trains_router_ || trains_up_gate_ || (shared_ && shared_->reads_input_again());
}

void Moe::declare(BufferScope& scope) {
  const int64_t T = scope.tokens(), R = num_rows(T), d = width_, f = d_ffn_;
  const int64_t E = moe_.num_experts, k = moe_.experts_per_token;
  const Formats& formats = scope.formats();
  const PhaseMask forward = scope.forward(kForwardFfn);
  const bool goes_back = scope.has_backward();
  const auto with = [&](PhaseMask backward) { return forward | (goes_back ? backward : PhaseMask{0}); };
  if (shared_) shared_->declare(scope);
  loads_.declare(scope);
  logits_ = scope.kept("router_logits", DType::kF32, {T, E});
  experts_ = scope.kept("router_experts", DType::kI32, {T, k});
  weights_ = scope.kept("router_weights", DType::kF32, {T, k});
  const PhaseMask sorted = with(kBackwardPhases);
  offsets_ = scope.workspace("expert_offsets", DType::kI32, {E + 1}, sorted);
  counts_ = scope.workspace("expert_counts", DType::kI32, {E}, sorted);
  row_of_slot_ = scope.workspace("expert_row_of_slot", DType::kI32, {T, k}, sorted);
  slot_of_row_ = scope.workspace("expert_slot_of_row", DType::kI32, {R}, sorted);
  row_weights_ = scope.workspace("expert_row_weights", DType::kF32, {R}, sorted);
  rows_ = scope.workspace("expert_rows", scope.compute(), {R, d}, with(kBackwardUpGate));
  const bool reads_rows_again = !formats.fp8_gemm && trains_up_gate_;
  input_.row = scope.workspace("expert_input", formats.activation.dtype, {R, d},
                               reads_rows_again ? with(kBackwardUpGate) : forward);
  if (formats.up_gate.scaling != Scaling::kNone) {
    up_gate_plain_ = scope.workspace("expert_up_gate", scope.compute(), {R, 2 * f}, forward);
  }
  up_gate_ = scope.kept("expert_up_gate_kept", formats.up_gate, R, 2 * f);
  if (scope.precision().save_silu) {
    silu_ = scope.kept("expert_silu", formats.silu, R, f);
    scope.sample(2 * f, f);
  }
  product_ = scope.gemm_input("expert_product", f, saves_product_, forward, kBackwardSwiglu, trains_down_, R);
  if (!goes_back) return;
  const PhaseMask d_rows_read = trains_down_ ? kBackwardDown | kBackwardSwiglu : PhaseMask{kBackwardDown};
  d_rows_.row = scope.workspace("d_expert_rows", formats.gradient.dtype, {R, d},
                                formats.fp8_gemm ? PhaseMask{kBackwardDown} : d_rows_read);
  d_product_ = scope.workspace("d_expert_product", scope.compute(), {R, f}, kBackwardDown | kBackwardSwiglu);
  d_row_weights_ = scope.workspace("d_expert_row_weights", DType::kF32, {R}, kBackwardSwiglu | kBackwardUpGate);
  constexpr PhaseMask kGradient = kBackwardSwiglu | kBackwardUpGate;
  samples_amax_ = formats.samples_gradient_amax;
  d_up_gate_.row = scope.workspace("d_expert_up_gate", formats.gradient, R, 2 * f, kGradient);
  if (formats.gradient.scaling != Scaling::kNone) scope.sample(2 * f);
  d_logits_ = scope.workspace("d_router_logits", scope.compute(), {T, E}, kBackwardUpGate);
  if (!formats.fp8_gemm) return;
  if (trains_down_)
    d_rows_.transposed = scope.workspace("d_expert_rows_t", formats.gradient.dtype, {d, R}, d_rows_read);
  if (!trains_up_gate_) return;
  input_.transposed = scope.workspace("expert_input_t", formats.activation.dtype, {d, R}, kBackwardUpGate);
  d_up_gate_.transposed =
      scope.workspace("d_expert_up_gate_t", formats.gradient, 2 * f, R, kGradient, d_up_gate_.row.scale);
}

TensorView Moe::experts(const StepContext& step) const {
  return step.tensor(experts_, step.num_tokens(), moe_.experts_per_token);
}

Moe::Rows Moe::sort(const StepContext& step) const {
  const int64_t T = step.num_tokens(), k = moe_.experts_per_token, E = moe_.num_experts, R = num_rows(T);
  const Rows rows = {.count = R,
                     .offsets = step.vector(offsets_, E + 1),
                     .counts = step.vector(counts_, E),
                     .row_of_slot = step.tensor(row_of_slot_, T, k),
                     .slot_of_row = step.vector(slot_of_row_, R),
                     .weights = step.vector(row_weights_, R)};
  sort_by_expert(step.device, {.experts = experts(step),
                               .weights = step.tensor(weights_, T, k),
                               .offsets = rows.offsets,
                               .counts = rows.counts,
                               .row_of_slot = rows.row_of_slot,
                               .slot_of_row = rows.slot_of_row,
                               .row_weights = rows.weights});
  return rows;
}

GemmInput Moe::gather(const StepContext& step, const Rows& rows, const GemmInput& x,
                      const Gathered& buffers) const {
  GatherTokens a = {.slot_of_row = rows.slot_of_row, .slots_per_token = moe_.experts_per_token};
  GemmInput out;
  if (!x.row.empty() && buffers.row.valid()) {
    a.x = x.row.data;
    a.out = step.tensor(buffers.row, rows.count, width_);
    out.row = {a.out, x.row.scale, x.row.scaling};
  }
  if (!x.transposed.empty() && buffers.transposed.valid()) {
    a.x_t = x.transposed.data;
    a.out_t = step.tensor(buffers.transposed, width_, rows.count);
    out.transposed = {a.out_t, x.transposed.scale, x.transposed.scaling};
  }
  gather_tokens(step.device, a);
  return out;
}

ScaledView Moe::weight(const StepContext& step, int index) const {
  return is_fp8_ ? step.weights.quantized(step.device, index)
                 : ScaledView(step.weights.operand(step.device, index));
}

void Moe::forward(const StepContext& step, const ScaledView& x, const TensorView& plain,
                  const TensorView& out) const {
  const int64_t T = step.num_tokens(), f = d_ffn_, E = moe_.num_experts;
  const TensorView logits = step.tensor(logits_, T, E), chosen = experts(step);
  gemm(step.device, {.a = plain, .b = step.weights.plain(router_), .out = logits});
  route(step.device, {.logits = logits,
                      .bias = step.weights.plain(router_bias_),
                      .rule = moe_.rule(),
                      .experts = chosen,
                      .weights = step.tensor(weights_, T, moe_.experts_per_token)});
  router_load(step.device,
              {.logits = logits, .experts = chosen, .score = moe_.score, .load = loads_.of_block(step, block_)});
  const Rows rows = sort(step);
  const GemmInput input = gather(step, rows, {x, {}}, input_);
  const ScaledView up_gate = step.matrix(up_gate_, rows.count, 2 * f),
                   product = step.matrix(product_.row, rows.count, f);
  const TensorView up_gate_plain = step.tensor(up_gate_plain_, rows.count, 2 * f);
  const TensorView projected = up_gate_plain.empty() ? up_gate.data : up_gate_plain;
  grouped_gemm(step.device, {.a = input.row,
                             .b = weight(step, up_gate_weight_),
                             .offsets = rows.offsets,
                             .counts = rows.counts,
                             .out = projected,
                             .fast_accumulation = true});
  const SwigluForward swiglu = {
      .up_gate = up_gate,
      .silu = step.matrix(silu_, rows.count, f),
      .product = product,
      .product_t = step.keep && saves_product_ ? step.matrix(product_.transposed, f, rows.count) : ScaledView{},
      .up_gate_plain = up_gate_plain,
      .activation = activation_,
      .row_factor = rows.weights};
  swiglu_forward(step.device, swiglu);
  step.samples.add(step.device, block_ + moe_.dense_layers, swiglu, projected);
  const TensorView outputs = step.tensor(rows_, rows.count, width_);
  grouped_gemm(step.device, {.a = product,
                             .b = weight(step, down_weight_),
                             .offsets = rows.offsets,
                             .counts = rows.counts,
                             .out = outputs,
                             .fast_accumulation = true});
  if (shared_) shared_->forward(step, x, out);
  combine_rows(step.device,
               {.rows = outputs, .row_of_slot = rows.row_of_slot, .out = out, .accumulate = shared_.has_value()});
}

void Moe::input_gradient(const StepContext& step, const Rows& rows, const GemmInput& d_y, int weight,
                         const TensorView& d_x) const {
  grouped_gemm(step.device, {.a = d_y.row,
                             .b = is_fp8_ ? step.weights.transposed(step.device, weight)
                                          : ScaledView(step.weights.operand(step.device, weight)),
                             .b_transposed = !is_fp8_,
                             .offsets = rows.offsets,
                             .counts = rows.counts,
                             .out = d_x,
                             .fast_accumulation = is_fp8_});
}

void Moe::weight_gradient(const StepContext& step, const Rows& rows, const GemmInput& d_y, const GemmInput& x,
                          int weight) const {
  grouped_weight_gradient(step.device, {.d_y = is_fp8_ ? d_y.transposed : d_y.row,
                                        .x = is_fp8_ ? x.transposed : x.row,
                                        .offsets = rows.offsets,
                                        .counts = rows.counts,
                                        .out = step.gradient(weight),
                                        .accumulate = step.adds_to_gradients()});
}

void Moe::backward(const StepContext& step, const GemmInput& d_out, const InputAgain& x, const PlainAgain& plain,
                   const TensorView& d_x) const {
  // It goes through all phases before the experts do: what they share is alive in all (Stack).
  if (shared_) shared_->backward(step, d_out, x, d_x);
  const int64_t f = d_ffn_;
  const Rows rows = sort(step);
  const GemmInput d_rows = gather(step, rows, d_out, d_rows_);
  const TensorView d_product = step.tensor(d_product_, rows.count, f);
  input_gradient(step, rows, d_rows, down_weight_, d_product);

  const ScaledView up_gate = step.matrix(up_gate_, rows.count, 2 * f), silu = step.matrix(silu_, rows.count, f);
  const bool makes_product = trains_down_ && !saves_product_;
  const GemmInput product = {is_fp8_ ? ScaledView{} : step.matrix(product_.row, rows.count, f),
                             step.matrix(product_.transposed, f, rows.count)};
  const GemmInput d_up_gate = {step.matrix(d_up_gate_.row, rows.count, 2 * f),
                               step.matrix(d_up_gate_.transposed, 2 * f, rows.count)};
  swiglu_row_gradient(step.device, {.up_gate = up_gate,
                                    .silu = silu,
                                    .d_product = d_product,
                                    .d_row_factor = step.vector(d_row_weights_, rows.count),
                                    .activation = activation_});
  const SwigluBackward swiglu = {.up_gate = up_gate,
                                 .silu = silu,
                                 .d_product = d_product,
                                 .d_up_gate = d_up_gate.row,
                                 .d_up_gate_t = d_up_gate.transposed,
                                 .samples_amax = samples_amax_,
                                 .product = makes_product ? product.row : ScaledView{},
                                 .product_t = makes_product ? product.transposed : ScaledView{},
                                 .activation = activation_,
                                 .row_factor = rows.weights};
  swiglu_backward(step.device, swiglu);
  step.samples.add(step.device, block_ + moe_.dense_layers, swiglu);
  if (trains_down_) weight_gradient(step, rows, d_rows, product, down_weight_);

  const TensorView d_inputs = step.tensor(rows_, rows.count, width_);
  input_gradient(step, rows, d_up_gate, up_gate_weight_, d_inputs);
  combine_rows(step.device,
               {.rows = d_inputs, .row_of_slot = rows.row_of_slot, .out = d_x, .accumulate = shared_.has_value()});
  const GemmInput input = reads_input_again() ? x() : GemmInput{};
  if (trains_up_gate_) {
    weight_gradient(step, rows, d_up_gate, gather(step, rows, input, input_), up_gate_weight_);
  }
  router_backward(step, rows, trains_router_ ? plain() : TensorView(), d_x);
}

void Moe::router_backward(const StepContext& step, const Rows& rows, const TensorView& x,
                          const TensorView& d_x) const {
  const int64_t T = step.num_tokens(), E = moe_.num_experts;
  const TensorView d_logits = step.tensor(d_logits_, T, E);
  const RouterLosses& losses = step.router_losses;
  const auto tokens = static_cast<double>(T);
  // transformers pools counts and scores of all blocks, Megatron has a loss for each.
  const double pooled = tokens * static_cast<double>(loads_.num_blocks);
  const double per =
      losses.is_pooled ? pooled * pooled : static_cast<double>(moe_.experts_per_token) * tokens * tokens;
  const double balance = losses.balance * static_cast<double>(E) / per;
  route_backward(step.device, {.logits = step.tensor(logits_, T, E),
                               .experts = experts(step),
                               .row_of_slot = rows.row_of_slot,
                               .d_row_weights = step.vector(d_row_weights_, rows.count),
                               .load = balance == 0       ? TensorView()
                                       : losses.is_pooled ? loads_.summed(step)
                                                          : loads_.of_block(step, block_),
                               .rule = moe_.rule(),
                               .balance_factor = static_cast<float>(balance),
                               .z_factor = static_cast<float>(losses.z / tokens),
                               .d_logits = d_logits});
  const TensorView weight = step.weights.plain(router_);
  gemm(step.device, {.a = d_logits, .b = weight, .b_transposed = true, .out = d_x, .accumulate = true});
  if (!trains_router_) return;
  gemm(step.device, {.a = d_logits,
                     .b = x,
                     .a_transposed = true,
                     .b_transposed = true,
                     .out = step.gradient(router_),
                     .accumulate = step.adds_to_gradients()});
}

}  // namespace parka
