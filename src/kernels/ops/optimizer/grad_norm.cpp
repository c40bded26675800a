#include "kernels/ops/optimizer/grad_norm.h"

#include <utility>

#include "kernels/op/define.h"
#include "kernels/op/workspace.h"

namespace parka {

// No early return for no elements: a sum over nothing is 0, and the caller reads it.
void sum_of_squares(Device& device, const SumOfSquares& a) {
  for (size_t i = 0; i < a.parts.size(); ++i) {
    const TensorView flat = a.parts[i].reshaped({a.parts[i].numel()});
    check_tensor("sum_of_squares", fmt::format("parts[{}]", i), flat, {flat.dim[0]}, {DType::kF32, DType::kBF16});
  }
  check_tensor("sum_of_squares", "partial", a.partial, {static_cast<int64_t>(a.parts.size())}, {DType::kF32});
  check_tensor("sum_of_squares", "result", a.result, {1}, {DType::kF32});
  PARKA_DISPATCH(sum_of_squares, device, a);
}

void clip_coefficient(Device& device, const ClipCoefficient& a) {
  for (const auto& [name, tensor] : {std::pair("sum_of_squares", a.sum_of_squares), std::pair("loss", a.loss),
                                     std::pair("coefficient", a.coefficient)}) {
    check_tensor("clip_coefficient", name, tensor, {1}, {DType::kF32});
  }
  if (!a.clipped_squares.empty()) {
    check_tensor("clip_coefficient", "clipped_squares", a.clipped_squares, {1}, {DType::kF32});
  }
  PARKA_REQUIRE(a.max_norm > 0);
  PARKA_DISPATCH(clip_coefficient, device, a);
}

void add_sum(Device& device, const AddSum& a) {
  const TensorView flat = a.x.reshaped({a.x.numel()});
  check_tensor("add_sum", "x", flat, {flat.dim[0]}, {DType::kF32});
  check_tensor("add_sum", "total", a.total, {1}, {DType::kF32});
  if (flat.dim[0] == 0) return;
  PARKA_DISPATCH(add_sum, device, a);
}

OpCost cost_of(const SumOfSquares& a) {
  OpCost cost;
  for (const TensorView& part : a.parts) cost.bytes += bytes_of(part);
  cost.shape = fmt::format("{} tensors", a.parts.size());
  return cost;
}
int64_t workspace_of(const SumOfSquares& a) {
  int64_t pieces = 0;
  for (const TensorView& part : a.parts) pieces += cuda::sum_of_squares_pieces(part.numel());
  return cuda::sum_of_squares_workspace_bytes(pieces, static_cast<int64_t>(a.parts.size()));
}

OpCost cost_of(const ClipCoefficient& a) { return moved(0.0, a.coefficient); }

OpCost cost_of(const AddSum& a) { return moved(bytes_of(a.x), a.x); }

}  // namespace parka
