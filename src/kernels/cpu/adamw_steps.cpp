#include "kernels/ops/adamw_steps.h"

namespace parka::cpu {

void adamw_steps(Device& device, const AdamwSteps& a) {
  for (const AdamwStep& step : a.steps) cpu::adamw_step(device, step);
}

}  // namespace parka::cpu
