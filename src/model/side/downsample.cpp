#include "model/side/downsample.h"

#include "kernels/ops/elementwise/pointwise.h"
#include "kernels/ops/elementwise/side_network.h"
#include "kernels/ops/quantize/quantize.h"

namespace parka {
namespace {

constexpr const char *kName = "downsample", *kIn = "downsample_in", *kOut = "downsample_out";

void add_weight(ParameterList& list, const std::string& name, int64_t rows, int64_t cols) {
  Linear::add_parameter(list, name, rows, cols, list.initial_std(cols, 0), ParameterRole::kPlainLinear);
}

}  // namespace

void Downsample::add_parameters(ParameterList& list, const SideRules& rules, int64_t d, int64_t s,
                                const std::string& prefix) {
  if (is_pool(rules.downsample)) return;
  if (!has_two_factors(rules.downsample)) {
    add_weight(list, prefix + kName, s, d);
    return;
  }
  add_weight(list, prefix + kIn, rules.rank, d);
  add_weight(list, prefix + kOut, s, rules.rank);
}

Downsample::Downsample(const SideRules& rules, int64_t d, int64_t s, const ParameterTable& table,
                       const std::string& prefix, const Format& kept_fp8, BufferScope& scope)
    : rules_(rules), width_(d) {
  const int64_t T = scope.tokens();
  const bool is_read_again = scope.has_backward() && has_parameters();
  PARKA_REQUIRE(d <= s * rules.reduction);
  input_ = is_read_again && !rules.keeps_fp8
               ? scope.kept(prefix + "h", scope.compute(), {T, d})
               : scope.workspace("side.frozen_output", scope.compute(), {T, d}, kBlockForward | kHeadNorm);
  if (!has_parameters()) return;
  const bool has_factors = has_two_factors(rules.downsample);
  in_.emplace(scope.precision(), table, prefix + (has_factors ? kIn : kName));
  if (is_read_again && rules.keeps_fp8) {
    codes_ = scope.kept(prefix + "h", kept_fp8, T, d);
    decoded_ = scope.workspace("side.h_decoded", scope.compute(), {T, d}, kBackward);
  }
  if (!has_factors) return;
  out_.emplace(scope.precision(), table, prefix + kOut);
  const auto add = [&](const char* name, PhaseMask phases) {
    return scope.workspace(name, scope.compute(), {T, rules.rank}, phases);
  };
  inner_ = scope.has_backward() ? scope.kept(prefix + "inner", scope.compute(), {T, rules.rank})
                                : add("side.inner", kBlockForward);
  if (rules.downsample == Downsampling::kAdapter) activated_ = add("side.activated", kBlockForward | kBackward);
  if (scope.has_backward()) d_inner_ = add("side.d_inner", kBackward);
}

TensorView Downsample::activated(const StepContext& step) const {
  const TensorView first = inner(step, inner_);
  if (!activated_.valid()) return first;
  const TensorView y = inner(step, activated_);
  activation_forward(step.device, {.kind = Activation::kSilu, .x = first, .y = y});
  return y;
}

void Downsample::forward(const StepContext& step, const TensorView& out) const {
  const TensorView h = input(step);
  if (!has_parameters()) {
    const PoolKind kind = rules_.downsample == Downsampling::kMaxPool ? PoolKind::kMax : PoolKind::kAverage;
    pool_channels(step.device, {.kind = kind, .group = rules_.reduction, .x = h, .out = out});
    return;
  }
  if (step.keep && codes_.valid()) {
    quantize(step.device, {.x = h, .out = step.matrix(codes_, step.num_tokens(), width_)});
  }
  in_->forward(step, h, out_ ? inner(step, inner_) : out);
  if (out_) out_->forward(step, activated(step), out);
}

TensorView Downsample::input_again(const StepContext& step) const {
  if (!codes_.valid()) return input(step);
  const TensorView h = step.tensor(decoded_, step.num_tokens(), width_);
  quantize(step.device, {.x = step.matrix(codes_, step.num_tokens(), width_), .out = h});
  return h;
}

void Downsample::backward(const StepContext& step, const TensorView& d_out) const {
  PARKA_REQUIRE(has_parameters());
  TensorView d_in = d_out;
  if (out_) {
    out_->weight_gradient(step, {d_out, {}}, {activated(step), {}});
    d_in = inner(step, d_inner_);
    out_->input_gradient(step, {d_out, {}}, d_in);
    if (activated_.valid()) {
      activation_backward(step.device,
                          {.kind = Activation::kSilu, .x = inner(step, inner_), .d_y = d_in, .d_x = d_in});
    }
  }
  in_->weight_gradient(step, {d_in, {}}, {input_again(step), {}});
}

}  // namespace parka
