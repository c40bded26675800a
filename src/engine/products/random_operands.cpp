#include "engine/products/random_operands.h"

#include <algorithm>
#include <cstddef>
#include <vector>

#include "core/number_formats.h"
#include "core/philox.h"
#include "kernels/ops/quantize/quantize.h"

namespace parka {
namespace {

Quantize quantize_of(const ScaledView& operand, void* numbers) {
  return {.x = TensorView(numbers, DType::kBF16, {operand.num_rows(), operand.num_cols()}), .out = operand};
}

}  // namespace

RandomOperands::RandomOperands(Device& device, int64_t most_elements)
    : device_(device), memory_(device.allocate(most_elements * size_of(DType::kBF16))) {
  constexpr int64_t kPiece = int64_t{1} << 20;
  std::vector<BFloat16> numbers(static_cast<size_t>(std::min(kPiece, most_elements)));
  for (size_t i = 0; i < numbers.size(); ++i) {
    numbers[i] = encode_bf16(static_cast<float>(philox_normal2(1, 2, i / 2)[i % 2]));
  }
  for (int64_t at = 0; at < most_elements; at += kPiece) {
    const int64_t count = std::min(kPiece, most_elements - at);
    device.copy_to_device(static_cast<std::byte*>(memory_) + at * size_of(DType::kBF16), numbers.data(),
                          count * size_of(DType::kBF16));
  }
}

RandomOperands::~RandomOperands() { device_.release(memory_); }

void RandomOperands::fill(const Gemm& a) const {
  for (const ScaledView& operand : {a.a, a.b}) {
    if (operand.scaling == Scaling::kNone) {
      device_.copy(operand.data.data, memory_, operand.data.bytes());
    } else {
      quantize(device_, quantize_of(operand, memory_));
    }
  }
}

int64_t RandomOperands::elements_of(const Gemm& a) { return std::max(a.a.data.numel(), a.b.data.numel()); }

int64_t RandomOperands::workspace_of(const Gemm& a) {
  int64_t most = 0;
  for (const ScaledView& operand : {a.a, a.b}) {
    if (operand.scaling == Scaling::kNone) continue;
    most = std::max(most, parka::workspace_of(quantize_of(operand, operand.data.data)));
  }
  return most;
}

}  // namespace parka
