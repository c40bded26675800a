#include "kernels/ops/elementwise/add.h"

#include "kernels/op/check.h"
#include "kernels/op/cost.h"
#include "kernels/op/dispatch.h"

namespace parka {

void add(Device& device, const Add& a) {
  check_tensor("add", "x", a.x, {a.x.numel()}, {DType::kF32, DType::kBF16});
  check_tensor("add", "total", a.total, {a.x.numel()}, {a.x.dtype});
  if (a.x.numel() == 0) return;
  PARKA_DISPATCH(add, device, a);
}

OpCost cost_of(const Add& a) { return moved(bytes_of(a.x) + 2 * bytes_of(a.total), a.x); }

}  // namespace parka
