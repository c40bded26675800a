#include <cmath>
#include <limits>
#include <vector>

#include "core/philox.h"
#include "kernels/ops/elementwise/pointwise.h"
#include "kernels/ops/gemm/gemm.h"
#include "tests/kernels/op_bounds.h"
#include "tests/support/catch.h"

using namespace parka;
using namespace parka::test;

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Around the ends of packs, threads' and blocks' shares, and of any length up to some blocks.
std::vector<int64_t> sizes() {
  std::vector<int64_t> all = {1, 2, 3, 4, 5, 7, 8, 9, 1023, 1024, 1025, 4095, 4096, 4097, 8191, 8192, 8193, 16385};
  for (uint64_t i = 0; i < 20; ++i) all.push_back(1 + philox4x32(31, 1, i)[0] % 100000);
  return all;
}

float rounded(DType dtype, float x) { return dtype == DType::kBF16 ? decode_bf16(encode_bf16(x)) : x; }

TEST_CASE("add adds in fp32 and rounds once", "[kernels][add]") {
  for (Device* device : devices()) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      for (const int64_t N : sizes()) {
        const std::vector<float> x = random_values(dtype, N, 1), before = random_values(dtype, N, 2, 30.0f);
        const TestTensor added(*device, dtype, {N}, x), total(*device, dtype, {N}, before);
        add(*device, {.x = added, .total = total});
        const std::vector<float> got = total.host();
        int64_t wrong = 0;
        for (int64_t i = 0; i < N; ++i) {
          wrong += got[i] != rounded(dtype, static_cast<float>(double{before[i]} + x[i]));
        }
        CAPTURE(device->name(), name_of(dtype), N);
        CHECK(wrong == 0);
        CHECK((added.host() == x && added.guard_intact() && total.guard_intact()));
      }
    }
  }
}

TEST_CASE("add takes parts of tensors that begin at any element", "[kernels][add]") {
  constexpr int64_t kCount = 5000;
  for (Device* device : devices()) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      const std::vector<float> x = random_values(dtype, kCount, 3), before = random_values(dtype, kCount, 4);
      for (const int64_t offset_x : {0, 1, 3, 8}) {
        for (const int64_t offset : {0, 1, 8, 13}) {
          const TestTensor added(*device, dtype, {kCount}, x), total(*device, dtype, {kCount}, before);
          const int64_t N = 4500;
          add(*device, {.x = added.view().rows(offset_x, N), .total = total.view().rows(offset, N)});
          std::vector<float> want = before;
          for (int64_t i = 0; i < N; ++i) want[offset + i] = rounded(dtype, want[offset + i] + x[offset_x + i]);
          CAPTURE(device->name(), name_of(dtype), offset_x, offset);
          CHECK((total.host() == want));
        }
      }
    }
  }
}

TEST_CASE("add shows a NaN or an infinity, and adds nothing for no elements", "[kernels][add]") {
  for (Device* device : devices()) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      const TestTensor x(*device, dtype, {4}, {kInfinity, 1.0f, -kInfinity, std::nanf("")});
      const TestTensor total(*device, dtype, {4}, {1.0f, -kInfinity, kInfinity, 1.0f}), none(*device, dtype, {0});
      add(*device, {.x = x, .total = total});
      const std::vector<float> got = total.host();
      CHECK((got[0] == kInfinity && got[1] == -kInfinity && std::isnan(got[2]) && std::isnan(got[3])));
      add(*device, {.x = none, .total = none});
      CHECK(none.guard_intact());
    }
  }
}

TEST_CASE("add_columns scales and adds columns of wider matrices, and leaves the others", "[kernels][add]") {
  constexpr float kFactor = 1.625f;
  for (Device* device : devices()) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      struct Case {
        int64_t R, N, x_padding, y_padding;
      };
      for (const Case& c :
           {Case{1, 1, 0, 0}, Case{7, 300, 0, 0}, Case{128, 16, 5, 0}, Case{33, 257, 0, 9}, Case{5, 8, 8, 24}}) {
        const int64_t R = c.R, N = c.N, x_padding = c.x_padding, y_padding = c.y_padding;
        for (const bool accumulate : {false, true}) {
          CAPTURE(device->name(), name_of(dtype), R, N, x_padding, y_padding, accumulate);
          const int64_t x_width = N + x_padding, y_width = N + y_padding;
          const std::vector<float> values = random_values(dtype, R * x_width, 5),
                                   before = random_values(dtype, R * y_width, 6, 30.0f);
          const TestTensor x(*device, dtype, {R * x_width}, values), y(*device, dtype, {R * y_width}, before);
          const auto columns = [&](const TestTensor& t) { return TensorView(t.view().data, dtype, {R, N}); };
          add_columns(*device, {.x = columns(x),
                                .y = columns(y),
                                .factor = kFactor,
                                .accumulate = accumulate,
                                .x_padding = x_padding,
                                .y_padding = y_padding});
          std::vector<float> want = before;
          for (int64_t i = 0; i < R * N; ++i) {
            float& one = want[static_cast<size_t>(i / N * y_width + i % N)];
            const float scaled = kFactor * values[static_cast<size_t>(i / N * x_width + i % N)];
            one = rounded(dtype, accumulate ? one + scaled : scaled);
          }
          CHECK((y.host() == want && y.guard_intact() && x.guard_intact()));
        }
      }
    }
  }
  Device& device = cpu_device();
  const TestTensor x(device, DType::kF32, {2, 3}), half(device, DType::kBF16, {2, 3}),
      other(device, DType::kF32, {3, 2});
  const auto message = [&](const TensorView& from, const TensorView& to) {
    return internal_error([&] { add_columns(device, {.x = from, .y = to}); });
  };
  CHECK(contains(message(x, half), "add_columns: y"));
  CHECK(contains(message(x, other), "add_columns: y"));
  CHECK(cost_of(AddColumns{.x = x, .y = x}).bytes == 48);
  CHECK(cost_of(AddColumns{.x = x, .y = x, .accumulate = true}).bytes == 72);
}

TEST_CASE("add gives the same bits on any number of threads", "[kernels][add]") {
  Device& device = cpu_device();
  const std::vector<float> x = random_bf16(70001, 5), before = random_bf16(70001, 6);
  CHECK(same_on_one_thread([&] {
    const TestTensor added(device, DType::kBF16, {70001}, x), total(device, DType::kBF16, {70001}, before);
    add(device, {.x = added, .total = total});
    return total.bytes();
  }));
}

TEST_CASE("add refuses wrong arguments", "[kernels][add]") {
  Device& device = cpu_device();
  const TestTensor x(device, DType::kF32, {3}), half(device, DType::kBF16, {3}), ids(device, DType::kI32, {3}),
      longer(device, DType::kF32, {4}), matrix(device, DType::kF32, {1, 3});
  const auto message = [&](const TensorView& added, const TensorView& total) {
    return internal_error([&] { add(device, {added, total}); });
  };
  CHECK(contains(message(ids, ids), "add: x is int32"));
  CHECK(contains(message(matrix, x), "add: x"));
  CHECK(contains(message(x, half), "add: total"));
  CHECK(contains(message(x, longer), "add: total"));
  CHECK(contains(message(x, {}), "add: total"));
}

TEST_CASE("what add and gemm move counts a sum as read and written", "[kernels][add][gemm]") {
  Device& device = cpu_device();
  const TestTensor x(device, DType::kBF16, {8}), total(device, DType::kBF16, {8});
  CHECK(cost_of(Add{x, total}).bytes == 3 * 16);
  const TestTensor a(device, DType::kBF16, {4, 8}), b(device, DType::kBF16, {2, 8}),
      out(device, DType::kF32, {4, 2});
  const OpCost written = cost_of(Gemm{.a = a, .b = b, .out = out}),
               added = cost_of(Gemm{.a = a, .b = b, .out = out, .accumulate = true});
  CHECK(written.bytes == 6 * 16 + 32);
  CHECK(added.bytes == 6 * 16 + 2 * 32);
  CHECK(added.shape != written.shape);
}

}  // namespace
