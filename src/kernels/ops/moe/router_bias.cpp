#include "kernels/ops/moe/router_bias.h"

#include "kernels/op/define.h"

namespace parka {

void move_router_bias(Device& device, const MoveRouterBias& a) {
  constexpr std::string_view kOp = "move_router_bias";
  const int64_t E = a.bias.numel();
  check_tensor(kOp, "bias", a.bias, {E}, {DType::kF32});
  check_tensor(kOp, "coefficient", a.coefficient, {1}, {DType::kF32});
  check_tensor(kOp, "load", a.load, {a.load.numel()}, {DType::kF32});
  if (a.load.numel() < E) throw_internal("{}: load is {}, wanted {} numbers or more", kOp, describe(a.load), E);
  if (E == 0) return;
  PARKA_DISPATCH(move_router_bias, device, a);
}

OpCost cost_of(const MoveRouterBias& a) { return moved(3.0 * bytes_of(a.bias), a.bias); }

}  // namespace parka
