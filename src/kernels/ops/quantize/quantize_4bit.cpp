#include "kernels/ops/quantize/quantize_4bit.h"

#include <bit>

#include "kernels/op/define.h"

namespace parka {
namespace {

void check_block_size(std::string_view op, int64_t size) {
  if (size >= kSmallestBlock4Bit && size <= kLargestBlock4Bit && std::has_single_bit(static_cast<uint64_t>(size))) {
    return;
  }
  throw_internal("{}: block_size is {}: a power of two from {} to {} is wanted", op, size, kSmallestBlock4Bit,
                 kLargestBlock4Bit);
}

// Scales in 8 bits of P tensors; returns P.
int64_t check_nested(std::string_view op, const TensorView& map, const TensorView& nested_absmax,
                     const TensorView& offset, int64_t blocks) {
  const int64_t P = offset.numel();
  check_tensor(op, "map", map, {static_cast<int64_t>(DynamicMap().size())}, {DType::kF32});
  check_tensor(op, "offset", offset, {P}, {DType::kF32});
  if (P < 1 || P > kMostTensors4Bit || blocks % P != 0) {
    throw_internal("{}: offset is {}, and {} blocks are wanted of as many tensors, at most {}", op,
                   describe(offset), blocks, kMostTensors4Bit);
  }
  check_tensor(op, "nested_absmax", nested_absmax, {P * ceil_div(blocks / P, kNestedBlock)}, {DType::kF32});
  return P;
}

}  // namespace

void quantize_4bit(Device& device, const Quantize4Bit& a) {
  const int64_t N = a.x.numel();
  check_block_size("quantize_4bit", a.block_size);
  check_tensor("quantize_4bit", "x", a.x, {N}, {DType::kF32, DType::kBF16});
  check_tensor("quantize_4bit", "codes", a.codes, {ceil_div(N, 2)}, {DType::kU8});
  check_tensor("quantize_4bit", "absmax", a.absmax, {ceil_div(N, a.block_size)}, {DType::kF32});
  if (N == 0) return;
  PARKA_DISPATCH(quantize_4bit, device, a);
}

void quantize_absmax(Device& device, const QuantizeAbsmax& a) {
  const int64_t B = a.absmax.numel();
  check_tensor("quantize_absmax", "absmax", a.absmax, {B}, {DType::kF32});
  check_tensor("quantize_absmax", "codes", a.codes, {B}, {DType::kU8});
  check_nested("quantize_absmax", a.map, a.nested_absmax, a.offset, B);
  if (B == 0) return;
  PARKA_DISPATCH(quantize_absmax, device, a);
}

void dequantize_4bit(Device& device, const Dequantize4Bit& a) {
  const int64_t N = a.out.numel(), B = ceil_div(N, a.block_size);
  check_block_size("dequantize_4bit", a.block_size);
  check_tensor("dequantize_4bit", "codes", a.codes, {ceil_div(N, 2)}, {DType::kU8});
  check_tensor("dequantize_4bit", "absmax", a.absmax, {B}, {DType::kF32, DType::kU8});
  if (a.absmax.dtype == DType::kU8) {
    const int64_t P = check_nested("dequantize_4bit", a.map, a.nested_absmax, a.offset, B);
    if (P > 1 && N != B * a.block_size) {
      throw_internal("dequantize_4bit: {} elements are no whole blocks of {} of {} tensors", N, a.block_size, P);
    }
  } else if (!a.map.empty() || !a.nested_absmax.empty() || !a.offset.empty()) {
    throw_internal("dequantize_4bit: absmax is fp32, so map, nested_absmax and offset have no use");
  }
  check_tensor("dequantize_4bit", "out", a.out, {N}, {DType::kF32, DType::kBF16});
  if (N == 0) return;
  PARKA_DISPATCH(dequantize_4bit, device, a);
}

OpCost cost_of(const Quantize4Bit& a) { return moved(all_bytes(a.x, a.codes, a.absmax), a.x); }

// The mean is known only when every scale has been seen.
OpCost cost_of(const QuantizeAbsmax& a) {
  return moved(bytes_of(a.absmax) + all_bytes(a.absmax, a.map, a.codes, a.nested_absmax, a.offset), a.absmax);
}

OpCost cost_of(const Dequantize4Bit& a) {
  return moved(all_bytes(a.codes, a.absmax, a.map, a.nested_absmax, a.offset, a.out), a.out);
}

}  // namespace parka
