#pragma once
#include <string>
#include <vector>

#include "core/error.h"
#include "core/parallel.h"
#include "tests/support/tensors.h"

// What the tests of several ops have in common.
namespace parka::test {

// The message of the Error(kInternal) that `call` throws; empty if it throws none.
template <typename Call>
std::string internal_error(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.code() == ExitCode::kInternal ? error.what() : "";
  }
  return "";
}

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// Codes and scales of both, bit for bit.
inline bool same_bits(const TestMatrix& a, const TestMatrix& b) {
  const bool same_scale = !a.scale == !b.scale && (!a.scale || a.scale->bytes() == b.scale->bytes());
  return same_scale && a.data.bytes() == b.data.bytes();
}

template <typename T>
void upload(Device& device, const TensorView& target, const std::vector<T>& values) {
  PARKA_REQUIRE(static_cast<int64_t>(values.size() * sizeof(T)) == target.bytes());
  device.copy_to_device(target.data, values.data(), target.bytes());
}

// Any finite codes, and scales in [0.5, 1.5).
inline void fill_random_codes(Device& device, const TestMatrix& m, uint64_t seed) {
  const uint8_t max_code = float8_traits(m.data.view().dtype).max_code;
  std::vector<uint8_t> codes(static_cast<size_t>(m.data.view().numel()));
  for (size_t i = 0; i < codes.size(); ++i) {
    codes[i] = static_cast<uint8_t>(philox4x32(seed, 1, i)[0]);
    if ((codes[i] & 0x7f) > max_code) codes[i] = max_code;
  }
  upload(device, m.data.view(), codes);
  std::vector<float> scales(static_cast<size_t>(m.scale->view().numel()));
  for (size_t i = 0; i < scales.size(); ++i) {
    scales[i] = static_cast<float>(0.5 + uniform_open(philox4x32(seed, 2, i)[0]));
  }
  if (m.scale->view().dtype == DType::kF32) {
    upload(device, m.scale->view(), scales);
  } else {
    std::vector<BFloat16> rounded;
    for (float s : scales) rounded.push_back(encode_bf16(s));
    upload(device, m.scale->view(), rounded);
  }
}

// A number format with its scaling, to run one test over all of them.
struct Format {
  DType dtype;
  Scaling scaling = Scaling::kNone;
  int64_t group = 0;
  DType scale_dtype = DType::kF32;

  TestMatrix make(Device& device, int64_t rows, int64_t cols) const {
    return TestMatrix(device, dtype, rows, cols, scaling, group, scale_dtype);
  }
};

inline const Format kFloat8Formats[] = {
    {DType::kE4M3, Scaling::kTensor},
    {DType::kE5M2, Scaling::kTensor},
    {DType::kE4M3, Scaling::kGroup, 16, DType::kBF16},
    {DType::kE4M3, Scaling::kGroup, 16, DType::kF32},
    {DType::kE5M2, Scaling::kGroup, 128, DType::kBF16},
    {DType::kE4M3, Scaling::kGroup, 5, DType::kBF16},
    {DType::kE4M3, Scaling::kBlock, 128},
    {DType::kE5M2, Scaling::kBlock, 16},
};

}  // namespace parka::test
