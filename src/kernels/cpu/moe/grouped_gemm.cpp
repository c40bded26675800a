#include "kernels/ops/moe/grouped_gemm.h"

#include "kernels/cpu/codec.h"
#include "kernels/device/device.h"
#include "kernels/ops/gemm/gemm.h"

namespace parka::cpu {
namespace {

// Rows of a matrix with one scale, or with the `n`-th of its scales.
ScaledView rows_of(const ScaledView& x, int64_t begin, int64_t count, int64_t n = 0) {
  return {x.data.rows(begin, count), x.scaling == Scaling::kNone ? TensorView() : x.scale.rows(n, 1), x.scaling};
}

// Calls f(e, first row, number of rows) for each expert.
template <typename F>
void for_each_expert(const TensorView& offsets, const TensorView& counts, const F& f) {
  for (int64_t e = 0; e < counts.numel(); ++e) f(e, offsets.as<int32_t>()[e], counts.as<int32_t>()[e]);
}

}  // namespace

// Each expert's product is one of gemm(), whose sums depend on its shape alone.
void grouped_gemm(Device& device, const GroupedGemm& a) {
  const GroupedShape s = shape_of(a);
  const int64_t b_rows = a.b_transposed ? s.depth : s.cols;
  device.fill_zero(a.out.data, a.out.bytes());
  for_each_expert(a.offsets, a.counts, [&](int64_t e, int64_t begin, int64_t count) {
    if (count == 0 || s.depth == 0) return;
    cpu::gemm(device, {.a = rows_of(a.a, begin, count),
                       .b = rows_of(a.b, e * b_rows, b_rows, e),
                       .b_transposed = a.b_transposed,
                       .out = a.out.rows(begin, count)});
  });
}

// The summed axis of codes, R, is across rows: an expert's part of them is decoded rows without their other ends.
void grouped_weight_gradient(Device& device, const GroupedWeightGradient& a) {
  const GroupedShape s = shape_of(a);
  const bool coded = a.d_y.scaling != Scaling::kNone;
  const Matrix d_y = coded ? decode_codes(a.d_y.data) : Matrix(0, 0);
  const Matrix x = coded ? decode_codes(a.x.data) : Matrix(0, 0);
  const auto part = [&](const Matrix& codes, int64_t begin) {
    return TensorView(const_cast<float*>(codes.data()) + begin, DType::kF32, {codes.rows(), codes.cols()});
  };
  for_each_expert(a.offsets, a.counts, [&](int64_t e, int64_t begin, int64_t count) {
    Gemm product{.a = {}, .b = {}, .out = a.out.rows(e * s.cols, s.cols), .accumulate = a.accumulate};
    if (count == 0) {
      if (!a.accumulate) device.fill_zero(product.out.data, product.out.bytes());
      return;
    }
    if (coded) {
      product.a = part(d_y, begin);
      product.b = part(x, begin);
      product.a_padding = product.b_padding = s.rows - count;
      product.factor = a.d_y.scale.as<float>()[0] * a.x.scale.as<float>()[0];
    } else {
      product.a = rows_of(a.d_y, begin, count);
      product.b = rows_of(a.x, begin, count);
      product.a_transposed = product.b_transposed = true;
    }
    cpu::gemm(device, product);
  });
}

}  // namespace parka::cpu
