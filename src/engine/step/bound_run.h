#pragma once
#include <cstdint>
#include <functional>
#include <optional>

#include "comm/communicator.h"
#include "engine/config/config.h"
#include "engine/step/declared_run.h"
#include "engine/step/parameter_exchange.h"
#include "engine/step/released_updates.h"
#include "engine/step/sequence_exchange.h"
#include "kernels/device/arena.h"

namespace parka {

// A declared run in its memory on a device: queues what a step of training consists of, whose parts are called in
// the order below. Training queues it on a device that computes, planning on one that records.
class BoundRun {
 public:
  // Binds the run to the arena, and gives workspace and exchange buffer to device and communicator. Divides the
  // communicator's ranks as `zero`, zero_of() this rank, and distributed.context_parallel say. All arguments must
  // outlive the queue.
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
  // memory is used again: then they can only be read in on_gradient().
  bool takes_gradients(const ParameterExchange::Place& place) const;
  // See ParameterExchange::on_gradient(); for where takes_gradients() says so.
  void on_gradient(const std::function<void(int parameter)>& called);

  // `update` counts from 1. For before_update and limits see Optimizer::step().
  PendingStep update(int64_t update, double lr, const std::function<void(size_t parameter)>& before_update = {},
                     const StepLimits& limits = {});
  // With optimizer.release_gradients, in place of update(): the next micro-batch makes the update, which without
  // this leaves weights as they are...
  void release_update(int64_t update, double lr, const std::function<void(size_t parameter)>& before_update = {});
  // ... or, after this, the one behind it, by which that one is computed again. Without release_gradients: nothing.
  void hold_update() {
    if (released_) released_->hold_update();
  }
  // Returns the result of the update.
  PendingStep end_update() { return declared_.optimizer.end_step(device_); }
  // Brings up to date what is made from this rank's weights, after an update, which finds their maxima...
  void weights_stepped();
  // ... and after any other change.
  void weights_changed();

  // Before a batch of an evaluation, which has no place in a step.
  void begin_evaluation_batch();

 private:
  void share_weights(ModelWeights::Changed changed);
  Optimizer::SumOverRanks sums();
  uint64_t rounding_seed() const;

  const Config& config_;
  const Zero& zero_;
  DeclaredRun& declared_;
  const Arena& arena_;
  Device& device_;
  std::optional<SequenceExchange> context_;    // where ranks share sequences
  std::optional<ParameterExchange> exchange_;  // absent in a run of one rank
  std::optional<ReleasedUpdates> released_;    // with optimizer.release_gradients
};

}  // namespace parka
