#include "kernels/ops/amax.h"

#include "kernels/backend.h"
#include "kernels/check.h"
#include "kernels/cpu/amax.h"
#include "kernels/cuda/quantize/amax.h"

namespace parka {

void amax(Device& device, const Amax& a) {
  const TensorView flat = a.x.reshaped({a.x.numel()});
  check_tensor("amax", "x", flat, {flat.dim[0]}, {DType::kF32, DType::kBF16});
  check_tensor("amax", "result", a.result, {1}, {DType::kF32});
  if (flat.dim[0] == 0) return;
  PARKA_DISPATCH(amax, device, a);
}

}  // namespace parka
