#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "core/philox.h"
#include "kernels/ops/elementwise/pointwise.h"
#include "tests/kernels/op_bounds.h"
#include "tests/support/catch.h"

using namespace parka;
using namespace parka::test;

namespace {

using Size = std::pair<int64_t, int64_t>;

// Around the ends of packs, warps, blocks and pieces, and random ones.
std::vector<Size> sizes() {
  std::vector<Size> all = {{1, 1},   {3, 7},     {4, 8},     {5, 256},  {63, 257},  {64, 264},
                           {65, 31}, {129, 512}, {257, 768}, {1000, 9}, {9000, 24}, {8193, 40}};
  for (uint64_t i = 0; i < 20; ++i) {
    const auto draw = philox4x32(33, 1, i);
    all.emplace_back(1 + draw[0] % 300, 1 + draw[1] % 2100);
  }
  return all;
}

float rounded(DType dtype, float x) { return dtype == DType::kBF16 ? decode_bf16(encode_bf16(x)) : x; }

}  // namespace

TEST_CASE("bias_forward adds a number to each column and rounds once", "[kernels][bias]") {
  for (Device* device : devices()) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      for (const auto& [T, N] : sizes()) {
        const std::vector<float> values = random_values(dtype, T * N, 1, 3.0f), added = random_values(dtype, N, 2);
        const TestTensor x(*device, dtype, {T, N}, values), bias(*device, dtype, {N}, added);
        bias_forward(*device, {.bias = bias, .x = x});
        const std::vector<float> got = x.host();
        int64_t wrong = 0;
        for (int64_t i = 0; i < T * N; ++i) wrong += got[i] != rounded(dtype, values[i] + added[i % N]);
        CAPTURE(device->name(), name_of(dtype), T, N);
        CHECK(wrong == 0);
        CHECK((bias.host() == added && bias.guard_intact() && x.guard_intact()));
      }
    }
  }
}

TEST_CASE("bias_backward adds the sums of columns, as in float64", "[kernels][bias]") {
  for (Device* device : devices()) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      for (const DType sum_dtype : {DType::kF32, DType::kBF16}) {
        for (const auto& [T, N] : sizes()) {
          const std::vector<float> values = random_values(dtype, T * N, 3), before = random_values(sum_dtype, N, 4);
          const TestTensor d_y(*device, dtype, {T, N}, values), d_bias(*device, sum_dtype, {N}, before),
              again(*device, sum_dtype, {N}, before);
          bias_backward(*device, {.d_y = d_y, .d_bias = d_bias});
          bias_backward(*device, {.d_y = d_y, .d_bias = again});
          std::vector<double> want(before.begin(), before.end()), magnitude(static_cast<size_t>(N));
          for (int64_t i = 0; i < T * N; ++i) {
            want[i % N] += values[i];
            magnitude[i % N] += std::abs(values[i]);
          }
          const std::vector<float> got = d_bias.host();
          int64_t wrong = 0;
          for (int64_t c = 0; c < N; ++c) {
            const double bound = 1.01 * unit_roundoff(sum_dtype) * std::abs(want[c]) + 2e-6 * (1 + magnitude[c]);
            wrong += !(std::abs(got[c] - want[c]) <= bound);
          }
          CAPTURE(device->name(), name_of(dtype), name_of(sum_dtype), T, N);
          CHECK(wrong == 0);
          CHECK((again.bytes() == d_bias.bytes()));
          CHECK((d_y.host() == values && d_y.guard_intact() && d_bias.guard_intact()));
        }
      }
    }
  }
}

TEST_CASE("bias ops show bad values in their own column, and do nothing for no rows", "[kernels][bias]") {
  for (Device* device : devices()) {
    for (const float bad : {std::nanf(""), std::numeric_limits<float>::infinity()}) {
      std::vector<float> values(3 * 16, 1.0f), number(16, 1.0f);
      values[16 + 5] = number[7] = bad;
      const TestTensor x(*device, DType::kBF16, {3, 16}, values), bias(*device, DType::kBF16, {16}, number),
          d_bias(*device, DType::kF32, {16}, std::vector<float>(16, 0.0f)), none(*device, DType::kBF16, {0, 16});
      bias_backward(*device, {.d_y = x, .d_bias = d_bias});
      bias_forward(*device, {.bias = bias, .x = x});
      const std::vector<float> sums = d_bias.host(), got = x.host();
      int64_t wrong = 0;
      for (int64_t c = 0; c < 16; ++c) wrong += std::isfinite(sums[c]) != (c != 5);
      for (int64_t i = 0; i < 48; ++i) wrong += std::isfinite(got[i]) != (i != 16 + 5 && i % 16 != 7);
      CHECK(wrong == 0);
      bias_forward(*device, {.bias = bias, .x = none});
      bias_backward(*device, {.d_y = none, .d_bias = d_bias});
      CHECK(none.guard_intact());
      CHECK((d_bias.host()[0] == sums[0]));
    }
  }
}

TEST_CASE("bias ops take rows of tensors that begin at any element", "[kernels][bias]") {
  for (Device* device : devices()) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      const std::vector<float> values = random_values(dtype, 10 * 24, 5), number = random_values(dtype, 30, 6);
      const TestTensor all(*device, dtype, {240}, values), bias(*device, dtype, {30}, number);
      bias_forward(*device, {.bias = bias.view().rows(3, 24), .x = all.view().rows(1, 9 * 24).reshaped({9, 24})});
      std::vector<float> want = values;
      for (int64_t i = 0; i < 9 * 24; ++i) want[1 + i] = rounded(dtype, want[1 + i] + number[3 + i % 24]);
      CAPTURE(device->name(), name_of(dtype));
      CHECK((all.host() == want));
    }
  }
}

TEST_CASE("bias ops give the same bits on any number of threads", "[kernels][bias]") {
  Device& device = cpu_device();
  const std::vector<float> values = random_bf16(300 * 77, 7), number = random_bf16(77, 8);
  CHECK(same_on_one_thread([&] {
    const TestTensor x(device, DType::kBF16, {300, 77}, values), bias(device, DType::kBF16, {77}, number);
    bias_forward(device, {.bias = bias, .x = x});
    return x.bytes();
  }));
  CHECK(same_on_one_thread([&] {
    const TestTensor d_y(device, DType::kBF16, {300, 77}, values), d_bias(device, DType::kF32, {77}, number);
    bias_backward(device, {.d_y = d_y, .d_bias = d_bias});
    return d_bias.bytes();
  }));
}

TEST_CASE("bias ops refuse wrong arguments", "[kernels][bias]") {
  Device& device = cpu_device();
  const TestTensor x(device, DType::kF32, {3, 4}), bias(device, DType::kF32, {4}), half(device, DType::kBF16, {4}),
      ids(device, DType::kI32, {3, 4}), shorter(device, DType::kF32, {3});
  const auto forward = [&](const TensorView& b, const TensorView& to) {
    return internal_error([&] { bias_forward(device, {.bias = b, .x = to}); });
  };
  const auto backward = [&](const TensorView& d_y, const TensorView& d_b) {
    return internal_error([&] { bias_backward(device, {.d_y = d_y, .d_bias = d_b}); });
  };
  CHECK(contains(forward(bias, ids), "bias_forward: x is int32"));
  CHECK(contains(forward(half, x), "bias_forward: bias is bf16"));
  CHECK(contains(forward(shorter, x), "bias_forward: bias is fp32 [3]"));
  CHECK(contains(forward({}, x), "bias_forward: bias"));
  CHECK(contains(backward(ids, bias), "bias_backward: d_y is int32"));
  CHECK(contains(backward(x, shorter), "bias_backward: d_bias is fp32 [3]"));
  CHECK(contains(backward(x, {}), "bias_backward: d_bias"));
}
