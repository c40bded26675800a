#include "kernels/ops/swiglu/swiglu_projection.h"

#include <algorithm>

#include "kernels/device/product_recorder.h"
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
    gemm(device, a.projection);
    swiglu_forward(device, a.swiglu);
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
TensorView output_of(const SwigluProjection& a) { return output_of(a.swiglu); }
int64_t workspace_of(const SwigluProjection& a) {
  return std::max(workspace_of(a.projection), workspace_of(a.swiglu));
}

bool suits_one_kernel(const SwigluProjection& a) {
  const Gemm& p = a.projection;
  const ScaledView& up_gate = a.swiglu.up_gate;
  const auto is_operand = [](const ScaledView& x) {
    return x.scaling == Scaling::kTensor && x.data.dtype == DType::kE4M3;
  };
  return is_operand(p.a) && is_operand(p.b) && suits_cublaslt(p) && accumulates_fast(p) &&
         p.out.dtype == DType::kBF16 && up_gate.data.dtype == DType::kE4M3 && up_gate.scaling == Scaling::kGroup;
}

bool has_one_kernel(Device& device, const SwigluProjection& a) {
  if (!suits_one_kernel(a)) return false;
#ifdef PARKA_CUDA
  if (device.kind() == DeviceKind::kCuda) return cuda::has_one_kernel(device, a);
#endif
  return device.kind() == DeviceKind::kCpu;
}

std::string key_of(const SwigluProjection& a) {
  return fmt::format("{}, swiglu per 1x{}", key_of(a.projection), a.swiglu.up_gate.group);
}

bool chooses_one_kernel(Device& device, const SwigluProjection& a) {
  if (!suits_one_kernel(a)) return false;
  if (auto* recorder = dynamic_cast<ProductRecorder*>(device.op_recorder())) recorder->record_projection(a);
  return device.fuses(key_of(a));
}

}  // namespace parka
