#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "core/memory_plan.h"
#include "core/shard.h"
#include "data/batch_loader.h"
#include "data/token_files.h"
#include "engine/checkpoint.h"
#include "engine/config.h"
#include "engine/evaluation.h"
#include "engine/parameter_exchange.h"
#include "engine/task_evaluation.h"
#include "engine/telemetry.h"
#include "kernels/arena.h"
#include "model/model.h"
#include "optim/optimizer.h"

namespace parka {

// What a rank of a run of `size` holds. Throws Error(kBadInput) if distributed.shard_size does not divide them.
Zero zero_of(const DistributedConfig& config, int64_t rank, int64_t size);

// Model and optimizer of a config with all their tensors declared; nothing is allocated. What `parka plan` prints
// and what a run allocates come from the same declarations.
struct DeclaredRun {
  DeclaredRun(const Config& config, DeviceKind device, const Zero& zero = {});

  MemoryPlan plan;
  Model model;
  Optimizer optimizer;
  std::optional<Telemetry> telemetry;  // absent when telemetry.interval is 0
  TensorId workspace;                  // of the ops; invalid on the CPU
  TensorId reduction_room;             // Communicator::set_room(); on GPUs with divided gradients
  TensorId target_share;               // [1] fp32, 1 / targets of the step; only where steps differ in that
};

// Declares the workspace of all ops that a model, trained or not, runs on a GPU; `cache` is of one that generates.
TensorId declare_op_workspace(const Config& config, const ParameterTable& table, MemoryPlan& plan,
                              const CacheShape& cache = {});

// What happened in one optimizer step.
struct StepReport {
  int64_t step = 0;      // counts from 1
  double loss = 0;       // mean over the global batch, nats per token, before the update
  double grad_norm = 0;  // before clipping
  double learning_rate = 0;
  double clip_limit = 0;
  bool applied = false;          // false: loss or gradients were not finite; weights and states are unchanged
  std::string culprit;           // when not applied: the first tensor whose gradient is not finite, if one is
  DataPosition data;             // where this step's global batch starts
  int64_t num_targets = 0;       // tokens of the global batch that were to be predicted
  double seconds = 0;            // that the device took, from the end of the step before where that was unfinished
  double data_wait_seconds = 0;  // that the host waited for batches
  std::optional<TelemetryReport> telemetry;  // where telemetry.interval asks for one
};

// One rank of a training run: weights, optimizer states and the position in the data. All ranks must make the same
// calls; what a step reports is of the whole run, and the same on all of them.
class TrainingRun {
 public:
  // Opens the data, declares and allocates everything. The run is at step 0 with undefined weights: call
  // initialize() or restore(). Throws Error(kBadInput) for data that cannot be used.
  TrainingRun(const Config& config, Device& device, Communicator& communicator);

  void initialize();
  // For measuring speed: as initialize(), but parameters of one shape get the same values, which takes a fraction
  // of the time for a large model.
  void initialize_alike();
  // Starts from the weights of a checkpoint, whatever its formats: at step 0 of this run's data, with fresh
  // moments. Returns the settings of its model that differ, one line each, where that is allowed. Throws
  // Error(kBadInput) when its model is another one or has values that are not finite.
  std::vector<std::string> initialize_from(const LoadedCheckpoint& checkpoint);
  // Takes over weights, states and position. Returns the settings that differ from the checkpoint's, one line each,
  // where that is allowed. Throws Error(kBadInput) when the checkpoint does not fit the config or holds values that
  // are not finite; the run must not be used then.
  std::vector<std::string> restore(const LoadedCheckpoint& checkpoint);
  // Everything that restore() needs, copied to the host. No step may be unfinished.
  CheckpointContents snapshot() const;

  // Everything that a checkpoint holds on the device: this rank's part of it.
  std::vector<NamedTensor> tensors() const;

  // Queues one step and does not wait for it; reports the one before, whose outcome the update waits for (the
  // device then still has this step's forward and backward to work on). On a device that is done when it returns,
  // as the CPU is, the report is of this step. After a step that was not applied under non_finite = stop nothing is
  // queued any more.
  std::optional<StepReport> step();
  // The report of a step that step() has not reported yet, if there is one. Waits for it.
  std::optional<StepReport> finish();
  int64_t completed_steps() const { return completed_steps_; }  // queued ones count

  // `called` is told before each batch of an evaluation, which may take long.
  void on_evaluation_batch(std::function<void()> called) { evaluation_progress_ = std::move(called); }

  const MemoryPlan& plan() const { return declared_.plan; }
  Model& model() { return declared_.model; }
  const Model& model() const { return declared_.model; }
  const Optimizer& optimizer() const { return declared_.optimizer; }
  const TokenFiles& data() const { return data_; }
  // How often each source of a mixture has been gone through at a position.
  std::vector<double> source_epochs(DataPosition position) const;
  // Held-out loss, and scores in a task; every rank does a part of it.
  EvaluationResult evaluate(const TokenFiles& files);
  TaskResult evaluate(const EvalTask& task);

  int64_t tokens_per_step() const { return config_.training.global_batch_size * config_.data.sequence_length; }

 private:
  struct UnfinishedStep {
    StepReport report;  // without what the device still computes
    PendingStep result;
    std::optional<PendingTelemetry> telemetry;
    std::unique_ptr<Mark> end;
  };

  void start_loader(DataPosition position);
  // Returns the number of targets of the step.
  int64_t queue_gradients(bool with_telemetry);
  int64_t share_targets(int64_t own);
  void begin_evaluation_batch();
  // Bring up to date what is made from this rank's weights: after a step, which finds their maxima, and after any
  // other change.
  void weights_stepped();
  void weights_changed();
  void initialize_one(size_t i);

  Config config_;
  Device& device_;
  Communicator& communicator_;
  Zero zero_;
  TokenFiles data_;
  nlohmann::json data_files_;  // see describe_files()
  DeclaredRun declared_;
  Arena arena_;
  std::optional<ParameterExchange> exchange_;  // of several ranks
  std::function<void()> evaluation_progress_;
  std::unique_ptr<BatchLoader> loader_;
  DataPosition batch_start_;  // of the last global batch that was queued
  DataPosition position_;     // of the next one, or past the end of the epoch
  int64_t completed_steps_ = 0;
  int64_t applied_steps_ = 0;  // updates done: what bias correction counts
  std::optional<UnfinishedStep> unfinished_;
  std::unique_ptr<Mark> step_began_;  // where the oldest unfinished step begins
};

}  // namespace parka
