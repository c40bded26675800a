#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "core/memory_plan.h"
#include "core/parameter.h"
#include "kernels/arena.h"
#include "optim/optimizer_config.h"

namespace parka {

// A tensor on the device under the name that a checkpoint gives it.
struct NamedTensor {
  std::string name;
  TensorView view;
};

// AdamW over all parameter tensors: owns masters and moments, and the gradients' accumulators.
class Optimizer {
 public:
  // Declares gradients (category "gradients"), masters ("master weights") and moments ("optimizer states") in the plan.
  // `compute` is the dtype of the weights the model computes with. Throws Error(kBadInput) when config.master does not
  // fit it: none needs fp32 weights, all other forms bf16.
  Optimizer(const OptimizerConfig& config, DType compute, std::vector<ParameterInfo> parameters, MemoryPlan& plan);

  // Takes the tensors from the arena; `weights[i]` is what the model computes with for parameters[i].
  void bind(const Arena& arena, std::vector<TensorView> weights);

  // Sets parameter i from fp32 values on the host: compute weight and master, by the master form.
  // (kBf16Sr: rounded to nearest.)
  void set_weight(Device& device, size_t i, const std::vector<float>& values);
  // The exact master value of parameter i as fp32.
  std::vector<float> master_weight(Device& device, size_t i) const;

  const std::vector<TensorView>& gradients() const { return gradients_; }
  void zero_gradients(Device& device);

  struct StepResult {
    double grad_norm;    // global L2 norm before clipping; NaN or Inf if a gradient is
    bool applied;        // false: the gradients were not finite and nothing was changed
    std::string culprit; // first parameter whose gradient is not finite; empty otherwise
  };
  // One update with learning rate `lr`; `step` counts from 1 and drives bias correction and stochastic rounding.
  // Clips to clip_limit(step). A non-finite gradient leaves weights and states as they are.
  StepResult step(Device& device, int64_t step, double lr, uint64_t seed);

  // The largest global norm allowed at `step` (clip warm-up included); infinity when clipping is off.
  double clip_limit(int64_t step) const;

  // Masters and moments, for the checkpoint: "<parameter>.master", ".exp_avg", ".exp_avg.amax", ".exp_avg.exponent",
  // ".exp_avg_sq"...; only those that the formats need.
  std::vector<NamedTensor> state() const;

  const std::vector<ParameterInfo>& parameters() const { return parameters_; }

 private:
  struct StateIds;  // see optimizer.cpp
  OptimizerConfig config_;
  DType compute_;
  std::vector<ParameterInfo> parameters_;
  std::vector<TensorView> weights_, gradients_;
};

// Learning rate at `step` (1 is the first update) of a run of `training_steps`, with OLMo's definitions:
// coat-style warm-up lr * (start + (1 - start) * min(s, W) / W) for s < W; then with x = (s - W) / (S - W)
// cosine, linear, wsd or constant down to final_fraction * lr; docs in optimizer_config.h.
double learning_rate(const OptimizerConfig& config, int64_t training_steps, int64_t step);

}  // namespace parka
