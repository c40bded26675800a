#include "kernels/op/cost.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace parka {

double bytes_of(const TensorView& t) { return t.empty() ? 0.0 : static_cast<double>(t.bytes()); }
double bytes_of(const ScaledView& t) { return bytes_of(t.data) + bytes_of(t.scale); }

std::string shape_of(const TensorView& t) {
  return fmt::format("{}", fmt::join(t.dim.begin(), t.dim.begin() + t.rank, " x "));
}

bool read_twice(const ScaledView& out, const ScaledView& out_t) {
  return (out.empty() ? out_t : out).scaling == Scaling::kTensor;
}

bool has_tensor_scale(const ScaledView& t) { return !t.empty() && t.scaling == Scaling::kTensor; }

OpCost moved(double bytes, const TensorView& shape) { return {bytes, 0.0, shape_of(shape)}; }

}  // namespace parka
