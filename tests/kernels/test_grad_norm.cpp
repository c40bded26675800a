#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include "kernels/ops/optimizer/grad_norm.h"
#include "tests/kernels/op_bounds.h"
#include "tests/support/catch.h"

using namespace parka;
using namespace parka::test;

namespace {

// Parts of awkward sizes, fp32 and bf16 by turns, with their values.
struct Parts {
  std::vector<std::vector<float>> values;
  std::vector<std::unique_ptr<TestTensor>> tensors;

  Parts(Device& device, const std::vector<int64_t>& sizes) {
    for (size_t p = 0; p < sizes.size(); ++p) {
      const DType dtype = p % 2 == 0 ? DType::kF32 : DType::kBF16;
      values.push_back(random_values(dtype, sizes[p], p, std::ldexp(1.0f, static_cast<int>(p) - 3)));
      add(device, dtype, values.back());
    }
  }
  void add(Device& device, DType dtype, const std::vector<float>& x) {
    tensors.push_back(std::make_unique<TestTensor>(
        device, dtype, std::initializer_list<int64_t>{static_cast<int64_t>(x.size())}, x));
  }
  std::vector<TensorView> views() const {
    std::vector<TensorView> all;
    for (const auto& tensor : tensors) all.push_back(*tensor);
    return all;
  }
};

const std::vector<int64_t> kSizes = {1, 0, 2, 15, 17, 16383, 16384, 16385, 0, 50021};

TEST_CASE("sum_of_squares sums in double and rounds once", "[kernels][grad_norm]") {
  for (Device* device : devices()) {
    const Parts parts(*device, kSizes);
    TestTensor partial(*device, DType::kF32, {static_cast<int64_t>(kSizes.size())}),
        result(*device, DType::kF32, {1});
    sum_of_squares(*device, {.parts = parts.views(), .partial = partial, .result = result});
    const std::vector<float> sums = partial.host();
    int wrong = 0;
    double total = 0;
    for (size_t p = 0; p < kSizes.size(); ++p) {
      double want = 0;
      for (float v : parts.values[p]) want += double{v} * v;
      wrong += !(std::abs(sums[p] - want) <= 1.01 * 0x1p-24 * want);
      total += want;
    }
    CHECK(wrong == 0);
    CHECK(std::abs(result.host()[0] - total) <= 1.01 * 0x1p-24 * total);
    CHECK((partial.guard_intact() && result.guard_intact()));
  }
}

TEST_CASE("sum_of_squares does not lose small terms beside a large one", "[kernels][grad_norm]") {
  // An fp32 sum would stay at 2^40.
  std::vector<float> x(100000, 1.0f);
  x[0] = 0x1p20f;
  for (Device* device : devices()) {
    TestTensor part(*device, DType::kF32, {10, 10000}, x), partial(*device, DType::kF32, {1});
    TestTensor result(*device, DType::kF32, {1});
    sum_of_squares(*device, {.parts = {part}, .partial = partial, .result = result});
    CHECK(result.host()[0] == static_cast<float>(0x1p40 + 99999.0));
    CHECK(result.host()[0] > 0x1p40f);
  }
}

TEST_CASE("sum_of_squares names the part with a NaN or an infinity", "[kernels][grad_norm]") {
  const float bad = GENERATE(std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity());
  const size_t where = GENERATE(size_t{0}, size_t{16383}, size_t{16384}, size_t{20000});
  CAPTURE(bad, where);
  std::vector<float> x = random_normal(20001, 1);
  x[where] = bad;
  for (Device* device : devices()) {
    Parts parts(*device, {100, 33});
    parts.add(*device, DType::kBF16, x);
    parts.add(*device, DType::kF32, random_normal(7, 2));
    TestTensor partial(*device, DType::kF32, {4}), result(*device, DType::kF32, {1});
    sum_of_squares(*device, {.parts = parts.views(), .partial = partial, .result = result});
    const std::vector<float> sums = partial.host();
    CHECK((std::isfinite(sums[0]) && std::isfinite(sums[1]) && std::isfinite(sums[3])));
    CHECK((std::isnan(bad) ? std::isnan(sums[2]) : std::isinf(sums[2])));
    CHECK((std::isnan(bad) ? std::isnan(result.host()[0]) : std::isinf(result.host()[0])));
  }
}

TEST_CASE("sum_of_squares of nothing is zero", "[kernels][grad_norm]") {
  for (Device* device : devices()) {
    TestTensor empty(*device, DType::kF32, {0, 5}), partial(*device, DType::kF32, {1}),
        none(*device, DType::kF32, {0});
    TestTensor result(*device, DType::kF32, {1}), result_of_none(*device, DType::kF32, {1});
    sum_of_squares(*device, {.parts = {empty}, .partial = partial, .result = result});
    sum_of_squares(*device, {.parts = {}, .partial = none, .result = result_of_none});
    CHECK((result.host()[0] == 0.0f && partial.host()[0] == 0.0f && result_of_none.host()[0] == 0.0f));
    CHECK((partial.guard_intact() && none.guard_intact()));
  }
}

TEST_CASE("sum_of_squares gives the same bits on any number of threads", "[kernels][grad_norm]") {
  Device& device = *devices()[0];
  const Parts parts(device, {70001, 50021, 16385});
  CHECK(same_on_one_thread([&] {
    TestTensor partial(device, DType::kF32, {3}), result(device, DType::kF32, {1});
    sum_of_squares(device, {.parts = parts.views(), .partial = partial, .result = result});
    return result.bytes();
  }));
}

TEST_CASE("sum_of_squares refuses wrong arguments", "[kernels][grad_norm]") {
  Device& device = *devices()[0];
  TestTensor part(device, DType::kF32, {3}), ids(device, DType::kI32, {3}), one(device, DType::kF32, {1});
  TestTensor two(device, DType::kF32, {2});
  const auto message = [&](const std::vector<TensorView>& parts, const TensorView& partial,
                           const TensorView& result) {
    return internal_error([&] { sum_of_squares(device, {parts, partial, result}); });
  };
  CHECK(contains(message({part, ids}, two, one), "sum_of_squares: parts[1] is int32"));
  CHECK(contains(message({part, TensorView(nullptr, DType::kF32, {3})}, two, one), "sum_of_squares: parts[1]"));
  CHECK(contains(message({part}, two, one), "sum_of_squares: partial"));
  CHECK(contains(message({part}, one, two), "sum_of_squares: result"));
}

constexpr float kInfinity = std::numeric_limits<float>::infinity();

float coefficient_of(Device& device, float sum_of_squares, float loss, float max_norm) {
  TestTensor squares(device, DType::kF32, {1}, {sum_of_squares}), losses(device, DType::kF32, {1}, {loss});
  TestTensor coefficient(device, DType::kF32, {1});
  clip_coefficient(device,
                   {.sum_of_squares = squares, .loss = losses, .max_norm = max_norm, .coefficient = coefficient});
  CHECK((squares.guard_intact() && losses.guard_intact() && coefficient.guard_intact()));
  return coefficient.host()[0];
}

TEST_CASE("clip_coefficient scales gradients to the limit, and never up", "[kernels][grad_norm]") {
  for (Device* device : devices()) {
    for (float limit : {0.01f, 1.0f, 3e4f}) {
      for (float norm : {1.01f * limit, 10 * limit, 1e9f * limit}) {
        const double want = limit / (double{norm} + 1e-6);
        const float got = coefficient_of(*device, norm * norm, 2.5f, limit);
        CAPTURE(limit, norm, got);
        CHECK(std::abs(got - want) <= 0x1p-22 * want);
      }
      for (float norm : {0.0f, 1e-20f, 0.5f * limit, 0.99f * limit}) {
        CHECK(coefficient_of(*device, norm * norm, -2.5f, limit) == 1.0f);
      }
    }
    // The constant below the fraction counts where the norm is as small.
    CHECK(std::abs(coefficient_of(*device, 1e-12f, 0.0f, 1e-6f) - 0.5) <= 0x1p-20);
  }
}

TEST_CASE("clip_coefficient with an infinite limit is 1", "[kernels][grad_norm]") {
  for (Device* device : devices()) {
    for (float squares : {0.0f, 1.0f, std::numeric_limits<float>::max()}) {
      CHECK(coefficient_of(*device, squares, 1.0f, kInfinity) == 1.0f);
    }
  }
}

TEST_CASE("clip_coefficient is NaN beyond the limits of a step", "[kernels][grad_norm]") {
  for (Device* device : devices()) {
    const TestTensor squares(*device, DType::kF32, {1}, {16.0f}), loss(*device, DType::kF32, {1}, {3.0f});
    const TestTensor coefficient(*device, DType::kF32, {1});
    const auto of = [&](float most_squares, float most_loss) {
      clip_coefficient(*device, {.sum_of_squares = squares,
                                 .loss = loss,
                                 .max_norm = kInfinity,
                                 .most_squares = most_squares,
                                 .most_loss = most_loss,
                                 .coefficient = coefficient});
      return coefficient.host()[0];
    };
    CHECK(of(16.0f, 3.0f) == 1.0f);
    CHECK(std::isnan(of(15.99f, 3.0f)));
    CHECK(std::isnan(of(16.0f, 2.99f)));
    CHECK(std::isnan(of(16.0f, -kInfinity)));
  }
}

TEST_CASE("clip_coefficient is NaN where the norm or the loss is not finite", "[kernels][grad_norm]") {
  const float bad = GENERATE(std::numeric_limits<float>::quiet_NaN(), kInfinity, -kInfinity);
  const float limit = GENERATE(1.0f, kInfinity);
  CAPTURE(bad, limit);
  for (Device* device : devices()) {
    CHECK(std::isnan(coefficient_of(*device, bad, 1.0f, limit)));
    CHECK(std::isnan(coefficient_of(*device, 1.0f, bad, limit)));
    CHECK(std::isnan(coefficient_of(*device, bad, bad, limit)));
  }
}

TEST_CASE("clip_coefficient limits the norm that it is given, where both are finite", "[kernels][grad_norm]") {
  for (Device* device : devices()) {
    const auto of = [&](float squares, float clipped) {
      const TestTensor sum(*device, DType::kF32, {1}, {squares}), other(*device, DType::kF32, {1}, {clipped});
      const TestTensor loss(*device, DType::kF32, {1}, {2.5f}), coefficient(*device, DType::kF32, {1});
      clip_coefficient(*device, {.sum_of_squares = sum,
                                 .loss = loss,
                                 .max_norm = 2.0f,
                                 .coefficient = coefficient,
                                 .clipped_squares = other});
      return coefficient.host()[0];
    };
    CHECK(of(1e8f, 64.0f) == coefficient_of(*device, 64.0f, 2.5f, 2.0f));
    CHECK(of(1e8f, 1.0f) == 1.0f);
    CHECK(of(1e8f, 0.0f) == 1.0f);
    CHECK(std::isnan(of(kInfinity, 1.0f)));
    CHECK(std::isnan(of(1.0f, kInfinity)));
    CHECK(std::isnan(of(1.0f, std::numeric_limits<float>::quiet_NaN())));
  }
}

TEST_CASE("clip_coefficient refuses wrong arguments", "[kernels][grad_norm]") {
  Device& device = *devices()[0];
  TestTensor one(device, DType::kF32, {1}, {1.0f}), two(device, DType::kF32, {2}), half(device, DType::kBF16, {1});
  const auto message = [&](const TensorView& squares, const TensorView& loss, const TensorView& coefficient,
                           float max_norm) {
    return internal_error([&] {
      clip_coefficient(device,
                       {.sum_of_squares = squares, .loss = loss, .max_norm = max_norm, .coefficient = coefficient});
    });
  };
  CHECK(contains(message(two, one, one, 1), "clip_coefficient: sum_of_squares"));
  CHECK(contains(message(one, half, one, 1), "clip_coefficient: loss"));
  CHECK(contains(message(one, one, {}, 1), "clip_coefficient: coefficient"));
  CHECK(contains(message(one, one, one, 0), "max_norm > 0"));
  CHECK(contains(message(one, one, one, std::numeric_limits<float>::quiet_NaN()), "max_norm > 0"));
  CHECK(message(one, one, one, kInfinity).empty());
  const std::string clipped = internal_error([&] {
    clip_coefficient(
        device, {.sum_of_squares = one, .loss = one, .max_norm = 1, .coefficient = one, .clipped_squares = two});
  });
  CHECK(contains(clipped, "clip_coefficient: clipped_squares"));
}

TEST_CASE("add_sum sums in double and rounds once", "[kernels][grad_norm]") {
  for (Device* device : devices()) {
    for (int64_t N : {1, 2, 31, 1000, 4097, 50021}) {
      const std::vector<float> x = random_normal(N, 3, 10.0f);
      TestTensor values(*device, DType::kF32, {N}, x), total(*device, DType::kF32, {1}, {1000.0f});
      add_sum(*device, {.x = values, .total = total});
      double want = 1000.0, magnitudes = 1000.0;
      for (float v : x) {
        want += v;
        magnitudes += std::abs(v);
      }
      CAPTURE(N);
      CHECK(std::abs(total.host()[0] - want) <= 1.01 * 0x1p-24 * std::abs(want) + 0x1p-40 * magnitudes);
      CHECK((values.guard_intact() && total.guard_intact()));
    }
  }
}

TEST_CASE("add_sum adds to the total, and does not lose small terms", "[kernels][grad_norm]") {
  // An fp32 sum would stay at 2^25.
  std::vector<float> x(100, 1.0f);
  x[0] = 0x1p25f;
  for (Device* device : devices()) {
    TestTensor values(*device, DType::kF32, {4, 25}, x), total(*device, DType::kF32, {1}, {5.0f});
    add_sum(*device, {.x = values, .total = total});
    CHECK(total.host()[0] == static_cast<float>(0x1p25 + 104));
    add_sum(*device, {.x = values, .total = total});
    CHECK(total.host()[0] == static_cast<float>(0x1p26 + 203));
  }
}

TEST_CASE("add_sum shows a NaN or an infinity, and adds nothing for no elements", "[kernels][grad_norm]") {
  for (Device* device : devices()) {
    for (float bad : {std::numeric_limits<float>::quiet_NaN(), kInfinity}) {
      std::vector<float> x(300, 1.0f);
      x[299] = bad;
      TestTensor values(*device, DType::kF32, {300}, x), total(*device, DType::kF32, {1}, {1.0f});
      add_sum(*device, {.x = values, .total = total});
      CHECK((std::isnan(bad) ? std::isnan(total.host()[0]) : total.host()[0] == kInfinity));
    }
    TestTensor none(*device, DType::kF32, {0}), total(*device, DType::kF32, {1}, {7.0f});
    add_sum(*device, {.x = none, .total = total});
    CHECK(total.host()[0] == 7.0f);
  }
}

TEST_CASE("add_sum refuses wrong arguments", "[kernels][grad_norm]") {
  Device& device = *devices()[0];
  TestTensor x(device, DType::kF32, {3}), half(device, DType::kBF16, {3}), one(device, DType::kF32, {1});
  const auto message = [&](const TensorView& values, const TensorView& total) {
    return internal_error([&] { add_sum(device, {values, total}); });
  };
  CHECK(contains(message(half, one), "add_sum: x"));
  CHECK(contains(message(x, x), "add_sum: total"));
  CHECK(contains(message(x, {}), "add_sum: total"));
}

}  // namespace
