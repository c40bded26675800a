#include "optim/optimizer.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <string>
#include <type_traits>
#include <utility>

#include <fmt/format.h>

#include "core/parallel.h"
#include "core/split_float.h"
#include "kernels/ops/optimizer/grad_norm.h"

namespace parka {
namespace {

TensorView flat(const TensorView& view) { return view.reshaped({view.numel()}); }

template <typename T>
void upload(Device& device, std::span<const T> values, const TensorView& target, int64_t first) {
  const auto count = static_cast<int64_t>(values.size());
  PARKA_REQUIRE(first >= 0 && first + count <= target.numel());
  device.copy_to_device(target.as<T>() + first, values.data(), static_cast<int64_t>(values.size_bytes()));
}

// Applies `convert` to each value.
template <typename Convert>
void upload_each(Device& device, std::span<const float> values, const TensorView& target, int64_t first,
                 const Convert& convert) {
  using T = std::invoke_result_t<Convert, float>;
  std::vector<T> converted(values.size());
  parallel_for(static_cast<int64_t>(values.size()), 1 << 16, [&](int64_t begin, int64_t end) {
    std::transform(values.begin() + begin, values.begin() + end, converted.begin() + begin, convert);
  });
  upload(device, std::span<const T>(converted), target, first);
}

void check_config(const OptimizerConfig& config, DType compute, const std::vector<ParameterInfo>& parameters) {
  const auto is_muons = [&](const ParameterInfo& p) {
    return p.trainable && rule_of(config, p) == UpdateRule::kMuon;
  };
  if (config.kind == OptimizerKind::kMuon && std::ranges::none_of(parameters, is_muons)) {
    throw_bad_input(
        "optimizer.kind = muon updates matrices of blocks, and none of them is trained; set it to adamw, which adapters, "
        "side networks and embeddings have");
  }
  if ((config.master == MasterForm::kNone) != (compute == DType::kF32)) {
    throw_bad_input("optimizer.master = {} does not fit {} weights: none is for fp32, the other forms are for bf16",
                    name_of(config.master), name_of(compute));
  }
  PARKA_REQUIRE(compute == DType::kF32 || compute == DType::kBF16);
  PARKA_REQUIRE(config.gradient == DType::kF32 || config.gradient == DType::kBF16);
}

}  // namespace

Optimizer::Optimizer(const OptimizerConfig& config, DType compute, std::vector<ParameterInfo> parameters,
                     MemoryPlan& plan, bool is_alone, int64_t part_elements, PhaseMask update_phases,
                     int64_t num_sums)
    : config_(config),
      compute_(compute),
      is_alone_(is_alone),
      parameters_(std::move(parameters)),
      part_elements_(part_elements),
      num_sums_(num_sums),
      matrices_(config_, parameters_, plan, update_phases),
      groups_(matrices_.groups()) {
  check_config(config_, compute_, parameters_);
  for (const ParameterInfo& p : parameters_) {
    shares_states_ |= p.placement.states.size > 1 || p.placement.is_by_expert();
    shards_gradients_ |= p.placement.gradient.size > 1;
    is_first_of_experts_ &= p.placement.expert_place == 0;
  }
  kinds_.resize(parameters_.size());
  ids_.resize(parameters_.size());
  if (!releases_gradients()) declare_gradients(plan);
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const ParameterInfo& p = parameters_[i];
    if (!p.trainable) continue;
    ids_[i].master = declare_master(p, plan);
    const UpdateRule rule = rule_of(config_, p);
    kinds_[i] = state_kinds(config_, rule);
    for (size_t kind = 0; kind < kinds_[i].size(); ++kind) {
      ids_[i].states[kind] = declare_state(p, kinds_[i][kind], plan);
    }
    if (rule == UpdateRule::kAdamw && p.own_elements().size() > 0)
      groups_.push_back({.unit = p.unit, .parameters = {i}});
  }
  if (releases_gradients()) std::ranges::stable_sort(groups_, std::greater(), &UpdateGroup::unit);
  if (shares_gradient_buffers()) declare_gradient_buffers(plan);
  declare_stream_buffers(plan);
  const int64_t more = (releases_gradients() ? 2 : 1) * (2 + num_sums_);  // two numbers, and sums
  scalars_id_ = plan.add("step scalars", "step_scalars", DType::kF32, {std::ssize(parameters_) + more});
}

void Optimizer::declare_gradients(MemoryPlan& plan) {
  for (const size_t i : memory_order(parameters_)) {
    const ParameterInfo& p = parameters_[i];
    if (!p.trainable) continue;
    const Shard &gradient = p.placement.gradient, &states = p.placement.states;
    const int64_t kept = shards_gradients_ ? gradient.piece(p.numel()) : states.padded(p.numel());
    ids_[i].gradient = plan.add(kGradientCategory, p.name + ".gradient", config_.gradient, {kept});
  }
}

size_t Optimizer::gradient_buffer(size_t i) const {
  if (parameters_[i].role == ParameterRole::kTiedEmbedding) return kGradientBuffers - 1;
  return static_cast<size_t>(parameters_[i].unit) % (releases_gradients() && is_alone_ ? 1 : 2);
}

// One unit's gradients after another in a buffer, each aligned as one that has a buffer of its own: kernels choose
// by it.
void Optimizer::declare_gradient_buffers(MemoryPlan& plan) {
  const int64_t aligned = MemoryPlan::kAlignment / size_of(config_.gradient);
  int64_t sizes[kGradientBuffers] = {}, ends[kGradientBuffers] = {};
  buffer_offsets_.resize(parameters_.size());
  int unit = 0;
  for (const size_t i : memory_order(parameters_)) {
    if (std::exchange(unit, parameters_[i].unit) != parameters_[i].unit)
      std::fill(std::begin(ends), std::end(ends), 0);
    const size_t buffer = gradient_buffer(i);
    buffer_offsets_[i] = ends[buffer];
    if (!parameters_[i].trainable) continue;
    sizes[buffer] =
        std::max(sizes[buffer], ends[buffer] + parameters_[i].placement.states.padded(parameters_[i].numel()));
    ends[buffer] += ceil_div(parameters_[i].placement.states.padded(parameters_[i].numel()), aligned) * aligned;
  }
  for (size_t buffer = 0; buffer < kGradientBuffers; ++buffer) {
    if (sizes[buffer] == 0) continue;
    buffer_ids_[buffer] = plan.add(releases_gradients() ? kGradientCategory : "gradient buckets",
                                   "gradient_bucket." + std::to_string(buffer), config_.gradient, {sizes[buffer]});
  }
}

// Vectors stay on the device: they are small, and each would wait for copies of its own.
MemoryPlace Optimizer::state_place(const ParameterInfo& parameter) const {
  const bool is_vector = parameter.role == ParameterRole::kNorm || parameter.role == ParameterRole::kBias;
  return config_.offload && !is_vector ? MemoryPlace::kHost : MemoryPlace::kDevice;
}

// The buffers are as large as the largest part of a parameter.
void Optimizer::declare_stream_buffers(MemoryPlan& plan) {
  int64_t most = 0;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const int64_t count = std::min(part_elements_, parameters_[i].placement.states.piece(parameters_[i].numel()));
    std::vector<int64_t> tensors;
    const auto add = [&](TensorId id, int64_t group) {
      if (!id.valid() || plan[id].place != MemoryPlace::kHost) return;
      tensors.push_back(ceil_div(count, group) * size_of(plan[id].dtype));
    };
    if (!parameters_[i].trainable) continue;
    if (parameters_[i].placement.memory == MemoryPlace::kHost) tensors.push_back(count * size_of(compute_));
    add(ids_[i].master, 1);
    for (const MomentIds& moment : ids_[i].states) {
      add(moment.values, 1);
      add(moment.amax, kMomentGroup);
      add(moment.exponent, kMomentGroup);
    }
    most = std::max(most, StateStream::slot_bytes(tensors));
  }
  if (most == 0) return;
  for (size_t slot = 0; slot < num_stream_buffers(); ++slot) {
    slot_ids_.push_back(plan.add(kStreamCategory, "state_buffer." + std::to_string(slot), DType::kU8, {most}));
  }
}

// Updates in backward come a block at a time: what its parameters take comes in beside the block's backward pass,
// so that their updates wait for nothing.
size_t Optimizer::num_stream_buffers() const {
  if (!releases_gradients()) return StateStream::kLeastSlots;
  std::map<int, int64_t> parts;  // of each unit
  for (const ParameterInfo& p : parameters_) {
    if (p.trainable && state_place(p) == MemoryPlace::kHost) {
      const int64_t passes = rule_of(config_, p) == UpdateRule::kMuon ? 2 : 1;
      parts[p.unit] += passes * ceil_div(p.placement.states.piece(p.numel()), part_elements_);
    }
  }
  const int last = parameters_.back().unit;
  int64_t most = 0;
  for (const auto& [unit, count] : parts) {
    if (unit > 0 && unit < last) most = std::max(most, count);
  }
  return static_cast<size_t>(most) + StateStream::kLeastSlots;
}

Optimizer::MomentIds Optimizer::declare_state(const ParameterInfo& parameter, const StateKind& kind,
                                              MemoryPlan& plan) const {
  const auto add = [&](std::string_view suffix, DType dtype, int64_t count) {
    return plan.add(kStateCategory, fmt::format("{}.{}{}", parameter.name, kind.name, suffix), dtype, {count},
                    kAllPhases, state_place(parameter));
  };
  const int64_t numel = parameter.placement.states.piece(parameter.numel()), groups = ceil_div(numel, kMomentGroup);
  MomentIds ids;
  ids.values = add("", kind.format, numel);
  if (!is_float8(kind.format)) return ids;
  ids.amax = add(".amax", DType::kF32, groups);
  if (config_.states == StateFormat::kFp8Expanded) ids.exponent = add(".exponent", DType::kU8, groups);
  return ids;
}

TensorId Optimizer::declare_master(const ParameterInfo& parameter, MemoryPlan& plan) const {
  const auto add = [&](DType dtype) {
    return plan.add(kMasterCategory, parameter.name + ".master", dtype,
                    {parameter.placement.states.piece(parameter.numel())}, kAllPhases, state_place(parameter));
  };
  switch (config_.master) {
    case MasterForm::kFp32: return add(DType::kU16);
    case MasterForm::kFp24Split: return add(DType::kU8);
    case MasterForm::kBf16Sr:
    case MasterForm::kNone: return {};
  }
  throw_internal("unknown master form {}", static_cast<int>(config_.master));
}

void Optimizer::bind(const Arena& arena, std::vector<TensorView> weights, const TensorView& weight_amax) {
  PARKA_REQUIRE(weights.size() == parameters_.size());
  weight_amax_ = weight_amax;
  gradients_.clear();
  gradient_pieces_.clear();
  states_.clear();
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const ParameterInfo& p = parameters_[i];
    const int64_t count = p.own_elements().size();
    PARKA_REQUIRE(p.is_coded() ? weights[i].empty()
                               : (weights[i].dtype == compute_ || !p.trainable) && weights[i].numel() == count);
    states_.push_back({.weight = flat(weights[i]), .master = {}});
    if (!p.trainable) {
      gradients_.emplace_back();
      gradient_pieces_.emplace_back();
      continue;
    }

    const Shard& states = p.placement.states;
    const int64_t piece = states.piece(p.numel()), padded = states.padded(p.numel());
    const TensorView kept = arena[ids_[i].gradient];
    const TensorView whole =
        shares_gradient_buffers() ? arena[buffer_ids_[gradient_buffer(i)]].rows(buffer_offsets_[i], padded) : kept;
    const bool is_apart = shards_gradients_ && !releases_gradients();
    const TensorView own = is_apart ? kept : whole.rows(states.rank * piece, piece);
    gradients_.push_back(whole.rows(0, p.numel()).reshaped({p.rows, p.cols}));
    gradient_pieces_.push_back({whole, own});

    const auto first = [&](TensorId id, int64_t n) { return id.valid() ? arena[id].rows(0, n) : TensorView(); };
    states_[i].master = first(ids_[i].master, count);
    for (size_t kind = 0; kind < kMostStates; ++kind) {
      const MomentIds& ids = ids_[i].states[kind];
      const int64_t groups = ceil_div(count, kMomentGroup);
      states_[i].states[kind] = {first(ids.values, count), first(ids.amax, groups), first(ids.exponent, groups)};
    }
  }
  matrices_.bind(arena);
  stream_ = slot_ids_.empty() ? nullptr : make_stream(arena);
  scalars_ = arena[scalars_id_];
  int64_t end = 0;
  const auto next = [&](int64_t count) { return scalars_.rows(std::exchange(end, end + count), count); };
  squares_ = next(std::ssize(parameters_));
  total_squares_ = next(1);
  clip_coefficient_ = next(1);
  sums_ = next(num_sums_);
  if (!releases_gradients()) return;
  last_squares_ = next(1);
  unit_squares_ = next(1);
  own_sums_ = next(num_sums_);
}

std::unique_ptr<StateStream> Optimizer::make_stream(const Arena& arena) const {
  std::vector<TensorView> slots;
  for (const TensorId id : slot_ids_) slots.push_back(arena[id]);
  std::vector<ParameterState> states(2 * parameters_.size());
  for (const UpdateGroup& group : groups_) {
    for (const size_t i : group.parameters) {
      states[i] = states_[i];
      if (group.owned.empty()) continue;
      states[parameters_.size() + i].states = std::exchange(states[i].states, {});
    }
  }
  return std::make_unique<StateStream>(arena, std::move(slots), std::move(states), part_elements_);
}

std::vector<size_t> Optimizer::stream_order() const {
  std::vector<size_t> order;
  for (const UpdateGroup& group : groups_) {
    if (!group.owned.empty()) {
      for (const size_t i : group.parameters) order.push_back(parameters_.size() + i);
    }
    order.insert(order.end(), group.parameters.begin(), group.parameters.end());
  }
  return order;
}

void Optimizer::set_weight(Device& device, size_t i, std::span<const float> values, int64_t first) {
  const TensorView &target = states_.at(i).weight, &master = states_[i].master;
  if (target.dtype == DType::kF32) {  // its own master
    upload(device, values, target, first);
    return;
  }
  switch (config_.master) {
    case MasterForm::kFp32:
      upload_each(device, values, target, first, [](float x) { return split_float(x).weight; });
      if (master.empty()) return;
      upload_each(device, values, master, first, [](float x) { return split_float(x).remainder; });
      return;
    case MasterForm::kFp24Split: {
      const auto split = [](float x) { return split_float24(round_to_float24(x, kNearestPhase)); };
      upload_each(device, values, target, first, [&](float x) { return split(x).weight; });
      if (master.empty()) return;
      upload_each(device, values, master, first, [&](float x) { return split(x).remainder; });
      return;
    }
    case MasterForm::kBf16Sr: upload_each(device, values, target, first, encode_bf16); return;
    case MasterForm::kNone: throw_internal("a weight in {} without a master", name_of(target.dtype));
  }
}

void Optimizer::copy_weight(Device& device, size_t from, size_t to) {
  PARKA_REQUIRE(parameters_.at(from).numel() == parameters_.at(to).numel());
  device.copy(states_[to].weight.data, states_[from].weight.data, states_[to].weight.bytes());
  const TensorView& master = states_[to].master;
  if (!master.empty()) device.copy(master.data, states_[from].master.data, master.bytes());
}

void Optimizer::begin_step(Device& device) const {
  if (!shares_gradient_buffers()) {
    for (size_t i = 0; i < parameters_.size(); ++i) open_gradient(device, i);
  }
  device.fill_zero(sums().data, sums().bytes());
  if (!releases_gradients()) return;
  device.copy(last_squares_.data, total_squares_.data, total_squares_.bytes());
  device.fill_zero(total_squares_.data, total_squares_.bytes());
}

void Optimizer::open_gradient(Device& device, size_t i) const {
  const TensorView& whole = gradient_pieces_.at(i).whole;
  if (whole.empty()) return;
  const int64_t numel = parameters_[i].numel();
  const TensorView padding = whole.rows(numel, whole.numel() - numel);
  if (padding.numel() > 0) device.fill_zero(padding.data, padding.bytes());
}

void Optimizer::begin_update(Device& device) {
  PARKA_REQUIRE(states_.size() == parameters_.size());
  if (stream_) stream_->begin(stream_order());  // the first parts come while the norm is found
  if (releases_gradients()) device.copy(sums_.data, own_sums_.data, sums_.bytes());
}

std::pair<size_t, size_t> Optimizer::range_of(int unit) const {
  PARKA_REQUIRE((unit != kAllUnits) == releases_gradients());
  if (unit == kAllUnits) return {0, parameters_.size()};
  const auto begin = std::ranges::lower_bound(parameters_, unit, {}, &ParameterInfo::unit),
             end = std::ranges::upper_bound(parameters_, unit, {}, &ParameterInfo::unit);
  return {begin - parameters_.begin(), end - parameters_.begin()};
}

void Optimizer::clear_amax(Device& device, size_t begin, size_t end) const {
  if (weight_amax_.empty()) return;
  while (begin < end) {
    const auto is_trainable = [this](size_t i) { return parameters_[i].trainable; };
    if (!is_trainable(begin)) {
      ++begin;
      continue;
    }
    size_t run_end = begin;
    while (run_end < end && is_trainable(run_end)) ++run_end;
    const TensorView amax = weight_amax_.rows(static_cast<int64_t>(begin), static_cast<int64_t>(run_end - begin));
    device.fill_zero(amax.data, amax.bytes());
    begin = run_end;
  }
}

TensorView Optimizer::queue_squares(Device& device, int unit) {
  const auto [begin, end] = range_of(unit);
  std::vector<TensorView> own;  // padding, which is zeros, included
  for (size_t i = begin; i < end; ++i) {
    // What the ranks that share the sum have whole counts once.
    const Placement& placement = parameters_[i].placement;
    const bool is_divided = placement.states.size > 1 || placement.is_by_expert();
    own.push_back(is_divided || is_first_of_experts_ ? gradient_pieces_[i].own : TensorView());
  }
  const TensorView squares = squares_.rows(static_cast<int64_t>(begin), static_cast<int64_t>(end - begin));
  const bool is_unit = unit != kAllUnits;
  sum_of_squares(device, {.parts = own, .partial = squares, .result = is_unit ? unit_squares_ : total_squares_});
  if (!shares_states_) return {};
  return is_unit ? squares : scalars_.rows(0, squares_.numel() + 1);
}

// Of units: a number that is not finite stays in the sum, and so keeps all later ones from being updated.
void Optimizer::queue_coefficient(Device& device, int64_t step, const StepLimits& limits, int unit) {
  const auto [begin, end] = range_of(unit);
  ClipCoefficient clip = {.sum_of_squares = total_squares_,
                          .loss = sums_.rows(0, 1),
                          .max_norm = static_cast<float>(clip_limit(step)),
                          .coefficient = clip_coefficient_};
  if (unit != kAllUnits) {
    const auto first = static_cast<int64_t>(begin), count = static_cast<int64_t>(end - begin);
    add_sum(device, {.x = squares_.rows(first, count), .total = total_squares_});
    clip.clipped_squares = last_squares_;
  } else {
    clip.most_squares = static_cast<float>(limits.grad_norm * limits.grad_norm);
    clip.most_loss = static_cast<float>(limits.loss);
  }
  clip_coefficient(device, clip);
  clear_amax(device, begin, end);  // not sooner: backward reads them
}

PendingStep Optimizer::end_step(Device& device) {
  if (stream_) stream_->end();
  return {device.copy_to_host_later(scalars_.data, scalars_.bytes()), parameters_, num_sums_};
}

void Optimizer::set_last_norm(Device& device, double norm) const {
  PARKA_REQUIRE(releases_gradients());
  const auto squares = static_cast<float>(norm * norm);
  device.copy_to_device(total_squares_.data, &squares, sizeof(squares));
}

template <typename Step>
void Optimizer::for_each_part(const Update& update, size_t i, bool is_direction, const Step& step) {
  PARKA_REQUIRE(update.step >= 1);
  const auto step_part = [&](int64_t first, const ParameterState& part) {
    const auto amax = weight_amax_.empty() ? weight_amax_ : weight_amax_.rows(static_cast<int64_t>(i), 1);
    const TensorView gradient = gradient_pieces_[i].own.rows(first, part.numel());
    step(RuleStep{config_, parameters_[i], update, first, part, gradient, clip_coefficient_, amax});
  };
  if (stream_) {
    stream_->update(is_direction ? parameters_.size() + i : i, step_part);
  } else {
    step_part(0, states_[i]);
  }
}

void Optimizer::queue_directions(Device& device, const Update& update, const UpdateGroup& group) {
  for (const size_t i : group.parameters) {
    const TensorView direction = matrices_.direction(group, i);
    for_each_part(update, i, /*is_direction=*/true,
                  [&](const RuleStep& s) { muon_momentum(device, s, direction.rows(s.first, s.part.numel())); });
  }
}

void Optimizer::queue_update(Device& device, const Update& update, const UpdateGroup& group) {
  for (const size_t i : group.parameters) {
    for_each_part(update, i, /*is_direction=*/false, [&](const RuleStep& s) {
      if (group.owned.empty()) {
        adamw(device, s);
      } else {
        muon(device, s, matrices_.direction(group, i).rows(s.first, s.part.numel()));
      }
    });
  }
}

StepResult PendingStep::wait() const {
  const auto* squares = static_cast<const float*>(scalars_->wait());
  const std::vector<ParameterInfo>& parameters = *parameters_;
  const float *total = squares + parameters.size(), *coefficient = total + 1, *sums = coefficient + 1;
  StepResult result{{sums, sums + num_sums_}, std::sqrt(double{*total}), std::isfinite(*coefficient), {}};
  if (!std::isfinite(*total)) {
    const float* bad = std::find_if(squares, total, [](float square) { return !std::isfinite(square); });
    if (bad == total) bad = std::max_element(squares, total);  // each alone fits fp32, their sum does not
    result.culprit = parameters[static_cast<size_t>(bad - squares)].name;
  }
  return result;
}

double Optimizer::clip_limit(int64_t step) const {
  constexpr double kWarmupFactor = 10;  // of OLMo's runs
  if (config_.clip_norm == 0) return std::numeric_limits<double>::infinity();
  return step <= config_.clip_warmup_steps ? kWarmupFactor * config_.clip_norm : config_.clip_norm;
}

std::vector<NamedTensor> Optimizer::state() const {
  std::vector<NamedTensor> tensors;
  for (size_t i = 0; i < states_.size(); ++i) {
    const int64_t numel = parameters_[i].whole_numel(), groups = ceil_div(numel, kMomentGroup);
    const int64_t begin = parameters_[i].own_elements().begin;
    const auto add = [&](std::string name, const TensorView& view, int64_t first, int64_t count) {
      if (view.empty()) return;
      const ElementBox box = ElementBox::flat({first, first + view.numel()}, count);
      tensors.push_back({std::move(name), view, {count}, box, i});
    };
    const auto add_moment = [&](const std::string& name, const MomentView& moment) {
      add(name, moment.values, begin, numel);
      add(name + ".amax", moment.amax, ceil_div(begin, kMomentGroup), groups);
      add(name + ".exponent", moment.exponent, ceil_div(begin, kMomentGroup), groups);
    };
    const std::string& name = parameters_[i].name;
    add(name + ".master", states_[i].master, begin, numel);
    for (size_t kind = 0; kind < kinds_[i].size(); ++kind) {
      add_moment(fmt::format("{}.{}", name, kinds_[i][kind].name), states_[i].states[kind]);
    }
  }
  return tensors;
}

}  // namespace parka
