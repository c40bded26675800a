#pragma once
#include <vector>

#include "kernels/op/op.h"
#include "kernels/ops/adamw.h"

namespace parka {

// The steps of several tensors, with the bits of an adamw_step of each, in any order. They differ in tensors, lr,
// weight_decay and first_element alone. A GPU takes them together where moments are fp8 with range expansion: small
// tensors take far less time so.
struct AdamwSteps {
  std::vector<AdamwStep> steps;
};
PARKA_OP(adamw_steps, AdamwSteps);

// The checks of adamw_step.
void check_adamw_step(const AdamwStep& a);

}  // namespace parka
