#include "kernels/ops/adamw_steps.h"

#include <tuple>

#include "kernels/op/check.h"
#include "kernels/op/cost.h"
#include "kernels/op/dispatch.h"

namespace parka {
namespace {

// All that steps taken together have in common.
auto common_of(const AdamwStep& a) {
  const auto format = [](const MomentView& m) { return std::tuple(m.values.dtype, m.exponent.empty()); };
  return std::tuple(a.master_form, a.gradient.dtype, format(a.exp_avg), format(a.exp_avg_sq), a.beta1, a.beta2,
                    a.eps, a.bias_correction1, a.bias_correction2, a.grad_scale.data, a.seed, a.step);
}

}  // namespace

void adamw_steps(Device& device, const AdamwSteps& a) {
  for (const AdamwStep& step : a.steps) {
    check_adamw_step(step);
    if (common_of(step) != common_of(a.steps[0])) {
      throw_internal("adamw_steps: steps of {} and {} differ in more than tensors, lr and weight_decay",
                     describe(a.steps[0].weight), describe(step.weight));
    }
    PARKA_REQUIRE(step.weight.numel() > 0);
  }
  if (a.steps.empty()) return;
  PARKA_DISPATCH(adamw_steps, device, a);
}

OpCost cost_of(const AdamwSteps& a) {
  OpCost cost;
  for (const AdamwStep& step : a.steps) cost.bytes += cost_of(step).bytes;
  cost.shape = fmt::format("{} tensors", a.steps.size());
  return cost;
}
TensorView output_of(const AdamwSteps& a) { return a.steps.back().weight; }

}  // namespace parka
