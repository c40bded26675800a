#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
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

TEST_CASE("amax of parts is the maximum of each, of elements from any to any", "[kernels][amax]") {
  constexpr int64_t kParts = 5;
  for (Device* device : devices()) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      for (const int64_t part : {1, 7, 4096, 32768, 32768 + 24, 70001}) {
        const int64_t all = kParts * part;
        for (const auto& [first, count] : {std::pair(int64_t{0}, all), {part / 2, all - part}, {part, part}}) {
          if (count == 0) continue;
          CAPTURE(device->name(), name_of(dtype), part, first, count);
          std::vector<float> x(static_cast<size_t>(count)), want(kParts, 0.25f);
          for (int64_t i = 0; i < count; ++i) {
            x[static_cast<size_t>(i)] =
                static_cast<float>(philox4x32(41, 3, static_cast<uint64_t>(i))[0] % 256) / 64.0f - 2.0f;
            float& of_part = want[static_cast<size_t>((first + i) / part)];
            of_part = std::max(of_part, std::abs(x[static_cast<size_t>(i)]));
          }
          const TestTensor values(*device, dtype, {count}, x),
              result(*device, DType::kF32, {kParts}, std::vector<float>(kParts, 0.25f));
          amax(*device, {.x = values, .result = result, .part = part, .first = first});
          CHECK((result.host() == want && result.guard_intact()));
        }
      }
    }
  }
}

TEST_CASE("quantize_matrices gives each matrix what quantize gives it alone", "[kernels][amax]") {
  constexpr int64_t N = 3;
  for (Device* device : devices()) {
    for (const auto& [rows, cols] : {std::pair<int64_t, int64_t>(128, 256), {144, 80}, {5, 16}, {33, 7}}) {
      for (const DType format : {DType::kE4M3, DType::kE5M2}) {
        for (const auto& [has_rows, has_columns] : {std::pair(true, true), {true, false}, {false, true}}) {
          CAPTURE(device->name(), rows, cols, name_of(format), has_rows, has_columns);
          std::vector<float> x(static_cast<size_t>(N * rows * cols)), maxima(N, 0.0f);
          for (size_t i = 0; i < x.size(); ++i) {
            const size_t n = i / static_cast<size_t>(rows * cols);
            const float magnitude = static_cast<float>(1 << n) / 128.0f;
            x[i] = (static_cast<float>(philox4x32(41, 4, i)[0] % 256) - 128.0f) * magnitude;
            maxima[n] = std::max(maxima[n], std::abs(x[i]));
          }
          const TestTensor values(*device, DType::kBF16, {N * rows, cols}, x),
              amax(*device, DType::kF32, {N}, maxima);
          const TestTensor scales(*device, DType::kF32, {N}), codes(*device, format, {N * rows, cols}),
              codes_t(*device, format, {N * cols, rows}), moved(*device, format, {N * cols, rows});
          quantize_matrices(*device, {.x = values,
                                      .amax = amax,
                                      .scales = scales,
                                      .out = has_rows ? codes.view() : TensorView(),
                                      .out_t = has_columns ? codes_t.view() : TensorView()});
          if (has_rows) {
            quantize_matrices(*device, {.x = codes, .amax = {}, .scales = scales, .out_t = moved});
            if (has_columns) CHECK((moved.bytes() == codes_t.bytes()));
          }
          CHECK((scales.guard_intact() && codes.guard_intact() && codes_t.guard_intact() && moved.guard_intact()));
          for (int64_t n = 0; n < N; ++n) {
            const TestTensor one(*device, format, {rows, cols}), one_t(*device, format, {cols, rows}),
                scale(*device, DType::kF32, {1});
            quantize(*device, {.x = values.view().rows(n * rows, rows),
                               .out = {one, scale, Scaling::kTensor},
                               .out_t = {one_t, scale, Scaling::kTensor},
                               .amax = amax.view().rows(n, 1)});
            CHECK(scales.host()[static_cast<size_t>(n)] == scale.host()[0]);
            const auto size = static_cast<size_t>(rows * cols), from = static_cast<size_t>(n) * size;
            const auto part = [&](const std::vector<float>& all) {
              return std::vector<float>(all.begin() + static_cast<int64_t>(from),
                                        all.begin() + static_cast<int64_t>(from + size));
            };
            if (has_rows) CHECK((part(codes.host()) == one.host()));
            if (has_columns) CHECK((part(codes_t.host()) == one_t.host()));
          }
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
