#include "kernels/ops/optimizer/adamw.h"

#include <algorithm>
#include <cmath>

#include "kernels/op/define.h"
#include "kernels/ops/optimizer/step_tensors.h"

namespace parka {

void check_moment(std::string_view op, std::string_view name, const MomentView& moment, int64_t N) {
  check_tensor(op, name, moment.values, {N}, {DType::kF32, DType::kBF16, DType::kE4M3});
  const int64_t groups = ceil_div(N, kMomentGroup);
  const std::string amax = fmt::format("amax of {}", name), exponent = fmt::format("exponent of {}", name);
  if (is_float8(moment.values.dtype)) {
    check_tensor(op, amax, moment.amax, {groups}, {DType::kF32});
    if (!moment.exponent.empty()) check_tensor(op, exponent, moment.exponent, {groups}, {DType::kU8});
  } else if (!moment.amax.empty() || !moment.exponent.empty()) {
    throw_internal("{}: {} is {} and has no groups, but amax is {} and exponent is {}", op, name,
                   describe(moment.values), describe(moment.amax), describe(moment.exponent));
  }
}

void check_weights(std::string_view op, const SteppedWeights& a, int64_t N) {
  const DType weight = a.master_form == MasterForm::kNone ? DType::kF32 : DType::kBF16;
  check_tensor(op, "weight", a.weight, {N}, {weight});
  if (!a.weight_amax.empty()) check_tensor(op, "weight_amax", a.weight_amax, {1}, {DType::kF32});
  PARKA_REQUIRE(a.first_element % kMomentGroup == 0);
  switch (a.master_form) {
    case MasterForm::kFp32: check_tensor(op, "master", a.master, {N}, {DType::kU16}); return;
    case MasterForm::kFp24Split: check_tensor(op, "master", a.master, {N}, {DType::kU8}); return;
    case MasterForm::kBf16Sr:
    case MasterForm::kNone:
      if (!a.master.empty()) throw_internal("{}: master is {}, wanted none", op, describe(a.master));
      return;
  }
}

double bytes_of(const MomentView& m) { return all_bytes(m.values, m.amax, m.exponent); }

void adamw_step(Device& device, const AdamwStep& a) {
  const int64_t N = a.weight.numel();
  check_weights("adamw_step", SteppedWeights(a), N);
  check_tensor("adamw_step", "gradient", a.gradient, {N}, {DType::kF32, DType::kBF16});
  check_moment("adamw_step", "exp_avg", a.exp_avg, N);
  check_moment("adamw_step", "exp_avg_sq", a.exp_avg_sq, N);
  PARKA_REQUIRE(a.exp_avg.values.dtype == a.exp_avg_sq.values.dtype);  // no config asks for others
  check_tensor("adamw_step", "grad_scale", a.grad_scale, {1}, {DType::kF32});
  PARKA_REQUIRE(a.bias_correction1 > 0 && a.bias_correction2 > 0);
  if (N == 0) return;
  PARKA_DISPATCH(adamw_step, device, a);
}

void moment_encode(Device& device, const MomentEncode& a) {
  const int64_t N = a.values.numel();
  check_tensor("moment_encode", "values", a.values, {N}, {DType::kF32});
  check_moment("moment_encode", "moment", a.moment, N);
  if (N == 0) return;
  PARKA_DISPATCH(moment_encode, device, a);
}

void moment_decode(Device& device, const MomentDecode& a) {
  const int64_t N = a.moment.values.numel();
  check_moment("moment_decode", "moment", a.moment, N);
  check_tensor("moment_decode", "values", a.values, {N}, {DType::kF32});
  if (N == 0) return;
  PARKA_DISPATCH(moment_decode, device, a);
}

uint8_t range_expansion_exponent(float amax, float amin) {
  if (amax <= amin || amin <= 0) return 16;
  constexpr double kRange = double{kE4M3Traits.max} * kE4M3Traits.max / 2;
  // A ratio rounded to fp32 would fall on the other side of an integer now and then.
  const double group_range = std::log2(double{amax} / amin);
  return static_cast<uint8_t>(std::clamp(std::floor(16 * std::log2(kRange) / group_range), 16.0, 255.0));
}

OpCost cost_of(const AdamwStep& a) {
  return moved(2 * all_bytes(a.weight, a.master) + bytes_of(a.gradient) + 2 * bytes_of(a.exp_avg) +
                   2 * bytes_of(a.exp_avg_sq),
               a.weight);
}

OpCost cost_of(const MomentEncode& a) { return moved(bytes_of(a.values) + bytes_of(a.moment), a.values); }

OpCost cost_of(const MomentDecode& a) { return moved(bytes_of(a.values) + bytes_of(a.moment), a.values); }

}  // namespace parka
