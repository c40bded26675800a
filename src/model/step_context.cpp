#include "model/step_context.h"

#include "core/error.h"

namespace parka {

TensorView StepContext::tensor(TensorId id, int64_t rows, int64_t cols) const {
  if (!id.valid()) return {};
  const TensorView whole = arena[id];
  PARKA_REQUIRE(rows * cols <= whole.numel());
  return {whole.data, whole.dtype, {rows, cols}};
}

TensorView StepContext::vector(TensorId id, int64_t count) const {
  if (!id.valid()) return {};
  const TensorView whole = arena[id];
  PARKA_REQUIRE(count <= whole.numel());
  return {whole.data, whole.dtype, {count}};
}

void StepContext::clear_padding(const TensorView& t) const {
  if (shape.padding == 0) return;
  const TensorView rows = t.rows(shape.num_sequence_tokens(), shape.padding);
  device.fill_zero(rows.data, rows.bytes());
}

TensorView StepContext::gradient_to_add_to(int weight) const {
  if (weight < 0) return {};
  const TensorView& g = gradient(weight);
  if (g.empty()) return {};
  if (!adds_to_gradients()) device.fill_zero(g.data, g.bytes());
  return g.dim[0] == 1 || g.dim[1] == 1 ? g.reshaped({g.numel()}) : g;
}

}  // namespace parka
