#include "kernels/ops/elementwise/pointwise.h"

#include "kernels/op/define.h"
#include "kernels/op/workspace.h"

namespace parka {

void add(Device& device, const Add& a) {
  check_tensor("add", "x", a.x, {a.x.numel()}, {DType::kF32, DType::kBF16});
  check_tensor("add", "total", a.total, {a.x.numel()}, {a.x.dtype});
  if (a.x.numel() == 0) return;
  PARKA_DISPATCH(add, device, a);
}

OpCost cost_of(const Add& a) { return moved(bytes_of(a.x) + 2 * bytes_of(a.total), a.x); }

void add_columns(Device& device, const AddColumns& a) {
  const int64_t R = a.x.dim[0], N = a.x.dim[1];
  check_tensor("add_columns", "x", a.x, {R, N}, {DType::kF32, DType::kBF16});
  check_tensor("add_columns", "y", a.y, {R, N}, {a.x.dtype});
  if (a.x.numel() == 0) return;
  PARKA_DISPATCH(add_columns, device, a);
}

OpCost cost_of(const AddColumns& a) { return moved(bytes_of(a.x) + (a.accumulate ? 2 : 1) * bytes_of(a.y), a.x); }

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

void dropout(Device& device, const Dropout& a) {
  check_tensor("dropout", "x", a.x, {a.x.dim[0], a.x.dim[1]}, {DType::kF32, DType::kBF16});
  check_tensor("dropout", "y", a.y, {a.x.dim[0], a.x.dim[1]}, {a.x.dtype});
  check_tensor("dropout", "position", a.position, {3}, {DType::kI32});
  if (!(a.probability >= 0 && a.probability < 1)) {
    throw_internal("dropout: probability is {}, and 0 <= p < 1 is wanted", a.probability);
  }
  if (a.sequence_length < 1) throw_internal("dropout: sequence_length is {}", a.sequence_length);
  if (a.x.numel() == 0) return;
  PARKA_DISPATCH(dropout, device, a);
}

OpCost cost_of(const Dropout& a) { return moved(bytes_of(a.x) + (a.accumulate ? 2 : 1) * bytes_of(a.y), a.x); }

}  // namespace parka
