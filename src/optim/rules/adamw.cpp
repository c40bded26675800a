#include <cmath>

#include "core/error.h"
#include "optim/rules/update_rule.h"

namespace parka {

void adamw(Device& device, const RuleStep& s) {
  const OptimizerConfig& c = s.config;
  adamw_step(device, {.weight = s.part.weight,
                      .master = s.part.master,
                      .master_form = c.master,
                      .gradient = s.gradient,
                      .exp_avg = s.part.states[0],
                      .exp_avg_sq = s.part.states[1],
                      .lr = static_cast<float>(s.update.lr * s.parameter.lr_factor),
                      .beta1 = c.beta1,
                      .beta2 = c.beta2,
                      .eps = static_cast<float>(c.eps),
                      .weight_decay = s.parameter.decayed ? static_cast<float>(c.weight_decay) : 0.0f,
                      .bias_correction1 = static_cast<float>(bias_correction(c.beta1, s.update.step)),
                      .bias_correction2 = static_cast<float>(bias_correction(c.beta2, s.update.step)),
                      .grad_scale = s.grad_scale,
                      .weight_amax = s.weight_amax,
                      .seed = s.update.seed,
                      .step = static_cast<uint64_t>(s.update.step),
                      .first_element = s.first_element()});
}

double bias_correction(double beta, int64_t step) {
  PARKA_REQUIRE(beta >= 0 && beta < 1 && step >= 1);
  return -std::expm1(static_cast<double>(step) * std::log(beta));
}

}  // namespace parka
