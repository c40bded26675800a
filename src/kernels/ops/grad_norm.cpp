#include "kernels/ops/grad_norm.h"

#include "kernels/backend.h"
#include "kernels/check.h"
#include "kernels/cpu/grad_norm.h"

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

}  // namespace parka
