#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "core/philox.h"
#include "kernels/ops/elementwise/side_network.h"
#include "tests/kernels/op_bounds.h"
#include "tests/support/catch.h"

using namespace parka;
using namespace parka::test;

namespace {

using Size = std::pair<int64_t, int64_t>;
constexpr DType kPlain[] = {DType::kF32, DType::kBF16};
constexpr MixWeight kKinds[] = {MixWeight::kScalar, MixWeight::kLogistic};

// Around the ends of packs, blocks and pieces, and random ones.
std::vector<Size> sizes() {
  std::vector<Size> all = {{1, 1}, {3, 7}, {1, 8}, {64, 128}, {63, 131}, {65, 128}, {300, 256}, {4, 2048}};
  for (uint64_t i = 0; i < 10; ++i) {
    const auto draw = philox4x32(71, 1, i);
    all.emplace_back(1 + draw[0] % 200, 1 + draw[1] % 700);
  }
  return all;
}

double weight_of(MixWeight kind, double c) { return kind == MixWeight::kScalar ? c : 1 / (1 + std::exp(-c)); }
double slope_of(MixWeight kind, double c) {
  const double w = weight_of(kind, c);
  return kind == MixWeight::kScalar ? 1 : w * (1 - w);
}

}  // namespace

TEST_CASE("mix_forward is the weighted sum of float64, with a branch and without", "[kernels][mix]") {
  for (Device* device : devices()) {
    for (const DType dtype : kPlain) {
      for (const MixWeight kind : kKinds) {
        for (const auto& [T, C] : sizes()) {
          const int64_t n = T * C;
          const bool has_branch = n % 2 == 0;
          const std::vector<float> x = random_values(dtype, n, 1), y = random_values(dtype, n, 2),
                                   branch = random_values(dtype, n, 3), c = random_values(dtype, 1, 4 + n);
          const TestTensor of_x(*device, dtype, {T, C}, x), of_y(*device, dtype, {T, C}, y),
              of_branch(*device, dtype, {T, C}, branch), of_c(*device, dtype, {1}, c), out(*device, dtype, {T, C}),
              difference(*device, dtype, {T, C});
          mix_forward(*device, {.kind = kind,
                                .c = of_c,
                                .x = of_x,
                                .residual = of_y,
                                .branch = has_branch ? of_branch.view() : TensorView{},
                                .out = out,
                                .difference = difference});
          const std::vector<float> got = out.host(), left = difference.host();
          const double w = weight_of(kind, c[0]), unit = 1.01 * unit_roundoff(dtype);
          int64_t wrong = 0;
          for (int64_t i = 0; i < n; ++i) {
            const double other = double{y[i]} + (has_branch ? branch[i] : 0.0f);
            const double want = (1 - w) * x[i] + w * other;
            const double terms = std::abs(x[i]) + std::abs(y[i]) + std::abs(branch[i]);
            const double error = 1e-6 * (1 + std::abs(w)) * terms;  // five roundings, and exp
            wrong += !(std::abs(got[i] - want) <= unit * std::abs(want) + error);
            wrong += !(std::abs(left[i] - (other - x[i])) <= unit * std::abs(other - x[i]) + error);
          }
          CAPTURE(device->name(), name_of(dtype), int(kind), T, C);
          CHECK(wrong == 0);
          CHECK((of_x.host() == x && of_y.host() == y && out.guard_intact() && difference.guard_intact()));
        }
      }
    }
  }
}

TEST_CASE("mix_backward is the derivative of mix_forward", "[kernels][mix]") {
  for (Device* device : devices()) {
    for (const DType dtype : kPlain) {
      for (const MixWeight kind : kKinds) {
        for (const auto& [T, C] : sizes()) {
          const int64_t n = T * C;
          const DType sum_dtype = n % 2 == 0 ? DType::kF32 : dtype;
          const std::vector<float> difference = random_values(dtype, n, 5), gradient = random_values(dtype, n, 6),
                                   c = random_values(dtype, 1, 7 + n), before = random_values(sum_dtype, 1, 8);
          const TestTensor of_difference(*device, dtype, {T, C}, difference),
              d_out(*device, dtype, {T, C}, gradient), of_c(*device, dtype, {1}, c), d_x(*device, dtype, {T, C}),
              d_y(*device, dtype, {T, C}), d_c(*device, sum_dtype, {1}, before),
              again(*device, sum_dtype, {1}, before);
          const auto run = [&](const TensorView& sum) {
            mix_backward(*device, {.kind = kind,
                                   .c = of_c,
                                   .difference = of_difference,
                                   .d_out = d_out,
                                   .d_x = d_x,
                                   .d_y = d_y,
                                   .d_c = sum});
          };
          run(d_c);
          run(again);
          const double w = weight_of(kind, c[0]), unit = 1.01 * unit_roundoff(dtype) + 1e-6;
          const std::vector<float> got_x = d_x.host(), got_y = d_y.host();
          double sum = 0, magnitude = 0;
          int64_t wrong = 0;
          for (int64_t i = 0; i < n; ++i) {
            wrong += !(std::abs(got_x[i] - (1 - w) * gradient[i]) <=
                       unit * std::abs((1 - w) * gradient[i]) + 2e-7 * (1 + std::abs(w)) * std::abs(gradient[i]));
            wrong += !(std::abs(got_y[i] - w * gradient[i]) <= unit * std::abs(w * gradient[i]));
            sum += double{gradient[i]} * difference[i];
            magnitude += std::abs(double{gradient[i]} * difference[i]);
          }
          const double want = before[0] + slope_of(kind, c[0]) * sum;
          CAPTURE(device->name(), name_of(dtype), int(kind), T, C, got_x[0], got_y[0], w);
          CHECK(wrong == 0);
          // A thread adds up to 32 products, a warp and a block a few sums: 1e-5 is above the bound of all of them.
          CHECK(std::abs(d_c.host()[0] - want) <=
                1.01 * unit_roundoff(sum_dtype) * std::abs(want) + 1e-5 * (1 + magnitude) * slope_of(kind, c[0]));
          CHECK((again.bytes() == d_c.bytes()));
          CHECK((of_difference.host() == difference && d_x.guard_intact() && d_y.guard_intact() &&
                 d_c.guard_intact()));
        }
      }
    }
  }
}

TEST_CASE("mix ops work in place, and a weight of 1 hands on y itself", "[kernels][mix]") {
  for (Device* device : devices()) {
    for (const DType dtype : kPlain) {
      const std::vector<float> x = random_values(dtype, 33 * 40, 9), y = random_values(dtype, 33 * 40, 10);
      const TestTensor of_x(*device, dtype, {33, 40}, x), of_y(*device, dtype, {33, 40}, y),
          one(*device, dtype, {1}, {1.0f});
      mix_forward(
          *device,
          {.kind = MixWeight::kScalar, .c = one, .x = of_x, .residual = of_y, .out = of_y, .difference = of_x});
      CHECK((of_y.host() == y));
      const TestTensor want(*device, dtype, {33, 40}), half(*device, dtype, {1}, {0.5f}),
          gradient(*device, dtype, {33, 40}, y), d_x(*device, dtype, {33, 40}), d_y(*device, dtype, {33, 40});
      mix_backward(
          *device,
          {.kind = MixWeight::kLogistic, .c = half, .difference = of_x, .d_out = gradient, .d_x = d_x, .d_y = d_y});
      mix_backward(*device, {.kind = MixWeight::kLogistic,
                             .c = half,
                             .difference = of_x,
                             .d_out = gradient,
                             .d_x = of_x,
                             .d_y = gradient});
      CHECK((of_x.bytes() == d_x.bytes() && gradient.bytes() == d_y.bytes()));
    }
  }
}

TEST_CASE("mix ops show bad values, do nothing for no rows, and take rows that begin anywhere", "[kernels][mix]") {
  for (Device* device : devices()) {
    std::vector<float> values(3 * 16, 1.0f);
    values[20] = std::nanf("");
    const TestTensor bad(*device, DType::kBF16, {3, 16}, values),
        good(*device, DType::kBF16, {3, 16}, std::vector<float>(48, 2.0f)), out(*device, DType::kBF16, {3, 16}),
        c(*device, DType::kBF16, {1}, {0.5f}), d_c(*device, DType::kF32, {1}, {0.0f}),
        none(*device, DType::kBF16, {0, 16});
    mix_forward(*device, {.kind = MixWeight::kLogistic, .c = c, .x = good, .residual = bad, .out = out});
    mix_backward(*device, {.kind = MixWeight::kLogistic, .c = c, .difference = good, .d_out = bad, .d_c = d_c});
    const std::vector<float> got = out.host();
    int64_t wrong = 0;
    for (int64_t i = 0; i < 48; ++i) wrong += std::isfinite(got[i]) != (i != 20);
    CHECK(wrong == 0);
    CHECK(std::isnan(d_c.host()[0]));
    mix_forward(*device, {.kind = MixWeight::kLogistic, .c = c, .x = none, .residual = none, .out = none});
    mix_backward(*device, {.kind = MixWeight::kLogistic, .c = c, .difference = none, .d_out = none});
    CHECK(none.guard_intact());
    const auto row = [](const TestTensor& t) { return t.view().reshaped({48}).rows(1, 30).reshaped({3, 10}); };
    mix_forward(*device,
                {.kind = MixWeight::kScalar, .c = c, .x = row(good), .residual = row(good), .out = row(out)});
    CHECK((out.host()[1] == 2.0f && out.host()[30] == 2.0f && out.host()[31] == got[31]));
  }
}

TEST_CASE("mix ops give the same bits on any number of threads", "[kernels][mix]") {
  Device& device = cpu_device();
  const std::vector<float> x = random_bf16(300 * 77, 11), y = random_bf16(300 * 77, 12);
  CHECK(same_on_one_thread([&] {
    const TestTensor a(device, DType::kBF16, {300, 77}, x), b(device, DType::kBF16, {300, 77}, y),
        c(device, DType::kBF16, {1}, {0.25f}), d_c(device, DType::kF32, {1}, {1.0f});
    mix_forward(device, {.kind = MixWeight::kLogistic, .c = c, .x = a, .residual = b, .out = b});
    mix_backward(device, {.kind = MixWeight::kLogistic, .c = c, .difference = a, .d_out = b, .d_c = d_c});
    return d_c.bytes();
  }));
}

TEST_CASE("mix ops refuse wrong arguments", "[kernels][mix]") {
  Device& device = cpu_device();
  const TestTensor x(device, DType::kF32, {3, 4}), c(device, DType::kF32, {1}), half(device, DType::kBF16, {1}),
      shorter(device, DType::kF32, {3, 3});
  const auto forward = [&](const TensorView& weight, const TensorView& y, const TensorView& out) {
    return internal_error(
        [&] { mix_forward(device, {.kind = MixWeight::kScalar, .c = weight, .x = x, .residual = y, .out = out}); });
  };
  CHECK(contains(forward(half, x, x), "mix_forward: c is bf16"));
  CHECK(contains(forward(x, x, x), "mix_forward: c is fp32 [3, 4]"));
  CHECK(contains(forward(c, shorter, x), "mix_forward: residual is fp32 [3, 3]"));
  CHECK(contains(forward(c, x, {}), "mix_forward: out"));
  CHECK(contains(internal_error([&] {
                   mix_backward(device, {.kind = MixWeight::kScalar, .c = c, .difference = shorter, .d_out = x});
                 }),
                 "mix_backward: difference is fp32 [3, 3]"));
  CHECK(contains(internal_error([&] {
                   mix_backward(device,
                                {.kind = MixWeight::kScalar, .c = c, .difference = x, .d_out = x, .d_c = shorter});
                 }),
                 "mix_backward: d_c is fp32 [3, 3]"));
}
