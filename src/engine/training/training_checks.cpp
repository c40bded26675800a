// A TrainingRun's checks for silent data corruption.
#include <cstring>
#include <optional>
#include <utility>

#include "core/bit_hash.h"
#include "engine/training/training_run.h"
#include "model/unit_hooks.h"

namespace parka {

using Table = IntegrityChecks::Table;

namespace {

// Hashes the gradients of each unit before other hooks do anything with them.
class GradientHashes final : public UnitHooks {
 public:
  GradientHashes(const DeclaredRun& run, Table table, UnitHooks& others)
      : run_(run), table_(table), others_(others) {}
  void before_forward(Device& device, int unit) override { others_.before_forward(device, unit); }
  void before_backward(Device& device, int unit) override { others_.before_backward(device, unit); }
  void after_backward(Device& device, int unit) override {
    for (const int i : run_.model.parameters().trained(unit)) {
      const auto slot = static_cast<size_t>(i);
      run_.checks.hash_one(device, table_, slot, run_.optimizer.gradients()[slot]);
    }
    others_.after_backward(device, unit);
  }

 private:
  const DeclaredRun& run_;
  Table table_;
  UnitHooks& others_;
};

}  // namespace

void TrainingRun::watch_state() {
  const ModelWeights& weights = declared_.model.weights();
  const std::vector<ParameterInfo>& parameters = declared_.model.parameters().all;
  // Numbers of ranks that hold the same: 0 for what all hold whole, else one for each place in a group; below 0 of
  // experts that ranks divide, first whole, then in pieces.
  const auto whole_holders = [&](size_t i) {
    const Placement& placement = parameters[i].placement;
    return placement.is_by_expert() ? -1 - placement.expert_place : 0;
  };
  const auto holders = [&](size_t i) {
    const Placement& placement = parameters[i].placement;
    if (!placement.is_by_expert()) return 1 + placement.states.rank;
    return whole_holders(i) - (1 + placement.states.rank) * placement.expert_places;
  };
  std::vector<IntegrityChecks::Watched> watched;
  for (NamedTensor& tensor : tensors()) {
    const int64_t held_by = holders(tensor.parameter);
    watched.push_back({std::move(tensor), held_by});
  }
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (parameters[i].is_coded()) {
      for (const CodeTensor& codes : weights.code_tensors(static_cast<int>(i))) {
        watched.push_back({{parameters[i].name + std::string(codes.suffix), codes.view, {}, {}, i}, 0});
      }
    } else if (!parameters[i].trainable && !base_.is_null()) {
      watched.push_back({weight_tensor(i), holders(i)});
    }
  }
  for (size_t i = 0; i < parameters.size(); ++i) {
    const TensorView& whole = weights.kept(static_cast<int>(i));
    if (whole.empty() || parameters[i].placement.states.size == 1) continue;
    watched.push_back({{parameters[i].name + " (gathered)", whole, {}, {}, i}, whole_holders(i)});
  }
  declared_.checks.watch(std::move(watched));
}

// A micro-batch whose gradients are hashed before anything is done with them, by the hooks where ranks exchange
// them at once and behind the micro-batch otherwise. The loss is hashed behind them.
void TrainingRun::queue_hashed(Table table, const Model::Batch& batch, const Model::LossOptions& options,
                               const ParameterExchange::Place& place, bool with_telemetry) {
  const IntegrityChecks& checks = declared_.checks;
  const std::vector<TensorView>& gradients = declared_.optimizer.gradients();
  checks.clear(device_, table);
  const BoundRun::MicroBatch how = bound_.begin_micro_batch(place, with_telemetry);
  std::optional<GradientHashes> hashes;
  if (bound_.takes_gradients(place)) hashes.emplace(declared_, table, *bound_.hooks());
  declared_.model.set_hooks(hashes ? &*hashes : bound_.hooks());
  declared_.model.accumulate_gradients(device_, batch, options, gradients, how.accumulation, how.queueing);
  declared_.model.set_hooks(bound_.hooks());
  for (size_t i = 0; i < gradients.size() && !hashes; ++i) checks.hash_one(device_, table, i, gradients[i]);
  checks.hash_one(device_, table, gradients.size(), options.sums);
}

void TrainingRun::queue_replayed(const Model::Batch& batch, const Model::LossOptions& options,
                                 const ParameterExchange::Place& place, bool with_telemetry,
                                 std::vector<PendingComparison>& comparisons) {
  const IntegrityChecks& checks = declared_.checks;
  bound_.hold_update();
  queue_hashed(Table::kFirstGradients, batch, options, place, /*with_telemetry=*/false);
  device_.fill_zero(options.sums.data, options.sums.bytes());
  queue_hashed(Table::kSecondGradients, batch, options, place, with_telemetry);
  std::vector<std::string> names;
  for (const ParameterInfo& p : declared_.model.parameters().all) names.push_back(p.name + ".gradient");
  names.emplace_back("the loss");
  comparisons.push_back({checks.read_later(device_, Table::kFirstGradients),
                         checks.read_later(device_, Table::kSecondGradients), std::move(names),
                         "differs when its micro-batch is computed twice"});
}

bool TrainingRun::state_is_watched_at(int64_t step) const {
  const IntegrityChecks& checks = declared_.checks;
  return checks.state_is_due(step) || (checks.watches_state() && save_is_due(config_, step));
}

// Nothing has written the state between Table::kUpdated and Table::kUnchanged.
PendingComparison TrainingRun::compare_state() const {
  std::vector<std::string> names;
  for (const IntegrityChecks::Watched& watched : declared_.checks.watched()) names.push_back(watched.tensor.name);
  return {declared_.checks.read_later(device_, Table::kUpdated),
          declared_.checks.read_later(device_, Table::kUnchanged), std::move(names),
          "has changed since the last update, although nothing wrote it"};
}

void TrainingRun::after_update(UnfinishedStep& step) {
  const bool compares = communicator_.size() > 1 && declared_.checks.state_is_due(completed_steps_);
  const bool watches = state_is_watched_at(completed_steps_);
  if (watches || compares) declared_.checks.hash_watched(device_, Table::kUpdated);
  if (watches) hashed_step_ = completed_steps_;
  if (compares) step.replicas = declared_.checks.read_later(device_, Table::kUpdated);
}

void TrainingRun::compare_replicas(const void* hashes, int64_t step) {
  const std::vector<IntegrityChecks::Watched>& watched = declared_.checks.watched();
  ReplicaHashes own;
  for (size_t i = 0; i < watched.size(); ++i) {
    uint64_t hash = 0;
    std::memcpy(&hash, static_cast<const std::byte*>(hashes) + i * kHashWordBytes, sizeof(hash));
    own.names.push_back(watched[i].tensor.name);
    own.hashes.push_back(hash);
    own.groups.push_back(watched[i].replicas);
  }
  parka::compare_replicas(communicator_, own, step, place_);
}

void TrainingRun::check_before_save(SnapshotForm form) {
  PARKA_REQUIRE(!unfinished_);
  // A rank alone holds what it stages against the hashes of the update where it is written.
  const bool has_updated =
      hashed_step_ == completed_steps_ && (communicator_.size() > 1 || form != SnapshotForm::kStaged);
  const bool has_replicas = communicator_.size() > 1 && declared_.checks.watches_state();
  if (!has_updated && !has_replicas) return;
  declared_.checks.hash_watched(device_, Table::kUnchanged);
  if (has_updated) compare_state().check(completed_steps_, place_);
  if (!has_replicas) return;
  compare_replicas(declared_.checks.read_later(device_, Table::kUnchanged)->wait(), completed_steps_);
}

}  // namespace parka
