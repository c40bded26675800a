#include "kernels/ops/elementwise/pool_channels.h"

#include "core/error.h"
#include "kernels/op/check.h"
#include "kernels/op/cost.h"
#include "kernels/op/dispatch.h"

namespace parka {

void pool_channels(Device& device, const PoolChannels& a) {
  const int64_t T = a.x.dim[0], C = a.x.dim[1], s = a.out.dim[1];
  check_tensor("pool_channels", "x", a.x, {T, C}, {DType::kF32, DType::kBF16});
  check_tensor("pool_channels", "out", a.out, {T, s}, {a.x.dtype});
  PARKA_REQUIRE(a.group >= 1 && ceil_div(C, a.group) <= s);
  if (a.out.numel() == 0) return;
  PARKA_DISPATCH(pool_channels, device, a);
}

OpCost cost_of(const PoolChannels& a) { return moved(all_bytes(a.x, a.out), a.x); }

}  // namespace parka
