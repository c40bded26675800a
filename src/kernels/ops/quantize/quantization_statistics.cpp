#include "kernels/ops/quantize/quantization_statistics.h"

#include <algorithm>
#include <cmath>

#include "kernels/op/define.h"
#include "kernels/op/workspace.h"

namespace parka {

// No early return for no elements: all totals are 0 then, and the caller reads them.
void quantization_statistics(Device& device, const QuantizationStatistics& a) {
  constexpr std::string_view kOp = "quantization_statistics";
  const int64_t rows = a.q.num_rows(), cols = a.q.num_cols();
  check_matrix(kOp, "q", a.q, rows, cols);
  if (a.q.scaling == Scaling::kNone) throw_internal("{}: q is {}, wanted fp8", kOp, describe(a.q));
  const int64_t x_cols = a.x.rank == 2 ? std::max(a.x.dim[1], cols) : cols;
  check_tensor(kOp, "x", a.x, {rows, x_cols}, {DType::kF32, DType::kBF16});
  check_tensor(kOp, "totals", a.totals, {QuantizationTotals::kCount}, {DType::kF32});
  PARKA_DISPATCH(quantization_statistics, device, a);
}

float saturation_threshold(DType format) {
  const Float8Traits& traits = float8_traits(format);
  const float last_place = std::ldexp(1.0f, std::ilogb(traits.max) - traits.mantissa_bits);
  return traits.max + 0.5f * last_place;
}

void moment_statistics(Device& device, const MomentStatistics& a) {
  constexpr std::string_view kOp = "moment_statistics";
  const int64_t groups = ceil_div(a.moment.values.numel(), kMomentGroup);
  check_tensor(kOp, "exponents of the moment", a.moment.exponent, {groups}, {DType::kU8});
  check_tensor(kOp, "amax of the moment", a.moment.amax, {groups}, {DType::kF32});
  check_tensor(kOp, "counts", a.counts, {kNumMomentExponents}, {DType::kI32});
  check_tensor(kOp, "amax", a.amax, {2}, {DType::kF32});
  PARKA_DISPATCH(moment_statistics, device, a);
}

OpCost cost_of(const QuantizationStatistics& a) {
  const double read = static_cast<double>(a.q.data.numel() * size_of(a.x.dtype));
  return moved(read + all_bytes(a.q, a.totals), a.q.data);
}
int64_t workspace_of(const QuantizationStatistics&) { return cuda::kStatisticsWorkspaceBytes; }

OpCost cost_of(const MomentStatistics& a) {
  return moved(all_bytes(a.moment.amax, a.moment.exponent, a.counts, a.amax), a.moment.amax);
}

}  // namespace parka
