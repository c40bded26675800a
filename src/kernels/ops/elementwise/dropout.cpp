#include "kernels/ops/elementwise/dropout.h"

#include "kernels/op/check.h"
#include "kernels/op/cost.h"
#include "kernels/op/dispatch.h"

namespace parka {

void dropout(Device& device, const Dropout& a) {
  check_tensor("dropout", "x", a.x, {a.x.dim[0], a.x.dim[1]}, {DType::kF32, DType::kBF16});
  check_tensor("dropout", "y", a.y, {a.x.dim[0], a.x.dim[1]}, {a.x.dtype});
  check_tensor("dropout", "position", a.position, {3}, {DType::kI32});
  if (!(a.probability >= 0 && a.probability < 1)) {
    throw_internal("dropout: probability is {}, and 0 <= p < 1 is wanted", a.probability);
  }
  if (a.sequence_length < 1) throw_internal("dropout: sequence_length is {}", a.sequence_length);
  if (a.x.numel() == 0) return;
  PARKA_DISPATCH(dropout, device, a);
}

OpCost cost_of(const Dropout& a) { return moved(bytes_of(a.x) + (a.accumulate ? 2 : 1) * bytes_of(a.y), a.x); }

}  // namespace parka
