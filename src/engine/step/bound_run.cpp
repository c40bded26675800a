#include "engine/step/bound_run.h"

#include <algorithm>
#include <vector>

#include "kernels/ops/moe/router_bias.h"
#include "model/layers/moe.h"

namespace parka {
namespace {

// Stochastic rounding must not draw the numbers that initialization has drawn from training.seed.
constexpr uint64_t kRoundingKey = 0x9e3779b97f4a7c15;

// `exchange`: null where ranks exchange nothing.
void queue_update(Device& device, Optimizer& optimizer, ParameterExchange* exchange, const Update& update,
                  const UpdateGroup& group, const BeforeUpdate& before) {
  for (const size_t i : group.parameters) before(device, i);
  if (!group.owned.empty()) {
    optimizer.queue_directions(device, update, group);
    const auto [pieces, whole] = optimizer.directions(group);
    if (exchange != nullptr) exchange->exchange_pieces(device, pieces, whole, group.peers);
    optimizer.orthogonalize(device, group);
    if (exchange != nullptr) exchange->exchange_pieces(device, whole, pieces, group.peers);
  }
  optimizer.queue_update(device, update, group);
}

}  // namespace

BoundRun::BoundRun(const Config& config, const Zero& zero, DeclaredRun& declared, const Arena& arena,
                   Device& device, Communicator& communicator)
    : config_(config), declared_(declared), arena_(arena), device_(device) {
  if (declared_.workspace.valid()) {
    const TensorView workspace = arena_[declared_.workspace];
    device.set_workspace(workspace.data, workspace.bytes());
  }
  communicator.set_exchange_buffer(arena_[declared_.exchange_buffer]);
  declared_.model.bind(device, arena_);
  declared_.optimizer.bind(arena_, declared_.model.weights().own(), declared_.model.weights().amax());
  if (zero.mesh != communicator.mesh()) communicator.divide(zero.mesh);
  if (zero.mesh.size(Peers::kContext) > 1) {
    declared_.model.set_context(&context_.emplace(communicator, Peers::kContext, "exchanged sequences"));
  }
  if (zero.mesh.size(Peers::kExpert) > 1) {
    declared_.model.set_experts(&experts_.emplace(communicator, Peers::kExpert, "tokens of experts"));
  }
  if (communicator.size() > 1 || declared_.model.weights().has_host_parts()) {
    hooks_ = &exchange_.emplace(communicator, declared_.model, declared_.optimizer, device_);
  }
  if (declared_.optimizer.releases_gradients()) {
    hooks_ = &released_.emplace(declared_.optimizer, declared_.model.parameters(),
                                exchange_ ? &*exchange_ : nullptr, communicator.size() > 1);
  }
  declared_.model.set_hooks(hooks_);
  if (declared_.telemetry) declared_.telemetry->bind(arena_);
  declared_.checks.bind(arena_);
}

void BoundRun::begin_step() { declared_.optimizer.begin_step(device_); }

void BoundRun::set_target_share(float share) {
  device_.copy_to_device(arena_[declared_.target_share].data, &share, sizeof(share));
}

Model::LossOptions BoundRun::loss_options(int64_t num_targets) const {
  const bool vary = targets_vary();
  const TrainingConfig& t = config_.training;
  const double share = static_cast<double>(t.micro_batch_size) /
                       static_cast<double>(t.global_batch_size * config_.distributed.context_parallel);
  return {.grad_scale = vary ? 1.0f : static_cast<float>(1.0 / static_cast<double>(num_targets)),
          .z_loss = static_cast<float>(config_.training.z_loss),
          .grad_factor = vary ? arena_[declared_.target_share] : TensorView(),
          .sums = declared_.optimizer.sums(),
          .router = {share * t.balance_loss, t.balance_form == BalanceForm::kPooled, share * t.router_z_loss}};
}

BoundRun::MicroBatch BoundRun::begin_micro_batch(const ParameterExchange::Place& place, bool with_telemetry) {
  PARKA_REQUIRE(!released_ || (place.is_first && place.is_last));
  if (exchange_) exchange_->begin_micro_batch(place);
  if (place.is_first) declared_.optimizer.matrices().begin_telemetry(device_, with_telemetry);
  const bool hooks_queue = released_ || context_ || experts_ || (exchange_ && !exchange_->is_idle());
  // Divided gradients leave their buffers in each micro-batch, and ParameterExchange adds them up.
  const bool overwrites = place.is_first || declared_.optimizer.shards_gradients();
  return {overwrites ? Accumulation::kBegin : Accumulation::kContinue, with_telemetry && place.is_first
                                                                           ? Model::Queueing::kWithTelemetry
                                                                       : hooks_queue ? Model::Queueing::kEachTime
                                                                                     : Model::Queueing::kMayReplay};
}

bool BoundRun::takes_gradients(const ParameterExchange::Place& place) const {
  return released_ || (exchange_ && (place.is_last || declared_.optimizer.shards_gradients()));
}

uint64_t BoundRun::rounding_seed() const { return static_cast<uint64_t>(config_.training.seed) ^ kRoundingKey; }

PendingStep BoundRun::update(int64_t update, double lr, const BeforeUpdate& before, const StepLimits& limits) {
  Optimizer& optimizer = declared_.optimizer;
  device_.section(StepSection::kOptimizer);
  optimizer.begin_update(device_);
  const TensorView squares = optimizer.queue_squares(device_);
  if (exchange_) {
    exchange_->sum_of_pieces(device_, squares);
    exchange_->sum(device_, optimizer.step_sums(), Peers::kAll);
  }
  optimizer.queue_coefficient(device_, update, limits);
  for (const UpdateGroup& group : optimizer.groups()) {
    queue_update(device_, optimizer, exchange_ ? &*exchange_ : nullptr,
                 {.step = update, .lr = lr, .seed = rounding_seed()}, group, before);
  }
  move_router_biases(before);
  return end_update();
}

PendingStep BoundRun::end_update() {
  Optimizer& optimizer = declared_.optimizer;
  if (exchange_ && optimizer.shares_states()) exchange_->sum_of_pieces(device_, optimizer.matrices().sums());
  return optimizer.end_step(device_);
}

void BoundRun::move_router_biases(const BeforeUpdate& before) {
  const double rate = config_.training.router_bias_rate;
  if (rate == 0) return;
  const ParameterTable& table = declared_.model.parameters();
  const int64_t count = RouterLoads(config_.model).columns();
  int64_t at = 1;  // the first is the loss
  for (size_t i = 0; i < table.all.size(); ++i) {
    if (table.all[i].role != ParameterRole::kRouterBias) continue;
    const TensorView load = declared_.optimizer.step_sums().rows(at, count);
    at += count;
    before(device_, i);
    move_router_bias(device_, {.load = load,
                               .coefficient = declared_.optimizer.coefficient(),
                               .rate = static_cast<float>(rate),
                               .bias = declared_.model.weights().plain(static_cast<int>(i))});
  }
}

void BoundRun::release_update(int64_t update, double lr, BeforeUpdate before) {
  PARKA_REQUIRE(released_.has_value());
  released_->set_update({{.step = update, .lr = lr, .seed = rounding_seed()}, std::move(before)});
}

void BoundRun::share_weights(ModelWeights::Changed changed) {
  if (exchange_) {
    exchange_->weights_changed(device_, changed);
  } else {
    declared_.model.weights().quantize(device_, changed);
  }
}

void BoundRun::weights_stepped() {
  const bool trains_experts = std::ranges::any_of(declared_.model.parameters().all, [](const ParameterInfo& p) {
    return p.role == ParameterRole::kExperts && p.trainable;
  });
  if (trains_experts) declared_.model.weights().find_expert_amax(device_);  // reads all of them
  share_weights(ModelWeights::Changed::kTrained);
}

void BoundRun::weights_changed() {
  declared_.model.weights().find_amax(device_);
  share_weights(ModelWeights::Changed::kAll);
}

void BoundRun::begin_evaluation_batch() {
  if (exchange_) exchange_->begin_micro_batch({});
}

void BeforeUpdate::operator()(Device& device, size_t parameter) const {
  if (checks != nullptr) checks->hash_watched(device, IntegrityChecks::Table::kUnchanged, parameter);
  if (staging != nullptr) staging->order_after(last_staged[parameter]);
}

void ReleasedUpdates::before_forward(Device& device, int unit) {
  if (exchange_ != nullptr) exchange_->before_forward(device, unit);
}

void ReleasedUpdates::before_backward(Device& device, int unit) {
  if (exchange_ != nullptr) exchange_->before_backward(device, unit);
}

void ReleasedUpdates::after_backward(Device& device, int unit) {
  if (!are_several_) {
    update(device, unit);
    if (exchange_ != nullptr) exchange_->after_backward(device, unit);
  } else {
    // Ahead of this unit's reduction, which the sums of numbers over ranks would have to wait for.
    if (unit != table_.head_unit()) update(device, unit + 1);
    exchange_->after_backward(device, unit);
    if (unit == table_.first_trained_unit) update(device, unit);
  }
  if (unit != table_.first_trained_unit) return;
  if (!is_held_) arguments_.reset();
  is_held_ = false;
}

void ReleasedUpdates::update(Device& device, int unit) {
  if (!arguments_ || is_held_) return;
  const StepSection backward = device.section();
  device.section(StepSection::kOptimizer);
  if (are_several_) exchange_->wait_for_gradients(device, unit);
  if (unit == table_.head_unit()) {
    optimizer_.begin_update(device);
    if (exchange_ != nullptr) exchange_->sum(device, optimizer_.step_sums(), Peers::kAll);
  }
  if (const std::vector<int> trained = table_.trained(unit); !trained.empty()) {
    const TensorView squares = optimizer_.queue_squares(device, unit);
    if (exchange_ != nullptr) exchange_->sum_of_pieces(device, squares);
    optimizer_.queue_coefficient(device, arguments_->update.step, {}, unit);
    // Also before those that other ranks alone update.
    for (const int i : trained) arguments_->before(device, static_cast<size_t>(i));
    for (const UpdateGroup& group : optimizer_.groups()) {
      if (group.unit == unit) queue_update(device, optimizer_, exchange_, arguments_->update, group, {});
    }
  }
  device.section(backward);
}

}  // namespace parka
