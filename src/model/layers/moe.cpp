#include "model/layers/moe.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include <fmt/format.h>

#include "kernels/ops/elementwise/pointwise.h"
#include "kernels/ops/moe/grouped_gemm.h"
#include "kernels/ops/moe/routing.h"
#include "kernels/ops/quantize/quantize.h"
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
std::vector<ExpertUse> RouterLoads::of_blocks(std::span<const float> loads, const MoeConfig& moe,
                                              int64_t places) const {
  std::vector<ExpertUse> blocks(exists() ? static_cast<size_t>(moe.dense_layers) : 0);
  const auto E = static_cast<double>(num_experts);
  for (int64_t block = 0; block < num_blocks; ++block) {
    const auto of_block = loads.subspan(static_cast<size_t>(block * columns()), static_cast<size_t>(columns()));
    ExpertUse& use = blocks.emplace_back();
    double slots = 0, most = 0, idle = 0, of_rank = 0, most_of_rank = 0;
    for (int64_t e = 0; e < num_experts; ++e) {
      of_rank = of_block[e] + (e % (num_experts / places) == 0 ? 0 : of_rank);
      most_of_rank = std::max(most_of_rank, of_rank);
      slots += of_block[e];
      most = std::max(most, double{of_block[e]});
      if (of_block[e] == 0) ++idle;
    }
    const double tokens = slots / static_cast<double>(moe.experts_per_token);
    use = {E * most / slots,
           idle / E,
           num_experts == 1 ? 1.0 : 0.0,
           0.0,
           of_block[2 * num_experts] / tokens,
           static_cast<double>(places) * most_of_rank / slots};
    for (int64_t e = 0; e < num_experts; ++e) {
      const double share = of_block[e] / slots;
      use.loads.push_back(E * share);
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
  list.add_matrices(prefix, prefix + "experts.up_gate", d, {{"experts.up_proj", f}, {"experts.gate_proj", f}},
                    model.moe);
  list.add(prefix + "experts.down", E * d, f, ParameterRole::kExperts, /*decayed=*/true,
           list.initial_std(f, depth));
  list.add_matrices(prefix, prefix + "experts.down", f, {{"experts.down_proj", d}}, model.moe);
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
      place_(0),
      places_(1),
      num_here_(0),
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
      up_gate_adapters_(table, prefix + "experts.up_gate"),
      down_adapters_(table, prefix + "experts.down"),
      reads_product_again_(trains_down_ || !down_adapters_.empty()),
      loads_(model) {
  const ParameterInfo& stacked = table.all[static_cast<size_t>(up_gate_weight_)];
  place_ = stacked.placement.expert_place;
  places_ = stacked.placement.expert_places;
  num_here_ = stacked.num_stacked;
  if (moe_.shared_width > 0) {
    shared_.emplace(model.with_one_ffn(moe_.shared_width), precision, table, block, prefix + "shared.", "shared.");
  }
}

bool Moe::reads_input_again() const {
  return trains_router_ || trains_up_gate_ || !up_gate_adapters_.empty() ||
         (shared_ && shared_->reads_input_again());
}

void Moe::declare(BufferScope& scope) {
  const int64_t T = scope.tokens(), R = num_rows(T), d = width_, f = d_ffn_;
  const int64_t E = moe_.num_experts, E_here = num_here_, k = moe_.experts_per_token, P = places_;
  const Formats& formats = scope.formats();
  const PhaseMask forward = scope.forward(kForwardFfn);
  const bool goes_back = scope.has_backward();
  // Backward goes through all of its phases for one rank's tokens after another's.
  const auto in = [&](PhaseMask backward) { return is_divided() ? kBackwardPhases : backward; };
  const auto with = [&](PhaseMask backward) { return forward | (goes_back ? in(backward) : PhaseMask{0}); };
  if (shared_) shared_->declare(scope);
  loads_.declare(scope);
  logits_ = scope.kept("router_logits", DType::kF32, {T, E});
  experts_ = scope.kept("router_experts", DType::kI32, {P * T, k});
  weights_ = scope.kept("router_weights", DType::kF32, {P * T, k});
  const PhaseMask sorted = with(kBackwardPhases);
  if (is_divided()) {
    shared_input_ = declare_shared(scope, "shared_input", formats.activation, sorted);
    partial_ = scope.workspace("expert_partial_sums", scope.compute(), {P * T, d}, sorted);
  }
  offsets_ = scope.workspace("expert_offsets", DType::kI32, {E_here + 1}, sorted);
  counts_ = scope.workspace("expert_counts", DType::kI32, {E_here}, sorted);
  row_of_slot_ = scope.workspace("expert_row_of_slot", DType::kI32, {T, k}, sorted);
  slot_of_row_ = scope.workspace("expert_slot_of_row", DType::kI32, {R}, sorted);
  row_weights_ = scope.workspace("expert_row_weights", DType::kF32, {R}, sorted);
  rows_ = scope.workspace("expert_rows", scope.compute(), {R, d}, with(kBackwardUpGate));
  const bool reads_rows_again = !formats.fp8_gemm && (trains_up_gate_ || !up_gate_adapters_.empty());
  input_.row = scope.workspace("expert_input", formats.activation.dtype, {R, d},
                               reads_rows_again ? with(kBackwardUpGate) : forward);
  if (formats.up_gate.scaling != Scaling::kNone) {
    up_gate_plain_ = scope.workspace("expert_up_gate", scope.compute(), {R, 2 * f}, forward);
  }
  for (int64_t source = 0; source < P; ++source) {
    const std::string suffix = source == 0 || !goes_back ? "" : fmt::format(".{}", source);
    OfSource& own = sources_.emplace_back();
    own.up_gate = scope.kept("expert_up_gate_kept" + suffix, formats.up_gate, R, 2 * f);
    if (scope.precision().save_silu) {
      own.silu = scope.kept("expert_silu" + suffix, formats.silu, R, f);
      scope.sample(2 * f, f);
    }
    own.product = scope.gemm_input("expert_product", f, saves_product_, forward, in(kBackwardSwiglu),
                                   reads_product_again_, is_fp8_, is_fp8_, R, suffix);
  }
  up_gate_adapters_.declare(scope, "expert_up_gate", R, forward, kBackwardUpGate);
  down_adapters_.declare(scope, "expert_down", R, forward, kBackwardDown | kBackwardSwiglu);
  if (!goes_back) return;
  if (is_divided()) {
    shared_gradient_ = declare_shared(scope, "shared_gradient", formats.gradient, kBackwardPhases);
    if (formats.fp8_gemm && trains_down_) {
      gradient_t_ = scope.workspace("shared_gradient_t", formats.gradient.dtype, {d, T}, kBackwardPhases);
    }
    d_weights_ = scope.workspace("d_slot_weights", DType::kF32, {P * T, k}, kBackwardPhases);
    own_d_weights_ = scope.workspace("own_d_slot_weights", DType::kF32, {T, k}, kBackwardPhases);
  }
  const PhaseMask d_rows_read = trains_down_ ? kBackwardDown | kBackwardSwiglu : PhaseMask{kBackwardDown};
  d_rows_.row = scope.workspace("d_expert_rows", formats.gradient.dtype, {R, d},
                                in(formats.fp8_gemm ? PhaseMask{kBackwardDown} : d_rows_read));
  d_product_ = scope.workspace("d_expert_product", scope.compute(), {R, f}, in(kBackwardDown | kBackwardSwiglu));
  const PhaseMask of_gradient = in(kBackwardSwiglu | kBackwardUpGate);
  d_row_weights_ = scope.workspace("d_expert_row_weights", DType::kF32, {R}, of_gradient);
  samples_amax_ = formats.samples_gradient_amax;
  d_up_gate_.row = scope.workspace("d_expert_up_gate", formats.gradient, R, 2 * f, of_gradient);
  if (formats.gradient.scaling != Scaling::kNone) scope.sample(2 * f);
  d_logits_ = scope.workspace("d_router_logits", scope.compute(), {T, E}, kBackwardUpGate);
  if (!formats.fp8_gemm) return;
  if (trains_down_)
    d_rows_.transposed = scope.workspace("d_expert_rows_t", formats.gradient.dtype, {d, R}, in(d_rows_read));
  if (!trains_up_gate_) return;
  input_.transposed = scope.workspace("expert_input_t", formats.activation.dtype, {d, R}, in(kBackwardUpGate));
  d_up_gate_.transposed =
      scope.workspace("d_expert_up_gate_t", formats.gradient, 2 * f, R, of_gradient, d_up_gate_.row.scale);
}

TensorView Moe::of_source(const StepContext& step, TensorId id, int64_t source, int64_t cols) const {
  const int64_t T = step.num_tokens();
  return step.tensor(id, places_ * T, cols).rows(source * T, T);
}

Moe::Shared Moe::declare_shared(BufferScope& scope, const std::string& name, const Format& format,
                                PhaseMask phases) const {
  Shared all;
  all.data = scope.workspace(name, format.dtype, {places_ * scope.tokens(), width_}, phases);
  if (format.scaling == Scaling::kTensor) {
    all.scale = scope.workspace(name + ".scale", DType::kF32, {places_}, phases);
  }
  return all;
}

void Moe::share(const StepContext& step, const ScaledView& x, const Shared& all) const {
  step.experts->all_gather(step.device, x.data, step.vector(all.data, places_ * x.data.numel()));
  if (all.scale.valid()) step.experts->all_gather(step.device, x.scale, step.vector(all.scale, places_));
}

ScaledView Moe::shared(const StepContext& step, const ScaledView& x, const Shared& all, int64_t source) const {
  const int64_t numel = x.data.numel();
  const TensorView data = step.vector(all.data, places_ * numel).rows(source * numel, numel);
  return {data.reshaped({x.data.dim[0], x.data.dim[1]}),
          all.scale.valid() ? step.vector(all.scale, places_).rows(source, 1) : TensorView(), x.scaling};
}

void Moe::add_up(const StepContext& step, TensorId partial, const TensorView& out, bool accumulate) const {
  step.experts->reduce_scatter(step.device, step.vector(partial, places_ * out.numel()), out,
                               accumulate ? Accumulation::kContinue : Accumulation::kBegin);
}

Moe::Rows Moe::sort(const StepContext& step, int64_t source) const {
  const int64_t T = step.num_tokens(), k = moe_.experts_per_token, E = num_here_, R = num_rows(T);
  const Rows rows = {.source = source,
                     .count = R,
                     .offsets = step.vector(offsets_, E + 1),
                     .counts = step.vector(counts_, E),
                     .row_of_slot = step.tensor(row_of_slot_, T, k),
                     .slot_of_row = step.vector(slot_of_row_, R),
                     .weights = step.vector(row_weights_, R)};
  sort_by_expert(step.device, {.experts = experts(step, source),
                               .weights = weights(step, source),
                               .offsets = rows.offsets,
                               .counts = rows.counts,
                               .row_of_slot = rows.row_of_slot,
                               .slot_of_row = rows.slot_of_row,
                               .row_weights = rows.weights,
                               .first_expert = is_divided() ? place_ * E : SortByExpert::kAllExperts});
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
  const TensorView logits = step.tensor(logits_, step.num_tokens(), moe_.num_experts);
  const TensorView chosen = experts(step, place_), weights = this->weights(step, place_);
  if (is_divided()) share(step, x, shared_input_);  // beside the router
  gemm(step.device, {.a = plain, .b = step.weights.plain(router_), .out = logits});
  route(step.device, {.logits = logits,
                      .bias = step.weights.plain(router_bias_),
                      .rule = moe_.rule(),
                      .experts = chosen,
                      .weights = weights});
  router_load(step.device,
              {.logits = logits, .experts = chosen, .score = moe_.score, .load = loads_.of_block(step, block_)});
  if (is_divided()) {
    for (const auto& [own, all] : {std::pair(chosen, experts_), std::pair(weights, weights_)}) {
      step.experts->all_gather(step.device, own, step.vector(all, places_ * own.numel()));
    }
  }
  for (int64_t n = 0; n < places_; ++n) {
    const int64_t source = (place_ + n) % places_;
    if (n == 1) step.experts->wait(step.device);
    const bool wants_out = !out.empty();
    const Rows rows = forward_rows(step, source, n == 0 ? x : shared(step, x, shared_input_, source), wants_out);
    if (n == 0 && shared_) shared_->forward(step, x, out);
    if (!wants_out) continue;
    combine_rows(step.device, {.rows = step.tensor(rows_, rows.count, width_),
                               .row_of_slot = rows.row_of_slot,
                               .out = is_divided() ? of_source(step, partial_, source, width_) : out,
                               .accumulate = !is_divided() && shared_});
  }
  if (!is_divided() || out.empty()) return;
  add_up(step, partial_, out, shared_.has_value());
  step.experts->wait(step.device);
}

Moe::Rows Moe::forward_rows(const StepContext& step, int64_t source, const ScaledView& x, bool wants_out) const {
  const int64_t f = d_ffn_;
  const Rows rows = sort(step, source);
  const OfSource& own = sources_[static_cast<size_t>(source)];
  const GemmInput input = gather(step, rows, {x, {}}, input_);
  const ScaledView up_gate = step.matrix(own.up_gate, rows.count, 2 * f),
                   product = step.matrix(own.product.row, rows.count, f);
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
      .silu = step.matrix(own.silu, rows.count, f),
      .product = product,
      .product_t = step.keep && saves_product_ ? step.matrix(own.product.transposed, f, rows.count) : ScaledView{},
      .up_gate_plain = up_gate_plain,
      .activation = activation_,
      .row_factor = rows.weights};
  up_gate_adapters_.forward(step, rows.experts(), input.row.data, projected);
  swiglu_forward(step.device, swiglu);
  if (source == place_) step.samples.add(step.device, block_ + moe_.dense_layers, swiglu, projected);
  const TensorView out = wants_out ? step.tensor(rows_, rows.count, width_) : TensorView();
  if (wants_out) {
    grouped_gemm(step.device, {.a = product,
                               .b = weight(step, down_weight_),
                               .offsets = rows.offsets,
                               .counts = rows.counts,
                               .out = out,
                               .fast_accumulation = true});
  }
  down_adapters_.forward(step, rows.experts(), product.data, out);
  return rows;
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
                          int weight, bool adds) const {
  grouped_weight_gradient(step.device, {.d_y = is_fp8_ ? d_y.transposed : d_y.row,
                                        .x = is_fp8_ ? x.transposed : x.row,
                                        .offsets = rows.offsets,
                                        .counts = rows.counts,
                                        .out = step.gradient(weight),
                                        .accumulate = adds});
}

void Moe::backward(const StepContext& step, const GemmInput& d_out, const InputAgain& x, const PlainAgain& plain,
                   const TensorView& d_x) const {
  // It goes through all phases before the experts do: what they share is alive in all (Stack).
  if (shared_) shared_->backward(step, d_out, x, d_x);
  if (!is_divided()) {
    const Rows rows = sort(step, place_);
    backward_rows(step, rows, d_out, x, d_x, step.adds_to_gradients());
    router_backward(step, rows.row_of_slot, step.vector(d_row_weights_, rows.count),
                    trains_router_ ? plain() : TensorView(), d_x);
    return;
  }
  share(step, d_out.row, shared_gradient_);
  step.experts->wait(step.device);  // x may be made again where d_out is
  const GemmInput input = reads_input_again() ? x() : GemmInput{};
  const ScaledView& own = is_fp8_ ? input.transposed : input.row;
  if (trains_up_gate_) share(step, own, shared_input_);
  for (int64_t n = 0; n < places_; ++n) {
    const int64_t source = (place_ + n) % places_, k = moe_.experts_per_token;
    const InputAgain of_source = [&] {
      if (n == 0 || !trains_up_gate_) return input;
      const ScaledView of_other = shared(step, own, shared_input_, source);
      return is_fp8_ ? GemmInput{{}, of_other} : GemmInput{of_other, {}};
    };
    if (n == 1) step.experts->wait(step.device);
    const Rows rows = sort(step, source);
    backward_rows(step, rows, output_gradient(step, d_out, source), of_source,
                  this->of_source(step, partial_, source, width_), step.adds_to_gradients() || n > 0);
    const TensorView d_weights = this->of_source(step, d_weights_, source, k);
    const int64_t slots = d_weights.numel();
    gather_tokens(step.device, {.slot_of_row = rows.row_of_slot.reshaped({slots}),
                                .x = step.tensor(d_row_weights_, rows.count, 1),
                                .out = d_weights.reshaped({slots, 1})});
  }
  const TensorView d_weights = step.vector(own_d_weights_, step.num_tokens() * moe_.experts_per_token);
  add_up(step, partial_, d_x, shared_.has_value());
  add_up(step, d_weights_, d_weights, /*accumulate=*/false);  // each of one rank
  step.experts->wait(step.device);
  router_backward(step, {}, d_weights, trains_router_ ? plain() : TensorView(), d_x);
}

GemmInput Moe::output_gradient(const StepContext& step, const GemmInput& d_out, int64_t source) const {
  GemmInput of_source = {shared(step, d_out.row, shared_gradient_, source), {}};
  if (!gradient_t_.valid()) return of_source;
  const ScaledView& row = of_source.row;
  of_source.transposed = {step.tensor(gradient_t_, width_, step.num_tokens()), row.scale, row.scaling};
  quantize(step.device, {.x = row, .out_t = of_source.transposed, .scale_given = true});
  return of_source;
}

void Moe::backward_rows(const StepContext& step, const Rows& rows, const GemmInput& d_out, const InputAgain& x,
                        const TensorView& d_x, bool adds) const {
  const int64_t f = d_ffn_;
  const OfSource& own = sources_[static_cast<size_t>(rows.source)];
  const GemmInput d_rows = gather(step, rows, d_out, d_rows_);
  const TensorView d_product = step.tensor(d_product_, rows.count, f);
  input_gradient(step, rows, d_rows, down_weight_, d_product);
  down_adapters_.input_gradient(step, rows.experts(), d_rows.row.data, d_product);

  const ScaledView up_gate = step.matrix(own.up_gate, rows.count, 2 * f),
                   silu = step.matrix(own.silu, rows.count, f);
  const bool makes_product = reads_product_again_ && !saves_product_;
  const GemmInput product = {is_fp8_ ? ScaledView{} : step.matrix(own.product.row, rows.count, f),
                             step.matrix(own.product.transposed, f, rows.count)};
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
  if (rows.source == place_) {
    step.samples.add(step.device, block_ + moe_.dense_layers, swiglu, /*is_more=*/shared_.has_value());
  }
  if (trains_down_) weight_gradient(step, rows, d_rows, product, down_weight_, adds);
  down_adapters_.weight_gradient(step, rows.experts(), product.row.data);

  const TensorView d_inputs = step.tensor(rows_, rows.count, width_);
  input_gradient(step, rows, d_up_gate, up_gate_weight_, d_inputs);
  up_gate_adapters_.input_gradient(step, rows.experts(), d_up_gate.row.data, d_inputs);
  combine_rows(
      step.device,
      {.rows = d_inputs, .row_of_slot = rows.row_of_slot, .out = d_x, .accumulate = !is_divided() && shared_});
  const GemmInput input = reads_input_again() ? x() : GemmInput{};
  if (!trains_up_gate_ && up_gate_adapters_.empty()) return;
  const GemmInput gathered = gather(step, rows, input, input_);
  if (trains_up_gate_) weight_gradient(step, rows, d_up_gate, gathered, up_gate_weight_, adds);
  up_gate_adapters_.weight_gradient(step, rows.experts(), gathered.row.data);
}

void Moe::router_backward(const StepContext& step, const TensorView& row_of_slot, const TensorView& d_row_weights,
                          const TensorView& x, const TensorView& d_x) const {
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
                               .experts = experts(step, place_),
                               .row_of_slot = row_of_slot,
                               .d_row_weights = d_row_weights,
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
