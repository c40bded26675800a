#pragma once
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/ops/quantize/quantize.h"
#include "tests/kernels/float8_devices.h"

// Operands of FP8 products whose terms are multiples of 1/16 and whose sums are small, so that they are exact in
// every order and accumulator.
namespace parka::test {

// Halves from -1 to 1, half of them 0, and one 1.75, which makes the scale 2^-8.
inline std::vector<float> exact_values(int64_t count, uint64_t seed) {
  std::vector<float> x = random_bf16(count, seed);
  for (float& value : x)
    value = std::fabs(value) < 0.7f ? 0.0f : std::copysign(std::fabs(value) < 1.2f ? 0.5f : 1.0f, value);
  x[static_cast<size_t>(count) / 3] = 1.75f;
  return x;
}

// Whether it has kernels for compute capability 9.0.
inline bool is_hopper(const Device& device) {
  return device.name().find("H100") != std::string::npos || device.name().find("H200") != std::string::npos;
}

inline void fill_exactly(Device& device, const TestMatrix& codes, uint64_t seed) {
  const int64_t rows = codes.view().num_rows(), cols = codes.view().num_cols();
  const TestTensor values(device, DType::kBF16, {rows, cols}, exact_values(rows * cols, seed));
  quantize(device, {.x = values, .out = codes});
}

}  // namespace parka::test
