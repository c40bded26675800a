#include <limits>
#include <vector>

#include "core/philox.h"
#include "kernels/ops/quantize/quantize.h"
#include "tests/kernels/op_bounds.h"
#include "tests/support/catch.h"

using namespace parka;
using namespace parka::test;

namespace {

// Around rows of 128 elements, which GPUs read, and of any length up to some tiles of 128 such rows.
std::vector<int64_t> sizes() {
  std::vector<int64_t> all = {1, 2, 127, 128, 129, 255, 256, 257, 16383, 16384, 16385, 16384 + 127, 16384 + 128};
  for (uint64_t i = 0; i < 20; ++i) all.push_back(1 + philox4x32(41, 1, i)[0] % 100000);
  return all;
}

TEST_CASE("amax is the largest magnitude of any number of elements, wherever it is", "[kernels][amax]") {
  for (Device* device : devices()) {
    CAPTURE(device->name());
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      for (const int64_t N : sizes()) {
        CAPTURE(name_of(dtype), N);
        std::vector<float> x(static_cast<size_t>(N));
        for (size_t i = 0; i < x.size(); ++i) {
          const float magnitude = static_cast<float>(philox4x32(41, 2, i)[0] % 128) / 128.0f;  // exact in bf16
          x[i] = i % 3 == 0 ? -magnitude : magnitude;
        }
        for (const int64_t at : {int64_t{0}, N / 2, N - 1}) {
          std::vector<float> largest = x;
          largest[static_cast<size_t>(at)] = -3.0f;
          if (N > 2)
            largest[static_cast<size_t>((at + 1) % N)] = std::numeric_limits<float>::quiet_NaN();  // is skipped
          const TestTensor values(*device, dtype, {N}, largest), result(*device, DType::kF32, {1}, {0.5f});
          amax(*device, {values, result});
          CHECK(result.host()[0] == 3.0f);
          const TestTensor above(*device, DType::kF32, {1}, {4.0f});
          amax(*device, {values, above});
          CHECK((above.host()[0] == 4.0f && values.guard_intact() && result.guard_intact()));
        }
      }
    }
  }
}

TEST_CASE("tensor_scales are those that quantize makes of the same maxima", "[kernels][amax]") {
  const std::vector<float> maxima = {0, 1e-38f, 1e-20f, 0.37f, 448, 1e6f, 3e38f};
  const auto N = static_cast<int64_t>(maxima.size());
  for (Device* device : devices()) {
    for (const DType format : {DType::kE4M3, DType::kE5M2}) {
      CAPTURE(device->name(), name_of(format));
      const TestTensor amax(*device, DType::kF32, {N}, maxima), scales(*device, DType::kF32, {N});
      tensor_scales(*device, {amax, format, scales});
      const std::vector<float> got = scales.host();
      CHECK(scales.guard_intact());
      for (int64_t i = 0; i < N; ++i) {
        const TestTensor x(*device, DType::kF32, {1, 1}, {maxima[static_cast<size_t>(i)]}),
            code(*device, format, {1, 1}), scale(*device, DType::kF32, {1});
        quantize(*device, {.x = x.view(), .out = {code, scale, Scaling::kTensor}, .amax = amax.view().rows(i, 1)});
        CHECK(got[static_cast<size_t>(i)] == scale.host()[0]);
      }
    }
  }
}

}  // namespace
