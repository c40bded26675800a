#include "kernels/ops/elementwise/side_network.h"

#include "core/error.h"
#include "kernels/op/define.h"
#include "kernels/op/workspace.h"

namespace parka {

void mix_forward(Device& device, const MixForward& a) {
  const int64_t T = a.x.dim[0], C = a.x.dim[1];
  check_tensor("mix_forward", "x", a.x, {T, C}, {DType::kF32, DType::kBF16});
  check_tensor("mix_forward", "c", a.c, {1}, {a.x.dtype});
  check_tensor("mix_forward", "residual", a.residual, {T, C}, {a.x.dtype});
  if (!a.branch.empty()) check_tensor("mix_forward", "branch", a.branch, {T, C}, {a.x.dtype});
  check_tensor("mix_forward", "out", a.out, {T, C}, {a.x.dtype});
  if (!a.difference.empty()) check_tensor("mix_forward", "difference", a.difference, {T, C}, {a.x.dtype});
  if (a.x.numel() == 0) return;
  PARKA_DISPATCH(mix_forward, device, a);
}

void mix_backward(Device& device, const MixBackward& a) {
  const int64_t T = a.d_out.dim[0], C = a.d_out.dim[1];
  check_tensor("mix_backward", "d_out", a.d_out, {T, C}, {DType::kF32, DType::kBF16});
  check_tensor("mix_backward", "c", a.c, {1}, {a.d_out.dtype});
  check_tensor("mix_backward", "difference", a.difference, {T, C}, {a.d_out.dtype});
  if (!a.d_x.empty()) check_tensor("mix_backward", "d_x", a.d_x, {T, C}, {a.d_out.dtype});
  if (!a.d_y.empty()) check_tensor("mix_backward", "d_y", a.d_y, {T, C}, {a.d_out.dtype});
  if (!a.d_c.empty()) check_tensor("mix_backward", "d_c", a.d_c, {1}, {DType::kF32, DType::kBF16});
  if (a.d_out.numel() == 0) return;
  PARKA_DISPATCH(mix_backward, device, a);
}

OpCost cost_of(const MixForward& a) {
  return moved(all_bytes(a.c, a.x, a.residual, a.branch, a.out, a.difference), a.x);
}

OpCost cost_of(const MixBackward& a) {
  return moved(all_bytes(a.c, a.difference, a.d_out, a.d_x, a.d_y) + 2 * bytes_of(a.d_c), a.d_out);
}
int64_t workspace_of(const MixBackward& a) {
  return a.d_c.empty() ? 0 : cuda::mix_backward_workspace_bytes(a.d_out.numel());
}

void pool_channels(Device& device, const PoolChannels& a) {
  const int64_t T = a.x.dim[0], C = a.x.dim[1], s = a.out.dim[1];
  check_tensor("pool_channels", "x", a.x, {T, C}, {DType::kF32, DType::kBF16});
  check_tensor("pool_channels", "out", a.out, {T, s}, {a.x.dtype});
  PARKA_REQUIRE(a.group >= 1 && ceil_div(C, a.group) <= s);
  if (a.out.numel() == 0) return;
  PARKA_DISPATCH(pool_channels, device, a);
}

OpCost cost_of(const PoolChannels& a) { return moved(all_bytes(a.x, a.out), a.x); }

}  // namespace parka
