#include "core/tensor.h"

#include <fmt/ranges.h>

#include <span>

namespace parka {

TensorView::TensorView(void* data_, DType dtype_, std::initializer_list<int64_t> shape)
    : data(data_), dtype(dtype_), rank(static_cast<int>(shape.size())) {
  PARKA_REQUIRE(shape.size() >= 1 && shape.size() <= kMaxRank);
  int i = 0;
  for (int64_t extent : shape) {
    PARKA_REQUIRE(extent >= 0);
    dim[i++] = extent;
  }
}

int64_t TensorView::numel() const {
  if (rank == 0) return 0;
  int64_t n = 1;
  for (int i = 0; i < rank; ++i) n *= dim[i];
  return n;
}

void TensorView::throw_wrong_dtype(DType read_as) const {
  throw_internal("tensor is {}, read as {}", name_of(dtype), name_of(read_as));
}

TensorView TensorView::rows(int64_t begin, int64_t count) const {
  PARKA_REQUIRE(rank >= 1 && begin >= 0 && count >= 0 && begin + count <= dim[0]);
  TensorView part = *this;
  const int64_t row_bytes = dim[0] == 0 ? 0 : bytes() / dim[0];
  part.data = static_cast<std::byte*>(data) + begin * row_bytes;
  part.dim[0] = count;
  return part;
}

TensorView TensorView::reshaped(std::initializer_list<int64_t> shape) const {
  TensorView other(data, dtype, shape);
  PARKA_REQUIRE(other.numel() == numel());
  return other;
}

std::string describe(const TensorView& t) {
  if (t.empty()) return "no tensor";
  return fmt::format("{} [{}]", name_of(t.dtype), fmt::join(std::span(t.dim.data(), t.rank), ", "));
}

std::string describe(const ScaledView& t) {
  switch (t.scaling) {
    case Scaling::kNone: return describe(t.data);
    case Scaling::kTensor: return describe(t.data) + ", one scale";
    case Scaling::kGroup:
      return fmt::format("{}, {} scale per 1x{}", describe(t.data), name_of(t.scale.dtype), t.group);
    case Scaling::kBlock: return fmt::format("{}, one scale per {}x{}", describe(t.data), t.group, t.group);
  }
  throw_internal("unknown scaling");
}

std::array<int64_t, 2> scale_shape(Scaling scaling, int64_t group, int64_t rows, int64_t cols) {
  PARKA_REQUIRE(group > 0 || scaling == Scaling::kNone || scaling == Scaling::kTensor);
  switch (scaling) {
    case Scaling::kNone: return {0, 0};
    case Scaling::kTensor: return {1, 1};
    case Scaling::kGroup: return {rows, ceil_div(cols, group)};
    case Scaling::kBlock: return {ceil_div(rows, group), ceil_div(cols, group)};
  }
  throw_internal("unknown scaling");
}

}  // namespace parka
