#include "kernels/ops/elementwise/cross_entropy.h"

#include "kernels/op/define.h"
#include "kernels/op/workspace.h"

namespace parka {
namespace {

bool has_codes(const CrossEntropy& a) { return !a.d_logits.empty() || !a.d_logits_t.empty(); }

void check_codes(const CrossEntropy& a, int64_t rows, int64_t cols) {
  const auto check_one = [](std::string_view name, const ScaledView& t, int64_t t_rows, int64_t t_cols) {
    if (t.empty()) return;
    check_matrix("cross_entropy", name, t, t_rows, t_cols);
    if (t.scaling == Scaling::kNone) throw_internal("cross_entropy: {} is {}, wanted fp8", name, describe(t));
  };
  check_one("d_logits", a.d_logits, rows, cols);
  check_one("d_logits_t", a.d_logits_t, cols, rows);
  check_shared_scale("cross_entropy", a.d_logits, a.d_logits_t);
  PARKA_REQUIRE(!has_codes(a) || a.write_gradient);
  if (a.d_logits.empty() || a.d_logits_t.empty()) return;
  PARKA_REQUIRE(a.d_logits.data.dtype == a.d_logits_t.data.dtype && a.d_logits.scaling == a.d_logits_t.scaling);
}

}  // namespace

void cross_entropy(Device& device, const CrossEntropy& a) {
  const int64_t T = a.logits.dim[0], V = a.logits.dim[1] - a.padding;
  PARKA_REQUIRE(a.padding >= 0);
  check_tensor("cross_entropy", "logits", a.logits, {T, V + a.padding}, {DType::kF32, DType::kBF16});
  check_tensor("cross_entropy", "targets", a.targets, {T}, {DType::kI32});
  check_tensor("cross_entropy", "loss", a.loss, {T}, {DType::kF32});
  if (!a.z_loss_value.empty()) check_tensor("cross_entropy", "z_loss_value", a.z_loss_value, {T}, {DType::kF32});
  if (!a.grad_factor.empty()) check_tensor("cross_entropy", "grad_factor", a.grad_factor, {1}, {DType::kF32});
  check_codes(a, T, V + a.padding);
  if (T == 0) return;
  if (V <= 0) throw_internal("cross_entropy: logits is {}, wanted at least one column", describe(a.logits));
  PARKA_DISPATCH(cross_entropy, device, a);
}

OpCost cost_of(const CrossEntropy& a) {
  const bool overwrites = a.write_gradient && !has_codes(a);
  return moved((overwrites ? 2 : 1) * bytes_of(a.logits) +
                   all_bytes(a.targets, a.loss, a.z_loss_value, a.d_logits, a.d_logits_t),
               a.logits);
}
int64_t workspace_of(const CrossEntropy& a) {
  return has_codes(a) ? cuda::cross_entropy_workspace_bytes(a.logits.dim[0]) : 0;
}

}  // namespace parka
