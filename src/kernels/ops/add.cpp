#include "kernels/ops/add.h"

#include "kernels/backend.h"
#include "kernels/check.h"
#include "kernels/cpu/add.h"
#include "kernels/cuda/elementwise/add.h"

namespace parka {

void add(Device& device, const Add& a) {
  check_tensor("add", "x", a.x, {a.x.numel()}, {DType::kF32, DType::kBF16});
  check_tensor("add", "total", a.total, {a.x.numel()}, {a.x.dtype});
  if (a.x.numel() == 0) return;
  PARKA_DISPATCH(add, device, a);
}

}  // namespace parka
