#include "kernels/ops/attention/rope_projection.h"

#include "kernels/op/check.h"
#include "kernels/op/cost.h"
#include "kernels/op/dispatch.h"

namespace parka {

void rope_projection(Device& device, const RopeProjection& a) {
  const TensorView &out = a.projection.out, &qkv = a.rope.qkv;
  if (qkv.empty() || out.data != qkv.data || out.dtype != qkv.dtype || a.projection.accumulate ||
      a.rope.saved.empty()) {
    throw_internal("rope_projection: the projection is to leave its output, {}, for rope to save", describe(out));
  }
  if (!suits_one_kernel(a)) {
    run_as_two(device, a);
    return;
  }
  check_gemm(a.projection);
  check_rope_forward(a.rope);
  if (qkv.numel() == 0) return;
  record_product(device, a.projection);
  PARKA_DISPATCH(rope_projection, device, a);
}

OpCost cost_of(const RopeProjection& a) {
  OpCost cost = cost_of(a.projection);
  // The projection is neither written nor read.
  cost.bytes += cost_of(a.rope).bytes - 2 * bytes_of(a.projection.out);
  return cost;
}
int64_t workspace_of(const RopeProjection& a) { return workspace_of(a.projection); }

bool suits_one_kernel(const RopeProjection& a) {
  const ScaledView& saved = a.rope.saved;
  return suits_float8_tiles(a.projection) && saved.data.dtype == DType::kE4M3 && saved.scaling == Scaling::kGroup;
}

bool runs_as_one(const Device& device, const RopeProjection& a) {
  return suits_one_kernel(a) && device.fuses(RopeProjection::kName, a.projection.out.numel());
}

void run_as_two(Device& device, const RopeProjection& a) {
  gemm(device, a.projection);
  rope_forward(device, a.rope);
}

}  // namespace parka
