#include "kernels/ops/cross_entropy.h"

#include "kernels/op/check.h"
#include "kernels/op/cost.h"
#include "kernels/op/dispatch.h"

namespace parka {

void cross_entropy(Device& device, const CrossEntropy& a) {
  const int64_t T = a.logits.dim[0], V = a.logits.dim[1] - a.padding;
  PARKA_REQUIRE(a.padding >= 0);
  check_tensor("cross_entropy", "logits", a.logits, {T, V + a.padding}, {DType::kF32, DType::kBF16});
  check_tensor("cross_entropy", "targets", a.targets, {T}, {DType::kI32});
  check_tensor("cross_entropy", "loss", a.loss, {T}, {DType::kF32});
  if (!a.z_loss_value.empty()) check_tensor("cross_entropy", "z_loss_value", a.z_loss_value, {T}, {DType::kF32});
  if (!a.grad_factor.empty()) check_tensor("cross_entropy", "grad_factor", a.grad_factor, {1}, {DType::kF32});
  if (T == 0) return;
  if (V <= 0) throw_internal("cross_entropy: logits is {}, wanted at least one column", describe(a.logits));
  PARKA_DISPATCH(cross_entropy, device, a);
}

OpCost cost_of(const CrossEntropy& a) {
  return moved((a.write_gradient ? 2 : 1) * bytes_of(a.logits) + all_bytes(a.targets, a.loss, a.z_loss_value),
               a.logits);
}
// The losses where no gradient is wanted.
TensorView output_of(const CrossEntropy& a) { return a.write_gradient ? a.logits : a.loss; }

}  // namespace parka
