#include "kernels/ops/gemm/int8.h"

#include <algorithm>

#include "kernels/op/define.h"

namespace parka {
namespace {

void check_rows(std::string_view op, const char* name, const ScaledView& t, int64_t rows, int64_t cols) {
  check_tensor(op, name, t.data, {rows, cols}, {DType::kI8});
  check_tensor(op, fmt::format("{}.scale", name), t.scale, {rows, 1}, {DType::kF32});
  if (t.scaling != Scaling::kGroup || t.group != cols) {
    throw_internal("{}: {} is {}: wanted a scale for each row", op, name, describe(t));
  }
}

}  // namespace

int64_t rotation_width(int64_t cols) { return std::min<int64_t>(cols & -cols, 64); }

void quantize_int8(Device& device, const QuantizeInt8& a) {
  const int64_t R = a.x.dim[0], K = a.x.dim[1];
  check_tensor("quantize_int8", "x", a.x, {R, K}, {DType::kF32, DType::kBF16});
  check_rows("quantize_int8", "out", a.out, R, K);
  if (a.x.numel() == 0) return;
  PARKA_DISPATCH(quantize_int8, device, a);
}

void gemm_int8(Device& device, const GemmInt8& a) {
  const int64_t M = a.out.dim[0], N = a.out.dim[1], K = a.a.data.dim[1];
  check_tensor("gemm_int8", "out", a.out, {M, N}, {DType::kF32, DType::kBF16});
  check_rows("gemm_int8", "a", a.a, M, K);
  check_rows("gemm_int8", "b", a.b, N, K);
  if (K < 1 || K > kMostInt8Terms) throw_internal("gemm_int8: sums of {} products: 1 to {} fit", K, kMostInt8Terms);
  if (a.out.numel() == 0) return;
  if (!device.has_int8_products()) {
    throw_bad_input(
        "precision.forward_format = int8: its products are for GPUs of compute capability 9.0, H100 and H200, and this is "
        "{}; set it to e4m3",
        device.name());
  }
  PARKA_DISPATCH(gemm_int8, device, a);
}

// The largest magnitude of a row is known only when all of it has been seen.
OpCost cost_of(const QuantizeInt8& a) { return moved(bytes_of(a.x) + all_bytes(a.x, a.out), a.x); }

OpCost cost_of(const GemmInt8& a) {
  const int64_t M = a.out.dim[0], N = a.out.dim[1], K = a.a.data.dim[1];
  return {all_bytes(a.a, a.b) + (a.accumulate ? 2 : 1) * bytes_of(a.out),
          2.0 * static_cast<double>(M) * static_cast<double>(N) * static_cast<double>(K),
          fmt::format("{} x {} x {} int8 NN {}{}", M, N, K, name_of(a.out.dtype), a.accumulate ? kOntoOutput : ""),
          Products::kGemm};
}

}  // namespace parka
