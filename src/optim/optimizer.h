#pragma once
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/memory/memory_plan.h"
#include "core/memory/unit_buffers.h"
#include "core/parameter.h"
#include "kernels/device/arena.h"
#include "optim/optimizer_config.h"
#include "optim/rules/muon.h"
#include "optim/rules/update_rule.h"
#include "optim/state_stream.h"

namespace parka {

// Categories of the memory plan.
inline constexpr const char *kGradientCategory = "gradients", *kMasterCategory = "master weights",
                            *kStateCategory = "optimizer states", *kStreamCategory = "buffers for host memory";

// A tensor on the device under the name that a checkpoint gives it.
struct NamedTensor {
  std::string name;
  TensorView view;
  std::vector<int64_t> shape = {};  // of the whole tensor
  ElementBox box = {};              // the part of it that `view` is
  size_t parameter = 0;             // whose update changes it
};

// The result of one optimizer step.
struct StepResult {
  std::vector<float> sums;  // Optimizer::step_sums()
  double grad_norm;         // global L2 norm before clipping; NaN or Inf if a gradient is
  bool applied;         // false: nothing was changed, for loss or gradients were not finite, or beyond StepLimits
  std::string culprit;  // first parameter whose gradient is not finite; empty otherwise
};

// A step whose loss or gradients are beyond these changes nothing.
struct StepLimits {
  double loss = std::numeric_limits<double>::infinity();       // the first of Optimizer::step_sums()
  double grad_norm = std::numeric_limits<double>::infinity();  // before clipping
};

// The result of a queued step, on its way to the host.
class PendingStep {
 public:
  PendingStep(std::unique_ptr<HostRead> scalars, const std::vector<ParameterInfo>& parameters, int64_t num_sums)
      : scalars_(std::move(scalars)), parameters_(&parameters), num_sums_(num_sums) {}
  bool ready() const { return scalars_->ready(); }
  // Waits for the step and for nothing queued after it.
  StepResult wait() const;

 private:
  std::unique_ptr<HostRead> scalars_;  // as Optimizer lays them out
  const std::vector<ParameterInfo>* parameters_;
  int64_t num_sums_;
};

// Updates the parameter tensors that are trained, each by its rule: owns masters and states, and the gradients'
// accumulators. If ZeRO divides states over ranks, it updates this rank's piece of each tensor, and if it divides
// gradients it keeps this rank's pieces of the accumulators, and buffers for the whole gradients of the units that
// backward is at. With config.release_gradients there are these buffers alone. Order of use: construct,
// plan.finish(), make an Arena, bind(), set_weight() of each parameter or restore the weights and state() from a
// checkpoint; then any number of begin_step(), gradients filled by the model, and the parts of an update below.
// With config.release_gradients the middle parts follow the gradients of one unit after the other.
class Optimizer {
 public:
  // Declares gradients (category "gradients"), masters ("master weights") and moments ("optimizer states") in the
  // plan, and the few bytes in which sums() and gradient norm are taken ("step scalars"). `compute` is the dtype of
  // the weights the model computes with. Throws Error(kBadInput) when config.master does not fit it: none needs
  // fp32 weights, all other forms bf16. `is_alone`: the run has one rank. With config.offload masters and moments
  // of matrices are in host memory, and there are buffers ("buffers for host memory") through which they pass,
  // `part_elements` of a parameter at a time. Weights that are in host memory, too (Placement::memory), pass
  // with them. What updates need beside these is alive in `update_phases`. `num_sums`: Model::num_sums().
  Optimizer(const OptimizerConfig& config, DType compute, std::vector<ParameterInfo> parameters, MemoryPlan& plan,
            bool is_alone = false, int64_t part_elements = StateStream::kPartElements,
            PhaseMask update_phases = kAllPhases, int64_t num_sums = 1);
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;

  // Takes the tensors from the arena; `weights[i]` is this rank's elements of what the model computes with for
  // parameters[i], in any shape; empty for coded ones (ParameterInfo::base). `weight_amax` [number of parameters]
  // fp32: where step() leaves the largest magnitude of each of them; empty: not wanted.
  void bind(const Arena& arena, std::vector<TensorView> weights, const TensorView& weight_amax = {});

  // Sets elements `first` and following of this rank's own_elements() of parameter i from fp32 values on the host:
  // compute weight and master, by the master form. (kFp24Split and kBf16Sr: rounded to nearest.) A frozen one has
  // no master.
  void set_weight(Device& device, size_t i, std::span<const float> values, int64_t first = 0);
  // Sets parameter `to` from parameter `from`, of as many elements, within the device.
  void copy_weight(Device& device, size_t from, size_t to);

  // The model accumulates gradients in these, in the order of the parameters, [rows, cols] each; empty for frozen
  // ones. If gradients are divided or released, these are buffers for one micro-batch.
  const std::vector<TensorView>& gradients() const { return gradients_; }
  // True if units share them (core/memory/unit_buffers.h).
  bool shares_gradient_buffers() const { return releases_gradients() || shards_gradients_; }
  // Which of kGradientBuffers has that of parameter i then.
  size_t gradient_buffer(size_t i) const;
  // True if ranks keep pieces of them.
  bool shards_gradients() const { return shards_gradients_; }
  bool releases_gradients() const { return config_.release_gradients; }

  // ---- For those who reduce gradients over ranks ----

  // A parameter's gradient as its pieces for all ranks, flat, and this rank's piece as the update reads it. With
  // divided states alone, and where gradients are released, it lies in `whole`, which lies in a buffer with
  // shares_gradient_buffers().
  struct GradientPieces {
    TensorView whole, own;
  };
  const GradientPieces& gradient_pieces(size_t i) const { return gradient_pieces_.at(i); }
  // Before the gradient of parameter i is written anew: makes its padding zeros, which the sum of squares reads and
  // no op writes. The gradient itself need not be cleared.
  void open_gradient(Device& device, size_t i) const;

  // ---- The step ----

  // [num_sums] fp32, to which micro-batches add: first the loss, which an update needs to be finite.
  const TensorView& sums() const { return releases_gradients() ? own_sums_ : sums_; }
  // Before the first micro-batch of a step, which overwrites the gradients: clears sums(), and opens the gradients
  // that this rank keeps whole.
  void begin_step(Device& device) const;

  // The parts of an update, in this order. In a run of several ranks the caller sums over them what it is given
  // (ParameterExchange). Gradients are scaled by min(1, clip_limit(step) / (norm + 1e-6)), as in OLMo and PyTorch.
  // A loss or a gradient that is not finite, gradients whose sum of squares exceeds fp32, and what is beyond
  // `limits` leave weights and states as they are. With config.release_gradients the middle three are called for
  // one unit after the other, as its gradients are complete: the norm of the step before gives the clipping
  // coefficient, and a unit and those after it in the step are left as they are if the loss, the unit's gradient or
  // that of a unit before it is not finite; those updated before it stay updated.
  //
  // 1. States in host memory begin to come in. step_sums() are then this rank's.
  void begin_update(Device& device);
  // [num_sums] fp32: sums() of the step, which are to be the sums over all ranks before queue_coefficient().
  const TensorView& step_sums() const { return sums_; }
  // [1] fp32: what gradients are multiplied by, after queue_coefficient(); NaN: the step is skipped.
  const TensorView& coefficient() const { return clip_coefficient_; }
  // 2. Queues the sums of squares of the gradients, of all units or of one. Returns those that are to be replaced
  // by their sums over the ranks that share the states; an empty view where none do.
  static constexpr int kAllUnits = -1;
  TensorView queue_squares(Device& device, int unit = kAllUnits);
  // 3. Queues the clipping coefficient.
  void queue_coefficient(Device& device, int64_t step, const StepLimits& limits, int unit = kAllUnits);
  // 4. For each of groups(), or each of the unit: queues the directions of parameters whose matrices are
  // orthogonalized, ...
  void queue_directions(Device& device, const Update& update, const UpdateGroup& group);
  // ... which go to the ranks that own them, a block of each row for each rank, ...
  MatrixUpdates::Directions directions(const UpdateGroup& group) const { return matrices_.directions(group); }
  // ... are orthogonalized there, ...
  void orthogonalize(Device& device, const UpdateGroup& group) {
    matrices_.orthogonalize(device, group);
    matrices_.measure(device, group, is_first_of_experts_);
  }
  // ... and come back; then the update of this rank's part of each parameter.
  void queue_update(Device& device, const Update& update, const UpdateGroup& group);
  const std::vector<UpdateGroup>& groups() const { return groups_; }
  // For telemetry of these updates. Its sums are to be replaced by sum_of_pieces() where ranks share the states.
  MatrixUpdates& matrices() { return matrices_; }
  const MatrixUpdates& matrices() const { return matrices_; }
  bool shares_states() const { return shares_states_; }
  // 5. The optimizer must outlive the result.
  PendingStep end_step(Device& device);
  // The global norm of the newest step, which gives the coefficient of the next: 0, which clips nothing, of a run
  // without a step.
  void set_last_norm(Device& device, double norm) const;

  // The largest global norm allowed at `step`: 10 clip_norm while step <= clip_warmup_steps, then clip_norm;
  // infinity when clipping is off. It is the limit of this very step: OLMo's own trainer refreshes its limit after
  // clipping, so that its warm-up starts and ends one step late.
  double clip_limit(int64_t step) const;

  // Masters and states, for the checkpoint: "<parameter>.master", and of each StateKind ".exp_avg",
  // ".exp_avg.amax", ".exp_avg.exponent"; only those that the formats need, flat [numel] or [ceil(numel / 128)]
  // each, or this rank's part of them. With the weights themselves, which all forms but fp32 need too, they
  // are all that step() depends on.
  std::vector<NamedTensor> state() const;

  // The kinds of states of parameter i, none of a frozen one, and each as it is stored.
  const std::vector<StateKind>& kinds(size_t i) const { return kinds_.at(i); }
  const MomentView& state(size_t i, size_t kind) const { return states_.at(i).states.at(kind); }

  const std::vector<ParameterInfo>& parameters() const { return parameters_; }
  const OptimizerConfig& config() const { return config_; }

 private:
  struct MomentIds {
    TensorId values, amax, exponent;
  };
  struct StateIds {
    TensorId gradient, master;
    std::array<MomentIds, kMostStates> states;
  };
  // Clears the maxima of weights that a step updates, of parameters [begin, end).
  void clear_amax(Device& device, size_t begin, size_t end) const;
  // The parameters of a unit, or all: [begin, end).
  std::pair<size_t, size_t> range_of(int unit) const;
  MomentIds declare_state(const ParameterInfo& parameter, const StateKind& kind, MemoryPlan& plan) const;
  void declare_gradients(MemoryPlan& plan);
  void declare_gradient_buffers(MemoryPlan& plan);
  void declare_stream_buffers(MemoryPlan& plan);
  size_t num_stream_buffers() const;
  MemoryPlace state_place(const ParameterInfo& parameter) const;
  // The entries of the stream: of each parameter what its update takes, and after those of all parameters what
  // its direction takes.
  std::unique_ptr<StateStream> make_stream(const Arena& arena) const;
  std::vector<size_t> stream_order() const;
  // Calls step(RuleStep) for this rank's elements of parameter i, part after part where they pass through buffers.
  template <typename Step>
  void for_each_part(const Update& update, size_t i, bool is_direction, const Step& step);
  TensorId declare_master(const ParameterInfo& parameter, MemoryPlan& plan) const;

  OptimizerConfig config_;
  DType compute_;
  bool is_alone_;
  bool shares_states_ = false, shards_gradients_ = false;  // any of them
  bool is_first_of_experts_ = true;                        // of the ranks that divide the experts
  std::vector<ParameterInfo> parameters_;
  int64_t part_elements_, num_sums_;
  std::vector<std::vector<StateKind>> kinds_;
  std::vector<StateIds> ids_;
  TensorId scalars_id_;
  TensorId buffer_ids_[kGradientBuffers];  // with shares_gradient_buffers()
  std::vector<int64_t> buffer_offsets_;    // of each parameter's gradient in its buffer, in elements
  TensorView weight_amax_;
  std::vector<TensorView> gradients_;
  std::vector<GradientPieces> gradient_pieces_;
  std::vector<ParameterState> states_;  // this rank's, flat
  std::vector<TensorId> slot_ids_;      // none where nothing is in host memory
  MatrixUpdates matrices_;
  std::vector<UpdateGroup> groups_;
  std::unique_ptr<StateStream> stream_;  // null where nothing is in host memory
  // fp32: the sum of squares of each gradient (0 of frozen parameters), then that of all, the clipping coefficient
  // and step_sums(). If gradients are released, there follow the squares of the step before, those of a unit, and
  // this rank's sums().
  TensorView scalars_;
  TensorView squares_, total_squares_, clip_coefficient_, sums_;  // parts of scalars_
  TensorView last_squares_, unit_squares_, own_sums_;
};

// Learning rate at `step` (1 is the first update) of a run of `training_steps`, with OLMo's definitions. With
// W = warmup_steps, S = total_steps (training_steps if 0) and F = final_fraction:
//   step < W:    lr * (warmup_start + (1 - warmup_start) * step / W)       all kinds, even where W > S
//   constant:    lr
//   step >= S:   lr * F
//   cosine:      lr * (F + (1 - F) * (1 + cos(pi x)) / 2)                  x = (step - W) / (S - W)
//   linear:      lr * (1 - (1 - F) * x)
//   wsd:         lr until step S - decay_steps (S / 10 if 0; not before W), then in a straight line to lr * F at S
double learning_rate(const OptimizerConfig& config, int64_t training_steps, int64_t step);

}  // namespace parka
