#include "kernels/ops/elementwise/activation.h"

#include "kernels/op/check.h"
#include "kernels/op/cost.h"
#include "kernels/op/dispatch.h"

namespace parka {

void activation_forward(Device& device, const ActivationForward& a) {
  const int64_t T = a.x.dim[0], F = a.x.dim[1];
  check_tensor("activation_forward", "x", a.x, {T, F}, {DType::kF32, DType::kBF16});
  check_tensor("activation_forward", "y", a.y, {T, F}, {a.x.dtype});
  if (a.x.numel() == 0) return;
  PARKA_DISPATCH(activation_forward, device, a);
}

void activation_backward(Device& device, const ActivationBackward& a) {
  const int64_t T = a.x.dim[0], F = a.x.dim[1];
  check_tensor("activation_backward", "x", a.x, {T, F}, {DType::kF32, DType::kBF16});
  check_tensor("activation_backward", "d_y", a.d_y, {T, F}, {a.x.dtype});
  check_tensor("activation_backward", "d_x", a.d_x, {T, F}, {a.x.dtype});
  if (a.x.numel() == 0) return;
  PARKA_DISPATCH(activation_backward, device, a);
}

OpCost cost_of(const ActivationForward& a) { return moved(all_bytes(a.x, a.y), a.x); }

OpCost cost_of(const ActivationBackward& a) { return moved(all_bytes(a.x, a.d_y, a.d_x), a.x); }

}  // namespace parka
