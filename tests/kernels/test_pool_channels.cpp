#include <algorithm>
#include <cmath>
#include <vector>

#include "core/philox.h"
#include "kernels/ops/elementwise/side_network.h"
#include "tests/kernels/op_bounds.h"
#include "tests/support/catch.h"

using namespace parka;
using namespace parka::test;

namespace {

struct Size {
  int64_t rows, cols, group, pooled;
};

// Whole packs and none, short last groups, columns behind the groups, and random ones.
std::vector<Size> sizes() {
  std::vector<Size> all = {{1, 1, 1, 1},    {3, 64, 16, 4}, {5, 64, 16, 16},   {7, 70, 16, 5},  {2, 33, 4, 16},
                           {65, 80, 5, 16}, {1, 8, 100, 3}, {130, 256, 8, 32}, {9, 136, 16, 16}};
  for (uint64_t i = 0; i < 10; ++i) {
    const auto draw = philox4x32(81, 1, i);
    const int64_t cols = 1 + draw[0] % 500, group = 1 + draw[1] % 40;
    all.push_back({1 + draw[2] % 90, cols, group, (cols + group - 1) / group + draw[3] % 5});
  }
  return all;
}

}  // namespace

TEST_CASE("pool_channels is the maximum or the mean of each group, and zeros behind them", "[kernels][pool]") {
  for (Device* device : devices()) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      for (const PoolKind kind : {PoolKind::kMax, PoolKind::kAverage}) {
        for (const Size& size : sizes()) {
          const std::vector<float> x = random_values(dtype, size.rows * size.cols, 1);
          const TestTensor in(*device, dtype, {size.rows, size.cols}, x),
              out(*device, dtype, {size.rows, size.pooled}), again(*device, dtype, {size.rows, size.pooled});
          pool_channels(*device, {.kind = kind, .group = size.group, .x = in, .out = out});
          pool_channels(*device, {.kind = kind, .group = size.group, .x = in, .out = again});
          const std::vector<float> got = out.host();
          int64_t wrong = 0;
          for (int64_t t = 0; t < size.rows; ++t) {
            for (int64_t i = 0; i < size.pooled; ++i) {
              double want = 0, magnitude = 0, count = 0, largest = -1e30;
              for (int64_t c = i * size.group; c < std::min((i + 1) * size.group, size.cols); ++c) {
                const double value = x[t * size.cols + c];
                largest = std::max(largest, value);
                want += value;
                magnitude += std::abs(value);
                count += 1;
              }
              if (count > 0) want = kind == PoolKind::kMax ? largest : want / count;
              const double bound =
                  kind == PoolKind::kMax ? 0 : 1.01 * unit_roundoff(dtype) * std::abs(want) + 3e-6 * magnitude;
              wrong += !(std::abs(got[t * size.pooled + i] - want) <= bound);
            }
          }
          CAPTURE(device->name(), name_of(dtype), int(kind), size.rows, size.cols, size.group, size.pooled);
          CHECK(wrong == 0);
          CHECK((out.bytes() == again.bytes()));
          CHECK((in.host() == x && in.guard_intact() && out.guard_intact()));
        }
      }
    }
  }
}

TEST_CASE("pool_channels shows NaN in its group, takes any address, and does nothing for no rows",
          "[kernels][pool]") {
  for (Device* device : devices()) {
    for (const PoolKind kind : {PoolKind::kMax, PoolKind::kAverage}) {
      std::vector<float> values(2 * 64, 1.0f);
      values[64 + 20] = std::nanf("");
      const TestTensor x(*device, DType::kBF16, {2, 64}, values), out(*device, DType::kBF16, {2, 4}),
          none(*device, DType::kBF16, {0, 4}), empty(*device, DType::kBF16, {0, 64}),
          all(*device, DType::kBF16, {129}, std::vector<float>(129, 3.0f));
      pool_channels(*device, {.kind = kind, .group = 16, .x = x, .out = out});
      const std::vector<float> got = out.host();
      int64_t wrong = 0;
      for (int64_t i = 0; i < 8; ++i) wrong += std::isnan(got[i]) != (i == 5);
      CHECK(wrong == 0);
      pool_channels(*device, {.kind = kind, .group = 16, .x = empty, .out = none});
      pool_channels(*device,
                    {.kind = kind, .group = 16, .x = all.view().rows(1, 128).reshaped({2, 64}), .out = out});
      CHECK((out.host() == std::vector<float>(8, 3.0f)));
    }
  }
}

TEST_CASE("pool_channels gives the same bits on any number of threads", "[kernels][pool]") {
  Device& device = cpu_device();
  const std::vector<float> values = random_bf16(300 * 96, 2);
  CHECK(same_on_one_thread([&] {
    const TestTensor x(device, DType::kBF16, {300, 96}, values), out(device, DType::kBF16, {300, 16});
    pool_channels(device, {.kind = PoolKind::kAverage, .group = 6, .x = x, .out = out});
    return out.bytes();
  }));
}

TEST_CASE("pool_channels refuses wrong arguments", "[kernels][pool]") {
  Device& device = cpu_device();
  const TestTensor x(device, DType::kF32, {3, 8}), half(device, DType::kBF16, {3, 2}),
      out(device, DType::kF32, {3, 2}), ids(device, DType::kI32, {3, 8});
  const auto run = [&](int64_t group, const TensorView& from, const TensorView& to) {
    return internal_error(
        [&] { pool_channels(device, {.kind = PoolKind::kMax, .group = group, .x = from, .out = to}); });
  };
  CHECK(contains(run(4, ids, out), "pool_channels: x is int32"));
  CHECK(contains(run(4, x, half), "pool_channels: out is bf16"));
  CHECK(!run(3, x, out).empty());
  CHECK(!run(0, x, out).empty());
}
