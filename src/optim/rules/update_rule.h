#pragma once
#include <algorithm>
#include <array>
#include <cstdint>
#include <string_view>
#include <vector>

#include "core/parameter.h"
#include "core/tensor.h"
#include "kernels/device/device.h"
#include "kernels/ops/optimizer/adamw.h"
#include "optim/optimizer_config.h"

namespace parka {

// How a parameter is updated. A rule says what it keeps of each element between steps, and queues a step; the
// optimizer owns the tensors. docs/extending.md says what a new one touches.
enum class UpdateRule : uint8_t { kAdamw, kMuon };
UpdateRule rule_of(const OptimizerConfig& config, const ParameterInfo& parameter);

// A number that a rule keeps of each element, beside the weight and its master.
struct StateKind {
  std::string_view name;  // checkpoints have it as "<parameter>.<name>"
  DType format;
  bool is_second = false;  // no value but 0 is stored as 0 (MomentEncode)
};
inline constexpr size_t kMostStates = 2;
// At most kMostStates, in the order of ParameterState::states.
std::vector<StateKind> state_kinds(const OptimizerConfig& config, UpdateRule rule);
inline constexpr UpdateRule kUpdateRules[] = {UpdateRule::kAdamw, UpdateRule::kMuon};

// What the update of a parameter reads and writes beside its gradient; flat, of all or some of its elements.
struct ParameterState {
  TensorView weight;
  TensorView master;                                // empty where the master form needs none
  std::array<MomentView, kMostStates> states = {};  // empty where the rule has fewer

  // Elements [begin, begin + count). `begin` is a multiple of kMomentGroup.
  ParameterState part(int64_t begin, int64_t count) const;
  int64_t numel() const { return std::max(weight.numel(), states[0].values.numel()); }
  // Calls `visit(tensor, group)` for each tensor, with the number of elements that an entry of it stands for.
  template <typename Visit>
  void visit(const Visit& visit) {
    visit(weight, 1);
    visit(master, 1);
    for (MomentView& state : states) {
      visit(state.values, 1);
      visit(state.amax, kMomentGroup);
      visit(state.exponent, kMomentGroup);
    }
  }
};

// One update of all parameters: `step` counts from 1 and drives bias correction and stochastic rounding.
struct Update {
  int64_t step;
  double lr;
  uint64_t seed;
};

// The update of elements `first` and following of what a rank has of a parameter.
struct RuleStep {
  const OptimizerConfig& config;
  const ParameterInfo& parameter;
  const Update& update;
  int64_t first;
  ParameterState part;
  TensorView gradient;     // of these elements
  TensorView grad_scale;   // [1] fp32; not finite: nothing is changed
  TensorView weight_amax;  // [1] fp32, or empty

  // The place of these elements in the flat parameter space.
  uint64_t first_element() const {
    return static_cast<uint64_t>(parameter.first_element + parameter.own_elements().begin + first);
  }
};
void adamw(Device& device, const RuleStep& step);
// Muon (optim/rules/muon.h) takes two steps. The first makes the momentum and its direction, [elements] bf16, of
// which `part` needs the states alone; the second adds the orthogonalized direction, and takes no gradient.
void muon_momentum(Device& device, const RuleStep& step, const TensorView& direction);
void muon(Device& device, const RuleStep& step, const TensorView& direction);

// 1 - beta^step, exact to double rounding for any step: neither beta near 1 nor a large step cancels.
double bias_correction(double beta, int64_t step);

}  // namespace parka
