#include "kernels/ops/quantize/amax.h"

#include "kernels/op/check.h"
#include "kernels/op/cost.h"
#include "kernels/op/dispatch.h"

namespace parka {

void amax(Device& device, const Amax& a) {
  const TensorView flat = a.x.reshaped({a.x.numel()});
  check_tensor("amax", "x", flat, {flat.dim[0]}, {DType::kF32, DType::kBF16});
  check_tensor("amax", "result", a.result, {1}, {DType::kF32});
  if (flat.dim[0] == 0) return;
  PARKA_DISPATCH(amax, device, a);
}

OpCost cost_of(const Amax& a) { return moved(bytes_of(a.x), a.x); }

}  // namespace parka
