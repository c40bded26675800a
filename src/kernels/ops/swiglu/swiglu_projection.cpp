#include "kernels/ops/swiglu/swiglu_projection.h"

#include <algorithm>

#include "kernels/op/check.h"
#include "kernels/op/cost.h"
#include "kernels/op/dispatch.h"

namespace parka {

void swiglu_projection(Device& device, const SwigluProjection& a) {
  const TensorView &out = a.projection.out, &plain = a.swiglu.up_gate_plain;
  if (plain.empty() || out.data != plain.data || out.dtype != plain.dtype || a.projection.accumulate) {
    throw_internal("swiglu_projection: the projection is to leave its output, {}, for swiglu", describe(out));
  }
  if (!suits_one_kernel(a)) {
    run_as_two(device, a);
    return;
  }
  check_gemm(a.projection);
  check_swiglu_forward(a.swiglu);
  if (a.swiglu.product.num_rows() == 0 || a.swiglu.product.num_cols() == 0) return;
  record_product(device, a.projection);
  PARKA_DISPATCH(swiglu_projection, device, a);
}

OpCost cost_of(const SwigluProjection& a) {
  OpCost cost = cost_of(a.projection);
  // The projection is neither written nor read.
  cost.bytes += cost_of(a.swiglu).bytes - 2 * bytes_of(a.projection.out);
  return cost;
}
int64_t workspace_of(const SwigluProjection& a) {
  return std::max(workspace_of(a.projection), workspace_of(a.swiglu));
}

bool suits_one_kernel(const SwigluProjection& a) {
  const ScaledView& up_gate = a.swiglu.up_gate;
  return suits_float8_tiles(a.projection) && up_gate.data.dtype == DType::kE4M3 &&
         up_gate.scaling == Scaling::kGroup;
}

bool runs_as_one(const Device& device, const SwigluProjection& a) {
  return suits_one_kernel(a) && device.fuses(SwigluProjection::kName, a.projection.out.numel());
}

void run_as_two(Device& device, const SwigluProjection& a) {
  gemm(device, a.projection);
  swiglu_forward(device, a.swiglu);
}

}  // namespace parka
