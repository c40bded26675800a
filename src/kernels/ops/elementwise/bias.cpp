#include "kernels/ops/elementwise/bias.h"

#include "kernels/op/check.h"
#include "kernels/op/cost.h"
#include "kernels/op/dispatch.h"
#include "kernels/op/workspace.h"

namespace parka {

void bias_forward(Device& device, const BiasForward& a) {
  const int64_t T = a.x.dim[0], N = a.x.dim[1];
  check_tensor("bias_forward", "x", a.x, {T, N}, {DType::kF32, DType::kBF16});
  check_tensor("bias_forward", "bias", a.bias, {N}, {a.x.dtype});
  if (a.x.numel() == 0) return;
  PARKA_DISPATCH(bias_forward, device, a);
}

void bias_backward(Device& device, const BiasBackward& a) {
  const int64_t T = a.d_y.dim[0], N = a.d_y.dim[1];
  check_tensor("bias_backward", "d_y", a.d_y, {T, N}, {DType::kF32, DType::kBF16});
  check_tensor("bias_backward", "d_bias", a.d_bias, {N}, {DType::kF32, DType::kBF16});
  if (a.d_y.numel() == 0) return;
  PARKA_DISPATCH(bias_backward, device, a);
}

OpCost cost_of(const BiasForward& a) { return moved(bytes_of(a.bias) + 2 * bytes_of(a.x), a.x); }

OpCost cost_of(const BiasBackward& a) { return moved(bytes_of(a.d_y) + 2 * bytes_of(a.d_bias), a.d_y); }
int64_t workspace_of(const BiasBackward& a) {
  return cuda::bias_backward_workspace_bytes(a.d_y.dim[0], a.d_y.dim[1]);
}

}  // namespace parka
