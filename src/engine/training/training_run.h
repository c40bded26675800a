#pragma once
#include <chrono>
#include <cmath>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "core/memory/memory_plan.h"
#include "core/placement.h"
#include "data/batch_loader.h"
#include "data/token_files.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/checkpoint/checkpoint_weights.h"
#include "engine/checkpoint/saved_state.h"
#include "engine/config/config.h"
#include "engine/evaluation/evaluation.h"
#include "engine/evaluation/task_evaluation.h"
#include "engine/step/bound_run.h"
#include "engine/step/declared_run.h"
#include "engine/step/integrity.h"
#include "engine/step/parameter_exchange.h"
#include "engine/step/telemetry.h"
#include "kernels/device/arena.h"
#include "model/model.h"
#include "optim/optimizer.h"
#include "optim/spike_guard.h"

namespace parka {

// Host memory that one of `num_ranks` takes to save beside its training: what it writes of a checkpoint, and a few
// hashes. Ranks that hold the same share the writing. 0 where checkpoint.async is off.
int64_t staging_bytes(const Config& config, const DeclaredRun& run, int64_t num_ranks);

// The outcome of one optimizer step.
struct StepReport {
  int64_t step = 0;                 // counts from 1
  double loss = 0;                  // mean over the global batch, nats per token, before the update
  double grad_norm = 0;             // before clipping
  std::vector<StepScalar> scalars;  // these two and all others that the step reports
  std::vector<ExpertUse> experts;   // of each block of a mixture of experts
  double learning_rate = 0;
  // false: not finite, or a spike. Weights and states are unchanged, or see Optimizer::end_step() if released.
  bool applied = false;
  SpikeGuard::Step limits;  // beyond which this step was a spike
  std::string culprit;      // when not applied: the first tensor whose gradient is not finite, if one is
  DataPosition data;        // where this step's global batch starts
  int64_t num_targets = 0;  // tokens of the global batch that were to be predicted
  std::chrono::steady_clock::time_point finished;  // when the device had done it
  double seconds = 0;            // that the device took, from the end of the step before where that was unfinished
  double data_wait_seconds = 0;  // that the host waited for batches since it queued the step before
  std::optional<TelemetryReport> telemetry;  // where telemetry.interval asks for one

  bool is_finite() const { return std::isfinite(loss) && std::isfinite(grad_norm); }
};

// True if the config asks for a checkpoint after this step.
bool save_is_due(const Config& config, int64_t step);

// One rank of a training run: weights, optimizer states and the position in the data. All ranks must make the same
// calls; what a step reports is of the whole run, and the same on all of them.
class TrainingRun {
 public:
  // Opens the data, declares and allocates everything. The run is at step 0 with undefined weights: call
  // initialize() or restore(). Throws Error(kBadInput) for data that cannot be used.
  TrainingRun(const Config& config, Device& device, Communicator& communicator);

  void initialize();
  // As initialize(), to measure speed: parameters of one shape get the same values, which takes less time.
  void initialize_alike();
  // Starts from the weights of a checkpoint, whatever its formats: at step 0 of this run's data, with fresh
  // moments. Returns the settings of its model that differ, one line each, where that is allowed. Throws
  // Error(kBadInput) when its model is another one or has values that are not finite.
  std::vector<std::string> initialize_from(const LoadedCheckpoint& checkpoint);
  // Takes over weights, states and position. Returns the settings that differ from the checkpoint's, one line each,
  // where that is allowed; so are other formats of masters and moments, where they may be converted. Throws
  // Error(kBadInput) when the checkpoint does not fit or is not finite; the run must not be used then.
  std::vector<std::string> restore(const LoadedCheckpoint& checkpoint, bool converts_states = false);
  // Everything that restore() needs. No step may be unfinished.
  enum class SnapshotForm : uint8_t {
    kCopied,  // in memory of its own
    kStaged,  // on its way to the staging buffer, beside the next step: valid until the next such snapshot, or
              // until this run goes. Reading it throws Error(kCorrupted) where it is not what the device held, and
              // Error(kNonFinite) for NaN and infinities
    kDirect,  // still on the device: to be read on this thread, before anything else is done. Throws
              // Error(kNonFinite) likewise
  };
  CheckpointContents snapshot(SnapshotForm form = SnapshotForm::kCopied);
  // From here on memory for kStaged is made ready, once. Weights must be set: by then it is known what is saved.
  void prepare_staging();
  // Why there is none; empty: there is. Waits until that is known.
  const std::string& staging_failure() { return staging_->failure(); }
  // Before a snapshot of this form: throws Error(kCorrupted) where weights or states are not what the last update
  // left, or not what other ranks have. No step may be unfinished. What one rank stages is checked at reading.
  void check_before_save(SnapshotForm form);

  // How messages name this rank's place: "rank 1 (node2, NVIDIA H200)".
  void set_place(std::string place) { place_ = std::move(place); }
  // Why the data of the next step cannot be read; null where it can. Waits until that is known.
  std::exception_ptr data_failure() const { return loader_->failure_within(micro_batches_per_step()); }

  // Everything that a checkpoint holds on the device: this rank's part of it. Without the frozen weights of a run
  // that trains adapters beside those of another checkpoint, which its own name.
  std::vector<NamedTensor> tensors() const;

  // Queues one step and does not wait for it; reports the one before, whose outcome the update waits for. On a
  // device that is done when it returns, as the CPU is, the report is of this step. After a step that was not
  // applied under non_finite = stop nothing is queued any more.
  std::optional<StepReport> step();
  // The report of a step that step() has not reported yet, if there is one. Waits for it.
  std::optional<StepReport> finish();
  // After a step that was not applied, the last one, with none unfinished: the run is as before it, to be saved.
  void take_back(const StepReport& step);
  int64_t completed_steps() const { return completed_steps_; }  // queued ones count
  int64_t applied_steps() const { return applied_steps_; }      // finished ones; 0: the weights are as they began
  // Steps that were not finite, up to the newest finished one; those before restore() count.
  int64_t skipped_in_a_row() const { return skipped_in_a_row_; }

  // As it was given, but for a restored run's checkpoint.init_from: the checkpoint's, or where that lies by now.
  const Config& config() const { return config_; }
  const MemoryPlan& plan() const { return declared_.plan; }
  Model& model() { return declared_.model; }
  const Model& model() const { return declared_.model; }
  const Optimizer& optimizer() const { return declared_.optimizer; }
  const TokenFiles& data() const { return data_; }
  // How often each source of a mixture has been gone through at a position.
  std::vector<double> source_epochs(DataPosition position) const;
  // Held-out loss, and scores in a task; every rank does a part of it.
  EvaluationResult evaluate(const TokenFiles& files, const BeforeEvaluationBatch& before_each = {});
  TaskResult evaluate(const EvalTask& task, const BeforeEvaluationBatch& before_each = {});
  // The logits of the token behind these, by as many of the last as a sequence has; the same on all ranks.
  std::vector<float> next_logits(const std::vector<int32_t>& tokens, const BeforeEvaluationBatch& before_each = {});

  int64_t tokens_per_step() const { return config_.training.global_batch_size * config_.data.sequence_length; }

 private:
  struct UnfinishedStep {
    StepReport report;  // without what the device still computes
    PendingStep result;
    std::optional<PendingTelemetry> telemetry;
    std::unique_ptr<Mark> end;
    std::vector<PendingComparison> comparisons;
    std::unique_ptr<HostRead> replicas;  // hashes of this step's result, where ranks compare them
  };
  void start_loader(DataPosition position);
  int64_t micro_batches_per_step() const { return config_.micro_batches_per_step(communicator_.size()); }
  int64_t count_targets(const MicroBatch& first);
  Model::Batch on_host(const MicroBatch& batch, int64_t done) const;
  void end_step(StepReport report, bool with_telemetry, std::vector<PendingComparison> comparisons);
  bool finishes_early() const;
  // Fills in what is known of an update before it is made.
  void describe_update(StepReport& report) const;
  BeforeUpdate before_update() const;
  PendingStep queue_update(StepReport& report);
  // With optimizer.release_gradients, before the step's gradients are queued.
  void release_update(StepReport& report);

  // integrity of a step: training_checks.cpp
  void watch_state();
  void queue_replayed(const Model::Batch& batch, const Model::LossOptions& options,
                      const ParameterExchange::Place& place, bool with_telemetry,
                      std::vector<PendingComparison>& comparisons);
  void queue_hashed(IntegrityChecks::Table table, const Model::Batch& batch, const Model::LossOptions& options,
                    const ParameterExchange::Place& place, bool with_telemetry);
  bool state_is_watched_at(int64_t step) const;
  // Takes weights from a checkpoint, with what its `adapters` add to them.
  enum class Weights : uint8_t { kOfModel, kAdded };  // added: adapters or a side network
  void read_weights(const LoadedCheckpoint& checkpoint, Weights which, const CheckpointAdapters& adapters = {});
  // Refuses a checkpoint whose `saved` method of fine-tuning, other than ours, cannot be gone on from.
  void check_without_side(const LoadedCheckpoint& checkpoint, FinetuneMethod saved) const;
  // Refuses one whose adapters or side network are others than ours.
  void check_same_added(const LoadedCheckpoint& checkpoint, const FinetuneConfig& saved) const;
  // Takes the base of a checkpoint of adapters or of a side network, and these.
  void continue_added(const LoadedCheckpoint& checkpoint, const FinetuneConfig& saved);
  // From here on frozen weights are not saved, for they are in the checkpoint that describe_base() has described.
  void use_base(json base);
  NamedTensor weight_tensor(size_t i) const;
  PendingComparison compare_state() const;
  void after_update(UnfinishedStep& step);
  void compare_replicas(const void* hashes, int64_t step);

  // snapshots: training_snapshot.cpp
  json saved_state() const;
  std::vector<HostTensor> saved_pieces(std::vector<TensorView>& parts) const;
  std::string name_in_step(const std::string& tensor) const;
  void check_data(const LoadedCheckpoint& checkpoint, const SavedProgress& progress);
  void restore_base(const LoadedCheckpoint& checkpoint);
  // Returns which states begin at zero.
  std::vector<std::string> read_tensors(const LoadedCheckpoint& checkpoint, bool converts_states);
  void stage(CheckpointContents& contents, const std::vector<TensorView>& parts);
  BeforeEvaluationBatch evaluation_batch(const BeforeEvaluationBatch& before_each);
  void draw_weights(const std::vector<size_t>& parameters);  // a heartbeat()
  // The elements of a weight that this rank sets: its own, or all of one that is coded.
  ElementRange set_range(size_t i) const;
  // Sets elements `first` and following of those. Coded weights are encoded by end_weight(), after the last.
  void set_weight(size_t i, std::span<const float> values, int64_t first = 0);
  void end_weight(size_t i);
  void copy_weight(size_t from, size_t to);

  Config config_;
  Device& device_;
  Communicator& communicator_;
  Zero zero_;
  TokenFiles data_;
  uint64_t data_fingerprint_;  // as read at the start: a save depends on no file of the data
  json data_files_;            // see describe_files()
  DeclaredRun declared_;
  Arena arena_;
  BoundRun bound_;
  std::unique_ptr<BatchLoader> loader_;
  double data_wait_told_ = 0;  // of the loader's wait_seconds(), what steps have reported
  DataPosition position_;      // of the next one, or past the end of the epoch
  int64_t completed_steps_ = 0;
  int64_t applied_steps_ = 0;  // updates done: what bias correction counts
  int64_t skipped_in_a_row_ = 0;
  double last_norm_ = 0;  // of the newest finished step
  SpikeGuard spikes_;
  std::optional<UnfinishedStep> unfinished_;
  std::unique_ptr<Mark> step_began_;  // where the oldest unfinished step begins
  std::chrono::steady_clock::time_point step_began_at_;
  std::string place_;
  json base_;                 // describe_base() of the checkpoint that frozen weights are in; null: they are saved
  int64_t hashed_step_ = -1;  // after whose update Table::kUpdated was taken, to be compared
  std::unique_ptr<StagingBuffer> staging_;
  std::vector<size_t>
      last_staged_;  // by parameter: the last of its tensors in the buffer; empty: nothing is staged
};

}  // namespace parka
