#include "kernels/op/define.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

namespace parka {

void check_tensor(std::string_view op, std::string_view name, const TensorView& t,
                  std::initializer_list<int64_t> shape, std::initializer_list<DType> dtypes) {
  const bool same_shape =
      t.rank == static_cast<int>(shape.size()) && std::equal(shape.begin(), shape.end(), t.dim.begin());
  const bool has_memory = !t.empty() || t.numel() == 0;
  if (!same_shape || !has_memory) {
    throw_internal("{}: {} is {}, wanted shape [{}]", op, name, describe(t), fmt::join(shape, ", "));
  }
  if (std::ranges::find(dtypes, t.dtype) == dtypes.end()) {
    std::string wanted;
    for (DType dtype : dtypes) wanted += (wanted.empty() ? "" : " or ") + std::string(name_of(dtype));
    throw_internal("{}: {} is {}, wanted {}", op, name, describe(t), wanted);
  }
}

void check_matrix(std::string_view op, std::string_view name, const ScaledView& t, int64_t rows, int64_t cols) {
  if (t.scaling == Scaling::kNone) {
    check_tensor(op, name, t.data, {rows, cols}, {DType::kF32, DType::kBF16});
    return;
  }
  check_tensor(op, name, t.data, {rows, cols}, {DType::kE4M3, DType::kE5M2});
  if (t.scaling == Scaling::kTensor) {
    check_tensor(op, fmt::format("scale of {}", name), t.scale, {1}, {DType::kF32});
    return;
  }
  if (t.group <= 0) throw_internal("{}: {} has group size {}", op, name, t.group);
  const auto shape = scale_shape(t.scaling, t.group, rows, cols);
  if (t.scaling == Scaling::kGroup) {
    check_tensor(op, fmt::format("scale of {}", name), t.scale, {shape[0], shape[1]}, {DType::kF32, DType::kBF16});
  } else {
    check_tensor(op, fmt::format("scale of {}", name), t.scale, {shape[0], shape[1]}, {DType::kF32});
  }
}

void check_shared_scale(std::string_view op, const ScaledView& t, const ScaledView& t_transposed) {
  if (t.empty() || t_transposed.empty()) return;
  if (t.scaling != Scaling::kTensor || t_transposed.scaling != Scaling::kTensor) return;
  if (t.scale.data != t_transposed.scale.data || t.data.dtype != t_transposed.data.dtype) {
    throw_internal("{}: the row-major and the transposed output must have one dtype and share one scale", op);
  }
}

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
