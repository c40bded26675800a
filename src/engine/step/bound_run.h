#pragma once
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "comm/communicator.h"
#include "engine/config/config.h"
#include "engine/step/declared_run.h"
#include "engine/step/parameter_exchange.h"
#include "kernels/device/arena.h"
#include "model/unit_hooks.h"
#include "optim/optimizer.h"

namespace parka {

// The work to be done before a parameter is updated.
struct BeforeUpdate {
  const IntegrityChecks* checks = nullptr;  // hash its watched tensors into Table::kUnchanged; null: none does
  StagingBuffer* staging = nullptr;         // a save copies it; null: none does
  std::vector<size_t> last_staged = {};     // by parameter: the last of its tensors in that buffer

  void operator()(Device& device, size_t parameter) const;
};

// Updates each unit while backward goes on (optimizer.release_gradients): the hooks of such a run, which pass on
// all that they are told to ParameterExchange where there is one. With several ranks the gradients of a unit are
// reduced while backward is at the next one, behind which the unit is updated: the two buffers that units take in
// turn suffice. On one rank a unit is updated at once.
class ReleasedUpdates final : public UnitHooks {
 public:
  // `exchange`: null where there is nothing to bring together. `are_several`: there are several ranks, whose
  // gradients it reduces. All must live as long as this.
  ReleasedUpdates(Optimizer& optimizer, const ParameterTable& table, ParameterExchange* exchange, bool are_several)
      : optimizer_(optimizer), table_(table), exchange_(exchange), are_several_(are_several) {
    PARKA_REQUIRE(exchange != nullptr || !are_several);
  }

  struct Arguments {
    Update update;
    BeforeUpdate before;
  };
  // The next micro-batch makes this update. One without leaves all weights as they are.
  void set_update(Arguments arguments) { arguments_ = std::move(arguments); }
  // The next micro-batch leaves the update to the one behind it, by which it is computed again.
  void hold_update() { is_held_ = true; }

  void before_forward(Device& device, int unit) override;
  void before_backward(Device& device, int unit) override;
  void after_backward(Device& device, int unit) override;

 private:
  void update(Device& device, int unit);

  Optimizer& optimizer_;
  const ParameterTable& table_;
  ParameterExchange* exchange_;
  bool are_several_;
  std::optional<Arguments> arguments_;
  bool is_held_ = false;
};

// A declared run in its memory on a device: queues what a step of training consists of, whose parts are called in
// the order below. Training queues it on a device that computes, planning on one that records.
class BoundRun {
 public:
  // Binds the run to the arena, and gives workspace and exchange buffer to device and communicator. Divides the
  // communicator's ranks as `zero`, zero_of() this rank, says. All arguments must outlive the queue.
  BoundRun(const Config& config, const Zero& zero, DeclaredRun& declared, const Arena& arena, Device& device,
           Communicator& communicator);
  BoundRun(const BoundRun&) = delete;
  BoundRun& operator=(const BoundRun&) = delete;

  void begin_step();
  // True if steps differ in their number of targets. Its inverse is then not a constant of what a device records,
  // but in set_target_share()'s tensor.
  bool targets_vary() const { return declared_.target_share.valid(); }
  void set_target_share(float share);
  Model::LossOptions loss_options(int64_t num_targets) const;
  // Right before each Model::accumulate_gradients(): how it is called, with Optimizer::gradients(). There is
  // telemetry of the first micro-batch of a step alone.
  struct MicroBatch {
    Accumulation accumulation;
    Model::Queueing queueing;
  };
  MicroBatch begin_micro_batch(const ParameterExchange::Place& place, bool with_telemetry = false);
  // True if the gradients of such a micro-batch are not all there after it, because ranks divide them or their
  // memory is used again: then they can only be read before hooks() are told of the end of each unit.
  bool takes_gradients(const ParameterExchange::Place& place) const;
  UnitHooks* hooks() const { return hooks_; }  // the model's

  // `update` counts from 1. `before` is done for each parameter that this rank has a part of. For limits see
  // Optimizer.
  PendingStep update(int64_t update, double lr, const BeforeUpdate& before = {}, const StepLimits& limits = {});
  // With optimizer.release_gradients, in place of update(): the next micro-batch makes the update, which without
  // this leaves weights as they are...
  void release_update(int64_t update, double lr, BeforeUpdate before = {});
  // ... or, after this, the one after it, by which that one is computed again. Without release_gradients: nothing.
  void hold_update() {
    if (released_) released_->hold_update();
  }
  // Returns the result of the update.
  PendingStep end_update();
  // Brings up to date what is made from this rank's weights, after an update, which finds their maxima...
  void weights_stepped();
  // ... and after any other change.
  void weights_changed();

  // Before a batch of an evaluation, which has no place in a step.
  void begin_evaluation_batch();

 private:
  void move_router_biases(const BeforeUpdate& before);
  void share_weights(ModelWeights::Changed changed);
  uint64_t rounding_seed() const;

  const Config& config_;
  DeclaredRun& declared_;
  const Arena& arena_;
  Device& device_;
  std::optional<GroupExchange> context_;       // where ranks share sequences
  std::optional<GroupExchange> experts_;       // where ranks divide experts
  std::optional<ParameterExchange> exchange_;  // absent in a run of one rank
  std::optional<ReleasedUpdates> released_;    // with optimizer.release_gradients
  UnitHooks* hooks_ = nullptr;                 // one of these two, or none
};

}  // namespace parka
