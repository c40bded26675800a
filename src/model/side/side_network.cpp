#include "model/side/side_network.h"

#include <algorithm>

#include "kernels/ops/elementwise/side_network.h"
#include "kernels/ops/gemm/gemm.h"
#include "kernels/ops/norm/norm.h"
#include "model/layers/embedding.h"
#include "model/layers/head.h"
#include "model/precision_recipe.h"

namespace parka {
namespace {

constexpr int64_t kWidthMultiple = 16, kHeadDim = 64;
const std::string kFinalNorm = std::string(kSide) + "final_norm", kUp = std::string(kSide) + "up",
                  kMix = std::string(kSide) + "mix";

std::string gate_name(int64_t l) { return block_prefix(kSide, l) + "gate"; }

// The prefix of the downsample of h_i.
std::string down_prefix(int64_t i) { return i == 0 ? kSide : block_prefix(kSide, i - 1); }

// The format of a down_i's input: that of saved activations.
Format kept_format(const PrecisionConfig& precision) {
  return {kForwardFormat, Scaling::kGroup, precision.group_size, DType::kBF16};
}

}  // namespace

ModelConfig side_stack(const ModelConfig& model, const SideRules& rules) {
  const auto reduced = [&](int64_t width) {
    return ceil_div(ceil_div(width, rules.reduction), kWidthMultiple) * kWidthMultiple;
  };
  ModelConfig side = model;
  side.vision = {};
  side.moe = {};
  side.d_model = reduced(model.d_model);
  const MoeConfig& moe = model.moe;  // whose experts a side block has as one feed-forward
  side.d_ffn = reduced(moe.exists() ? moe.experts_per_token * model.d_ffn + moe.shared_width : model.d_ffn);
  side.given_head_dim = rules.head_dim > 0 ? rules.head_dim : std::min(kHeadDim, side.d_model);
  side.query_pre_attn_scalar = 0;  // of its own head dim
  side.num_heads = ceil_div(side.d_model, side.given_head_dim);
  const int64_t queries_of_key = model.num_heads / model.kv_heads();
  side.num_kv_heads = std::max<int64_t>(1, side.num_heads / queries_of_key);
  while (side.num_heads % side.num_kv_heads != 0) --side.num_kv_heads;
  return side;
}

void SideNetwork::add_parameters(ParameterList& list, const ModelConfig& model, const SideRules& rules) {
  const ModelConfig side = side_stack(model, rules);
  const int64_t d = model.d_model, s = side.d_model;
  Downsample::add_parameters(list, rules, d, s, down_prefix(0));
  for (int64_t l = 0; l < model.num_layers; ++l) {
    list.begin_unit();
    Stack::add_block_parameters(list, model, kDecoder, l);
    Downsample::add_parameters(list, rules, d, s, down_prefix(l + 1));
    list.add(gate_name(l), 1, 1, ParameterRole::kGate, /*decayed=*/false, 0.0);
    Stack::add_block_parameters(list, side, kSide, l);
  }
  list.begin_unit();
  Head::add_parameters(list, model);
  Norm::add_parameters(list, side.norm, s, kFinalNorm);
  const double std = rules.mix == SideMix::kAdditive ? 0.0 : list.initial_std(s, 0);
  Linear::add_parameter(list, kUp, d, s, std, ParameterRole::kPlainLinear);
  if (rules.mix == SideMix::kPaper) list.add(kMix, 1, 1, ParameterRole::kMix, /*decayed=*/false, 0.0);
}

struct SideNetwork::PlainScope {
  explicit PlainScope(const BufferScope& of)
      : precision(without_fp8(of.precision())), scope(precision, of.shape(), of.purpose(), of.plan()) {}

  PrecisionConfig precision;
  BufferScope scope;
};

SideNetwork::SideNetwork(const ModelConfig& model, const ParameterTable& table, BufferScope& scope)
    : SideNetwork(model, table, kept_format(scope.precision()), PlainScope(scope)) {}

SideNetwork::SideNetwork(const ModelConfig& model, const ParameterTable& table, const Format& kept_fp8,
                         PlainScope&& plain)
    : rules_(table.side),
      config_(side_stack(model, table.side)),
      d_model_(model.d_model),
      first_unit_(table.block_unit(0)),
      downs_(make_downs(table, kept_fp8, plain.scope)),
      stack_(config_, table, kSide, first_unit_, plain.scope),
      norm_(model.norm, config_, table, kFinalNorm),
      up_(plain.precision, table, kUp),
      up_weight_(table.index_of(kUp)),
      mix_(table.index_of(kMix)) {
  BufferScope& scope = plain.scope;
  const int64_t T = scope.tokens(), s = config_.d_model;
  for (int64_t l = 0; l < config_.num_layers; ++l) gates_.push_back(table.index_of(gate_name(l)));
  norm_.declare_in_workspace(scope, "side.final", kWholeHead);
  if (mix_ >= 0) up_output_ = scope.workspace("side.up_output", scope.compute(), {T, d_model_}, kWholeHead);
  if (!scope.has_backward()) return;
  d_hidden_ = scope.workspace("side.d_hidden", scope.compute(), {T, d_model_}, kHead | kBackwardHeadNorm);
  d_down_ = scope.workspace("side.d_down", scope.compute(), {T, s}, kBackward);
}

std::vector<Downsample> SideNetwork::make_downs(const ParameterTable& table, const Format& kept_fp8,
                                                BufferScope& scope) {
  std::vector<Downsample> downs;
  for (int64_t i = 0; i <= config_.num_layers; ++i) {
    downs.emplace_back(rules_, d_model_, config_.d_model, table, down_prefix(i), kept_fp8, scope);
    const std::vector<int64_t> shape = {scope.tokens(), config_.d_model};
    const bool is_kept = i > 0 && scope.has_backward();
    // The output for h_0 is g_0, until h_1 comes.
    down_ids_.push_back(
        is_kept ? scope.kept(down_prefix(i) + "difference", scope.compute(), shape)
                : scope.workspace(i == 0 ? "side.first" : "side.down", scope.compute(), shape, kBlockForward));
  }
  return downs;
}

StepContext SideNetwork::side_step(const StepContext& step) const {
  StepContext own{.device = step.device, .arena = step.arena, .weights = step.weights};
  own.shape = step.shape;
  own.keep = step.keep;
  own.positions = step.side_positions;
  own.windowed_positions = step.side_windowed_positions;
  own.cache = step.side_cache;
  own.newest_rows = step.newest_rows;
  own.num_keys = step.num_keys;
  own.gradients = step.gradients;
  own.accumulation = step.accumulation;
  return own;
}

void SideNetwork::forward(const StepContext& step, int64_t i, TensorView& residual, TensorView& branch) const {
  const StepContext own = side_step(step);
  const Downsample& downsample = downs_[static_cast<size_t>(i)];
  const TensorView h = downsample.input(own), u = narrow(own, down(i));
  norm_forward(
      step.device,
      {.kind = NormKind::kNone, .eps = 0, .residual = residual, .branch = branch, .residual_out = h, .y = h});
  residual = h;
  branch = {};
  downsample.forward(own, u);
  if (i == 0) return;
  const int64_t l = i - 1;
  mix_forward(step.device, {.kind = MixWeight::kLogistic,
                            .c = scalar(own, gates_[static_cast<size_t>(l)]),
                            .x = u,
                            .residual = l == 0 ? narrow(own, down(0)) : stack_.residual(own, l - 1),
                            .branch = l == 0 ? TensorView() : stack_.branch(own),
                            .out = stack_.input(own, l),
                            .difference = step.keep ? u : TensorView()});
  stack_.forward_block(own, l);
}

void SideNetwork::forward_output(const StepContext& step, const TensorView& hidden) const {
  const StepContext own = side_step(step);
  norm_.forward(own, stack_.residual(own), stack_.branch(own));
  if (mix_ < 0) {
    gemm(step.device,
         {.a = norm_.output(own), .b = step.weights.plain(up_weight_), .out = hidden, .accumulate = true});
    return;
  }
  const TensorView u = wide(own, up_output_);
  up_.forward(own, norm_.output(own), u);
  mix_forward(step.device, {.kind = MixWeight::kScalar,
                            .c = scalar(own, mix_),
                            .x = u,
                            .residual = hidden,
                            .out = hidden,
                            .difference = step.keep ? u : TensorView()});
}

void SideNetwork::backward_output(const StepContext& step) const {
  const StepContext own = side_step(step);
  const TensorView d_up = d_hidden(own), d_norm_output = stack_.stream().d_norm_output(own);
  if (mix_ >= 0) {
    mix_backward(step.device, {.kind = MixWeight::kScalar,
                               .c = scalar(own, mix_),
                               .difference = wide(own, up_output_),
                               .d_out = d_up,
                               .d_x = d_up,
                               .d_c = own.gradient_to_add_to(mix_)});
  }
  up_.weight_gradient(own, {d_up, {}}, {norm_.output(own), {}});
  up_.input_gradient(own, {d_up, {}}, d_norm_output);
  norm_.backward(own, d_norm_output, /*d_residual=*/{}, stack_.stream().d_residual(own), {});
}

void SideNetwork::backward(const StepContext& step) const {
  const StepContext own = side_step(step);
  const TensorView d_residual = stack_.stream().d_residual(own), d_down = narrow(own, d_down_);
  for (int64_t l = config_.num_layers; l-- > 0;) {
    const int unit = first_unit_ + static_cast<int>(l), gate = gates_[static_cast<size_t>(l)];
    const Downsample& downsample = downs_[static_cast<size_t>(l + 1)];
    step.before_backward(unit);
    stack_.backward_block(own, l, /*quantize=*/false);
    mix_backward(step.device, {.kind = MixWeight::kLogistic,
                               .c = scalar(own, gate),
                               .difference = narrow(own, down(l + 1)),
                               .d_out = d_residual,
                               .d_x = downsample.has_parameters() ? d_down : TensorView(),
                               .d_y = d_residual,
                               .d_c = own.gradient_to_add_to(gate)});
    if (downsample.has_parameters()) downsample.backward(own, d_down);
    step.after_backward(unit);
  }
}

void SideNetwork::backward_input(const StepContext& step) const {
  const StepContext own = side_step(step);
  if (downs_.front().has_parameters()) downs_.front().backward(own, stack_.stream().d_residual(own));
}

}  // namespace parka
