#include "kernels/ops/elementwise/pointwise.h"

#include <cmath>
#include <utility>
#include <vector>

#include "core/philox.h"
#include "tests/kernels/op_bounds.h"
#include "tests/support/catch.h"

using namespace parka;
using namespace parka::test;

namespace {

constexpr Activation kActivations[] = {Activation::kGelu, Activation::kGeluTanh, Activation::kQuickGelu,
                                       Activation::kSilu};
constexpr DType kPlain[] = {DType::kF32, DType::kBF16};
using Size = std::pair<int64_t, int64_t>;

// Around the ends of packs and blocks, and random ones.
std::vector<Size> sizes() {
  std::vector<Size> all = {{1, 1}, {3, 7}, {1, 8}, {5, 256}, {17, 257}, {16, 512}, {2, 4304}, {130, 33}};
  for (uint64_t i = 0; i < 10; ++i) {
    const auto draw = philox4x32(61, 1, i);
    all.emplace_back(1 + draw[0] % 60, 1 + draw[1] % 900);
  }
  return all;
}

// Normals, every fifth of them ten times as large.
std::vector<float> inputs(DType dtype, int64_t count) {
  std::vector<float> x = random_values(dtype, count, 62);
  for (int64_t i = 0; i < count; i += 5) x[i] *= 8;
  return x;
}

// The definitions in double, as papers write them.
double activated(Activation kind, double x) {
  switch (kind) {
    case Activation::kGelu: return 0.5 * x * std::erfc(-x / std::sqrt(2.0));
    case Activation::kGeluTanh: {
      const double inner = std::sqrt(2 / std::acos(-1.0)) * (x + 0.044715 * x * x * x);
      return inner < -4 ? x / (1 + std::exp(-2 * inner)) : 0.5 * x * (1 + std::tanh(inner));
    }
    case Activation::kQuickGelu: return x / (1 + std::exp(-1.702 * x));
    case Activation::kSilu: return x / (1 + std::exp(-x));
  }
  return 0;
}

// By central differences.
double slope(Activation kind, double x) {
  constexpr double kStep = 1e-5;
  return (activated(kind, x + kStep) - activated(kind, x - kStep)) / (2 * kStep);
}

// How much an error of 1e-6 of what the exponential is taken of changes a result left of 0, relative to it.
double argument_error(double x) { return x > 0 ? 0 : 1e-6 * (2 * std::abs(x) + x * x * std::max(1.0, -0.1 * x)); }

// How far a slope may be from its double: 1 - sig, which is known to 2e-7 until it is 0, times x and its argument's
// derivative.
double slope_error(double x) { return 3e-6 + (x > 0 && x < 12 ? 2e-7 * x * (1.8 + 0.22 * x * x) : 0); }

}  // namespace

TEST_CASE("activation_forward rounds the fp64 result", "[kernels][activation]") {
  for (Device* device : devices()) {
    for (const Activation kind : kActivations) {
      for (const DType dtype : kPlain) {
        for (const auto& [T, F] : sizes()) {
          const std::vector<float> values = inputs(dtype, T * F);
          const TestTensor x(*device, dtype, {T, F}, values), y(*device, dtype, {T, F}),
              again(*device, dtype, {T, F});
          activation_forward(*device, {.kind = kind, .x = x, .y = y});
          activation_forward(*device, {.kind = kind, .x = x, .y = again});
          const std::vector<float> got = y.host();
          int64_t wrong = 0;
          for (int64_t i = 0; i < T * F; ++i) {
            const double want = activated(kind, values[i]);
            const double relative = 1.01 * unit_roundoff(dtype) + 2e-6 + argument_error(values[i]);
            wrong += !(std::abs(got[i] - want) <= relative * std::abs(want) + 1e-36);
          }
          CAPTURE(device->name(), int(kind), name_of(dtype), T, F);
          CHECK(wrong == 0);
          CHECK((again.bytes() == y.bytes()));
          CHECK((x.host() == values && x.guard_intact() && y.guard_intact()));
        }
      }
    }
  }
}

TEST_CASE("activation_backward is the derivative of activation_forward", "[kernels][activation]") {
  for (Device* device : devices()) {
    for (const Activation kind : kActivations) {
      for (const DType dtype : kPlain) {
        for (const auto& [T, F] : sizes()) {
          const std::vector<float> values = inputs(dtype, T * F), gradient = random_values(dtype, T * F, 63);
          const TestTensor x(*device, dtype, {T, F}, values), d_y(*device, dtype, {T, F}, gradient);
          const TestTensor d_x(*device, dtype, {T, F});
          activation_backward(*device, {.kind = kind, .x = x, .d_y = d_y, .d_x = d_x});
          const std::vector<float> got = d_x.host();
          int64_t wrong = 0;
          for (int64_t i = 0; i < T * F; ++i) {
            const double want = gradient[i] * slope(kind, values[i]);
            const double error = slope_error(values[i]) * std::abs(gradient[i]);
            const double bound = 1.01 * unit_roundoff(dtype) * std::abs(want) + error;
            wrong += !(std::abs(got[i] - want) <= bound);
          }
          CAPTURE(device->name(), int(kind), name_of(dtype), T, F);
          CHECK(wrong == 0);
          CHECK((x.host() == values && d_y.host() == gradient));
          CHECK((x.guard_intact() && d_y.guard_intact() && d_x.guard_intact()));
        }
      }
    }
  }
}

TEST_CASE("activations are right far from 0, and keep bad values visible", "[kernels][activation]") {
  for (Device* device : devices()) {
    for (const Activation kind : kActivations) {
      const float most = kind == Activation::kGeluTanh ? 1e18f : 1.5e38f;  // its slope squares x
      const std::vector<float> values = {-most, -1e4f, -100.0f, -0.0f,    0.0f,     100.0f,
                                         1e4f,  most,  NAN,     INFINITY, -INFINITY};
      const auto count = static_cast<int64_t>(values.size());
      const TestTensor x(*device, DType::kF32, {1, count}, values), y(*device, DType::kF32, {1, count});
      const TestTensor d_y(*device, DType::kF32, {1, count}, std::vector<float>(values.size(), 1.0f));
      const TestTensor d_x(*device, DType::kF32, {1, count});
      activation_forward(*device, {.kind = kind, .x = x, .y = y});
      activation_backward(*device, {.kind = kind, .x = x, .d_y = d_y, .d_x = d_x});
      const std::vector<float> got = y.host(), gradient = d_x.host();
      CAPTURE(device->name(), int(kind));
      for (int64_t i = 0; i < 8; ++i) {
        CAPTURE(values[i]);
        CHECK(std::abs(got[i] - std::max(values[i], 0.0f)) <= 1e-30f);
        if (values[i] != 0) CHECK(std::abs(gradient[i] - (values[i] > 0 ? 1.0f : 0.0f)) <= 1e-30f);
        if (values[i] == 0) CHECK(std::abs(gradient[i] - 0.5f) <= 1e-6f);
      }
      CHECK((std::isnan(got[8]) && std::isnan(gradient[8])));
      CHECK(got[9] == INFINITY);
      CHECK(std::isnan(got[10]));
    }
  }
}

TEST_CASE("activation ops may write over what they read, at any address", "[kernels][activation]") {
  for (Device* device : devices()) {
    for (const DType dtype : kPlain) {
      const std::vector<float> values = random_values(dtype, 100, 64), gradient = random_values(dtype, 100, 65);
      const TestTensor x(*device, dtype, {100}, values), d_y(*device, dtype, {100}, gradient),
          again(*device, dtype, {100}, values), result(*device, dtype, {9, 11}), d_x(*device, dtype, {9, 11});
      const auto part = [](const TestTensor& t) { return t.view().rows(1, 99).reshaped({9, 11}); };
      const Activation kind = Activation::kGelu;
      activation_forward(*device, {.kind = kind, .x = part(x), .y = result});
      activation_backward(*device, {.kind = kind, .x = part(x), .d_y = part(d_y), .d_x = d_x});
      activation_backward(*device, {.kind = kind, .x = part(x), .d_y = part(d_y), .d_x = part(d_y)});
      activation_forward(*device, {.kind = kind, .x = part(again), .y = part(again)});
      std::vector<float> want = result.host(), want_gradient = d_x.host();
      want.insert(want.begin(), values[0]);
      want_gradient.insert(want_gradient.begin(), gradient[0]);
      CAPTURE(device->name(), name_of(dtype));
      CHECK((again.host() == want));
      CHECK((d_y.host() == want_gradient));
      CHECK((x.host() == values));
    }
  }
}

TEST_CASE("activation ops give the same bits on any number of threads, and do nothing for no rows",
          "[kernels][activation]") {
  Device& device = cpu_device();
  const std::vector<float> values = random_bf16(300 * 77, 66);
  CHECK(same_on_one_thread([&] {
    const TestTensor x(device, DType::kF32, {300, 77}, values), d_x(device, DType::kF32, {300, 77});
    activation_forward(device, {.kind = Activation::kGelu, .x = x, .y = x});
    activation_backward(device, {.kind = Activation::kGelu, .x = x, .d_y = x, .d_x = d_x});
    return d_x.bytes();
  }));
  for (Device* any : devices()) {
    const TestTensor none(*any, DType::kBF16, {0, 16});
    activation_forward(*any, {.kind = Activation::kGelu, .x = none, .y = none});
    activation_backward(*any, {.kind = Activation::kGelu, .x = none, .d_y = none, .d_x = none});
    CHECK(none.guard_intact());
  }
}

TEST_CASE("activation ops refuse wrong arguments", "[kernels][activation]") {
  Device& device = cpu_device();
  const TestTensor x(device, DType::kF32, {3, 4}), half(device, DType::kBF16, {3, 4}),
      ids(device, DType::kI32, {3, 4}), shorter(device, DType::kF32, {3, 3});
  const auto forward = [&](const TensorView& from, const TensorView& to) {
    return internal_error([&] { activation_forward(device, {.kind = Activation::kGelu, .x = from, .y = to}); });
  };
  const auto backward = [&](const TensorView& d_y, const TensorView& d_x) {
    return internal_error(
        [&] { activation_backward(device, {.kind = Activation::kGelu, .x = x, .d_y = d_y, .d_x = d_x}); });
  };
  CHECK(contains(forward(ids, ids), "activation_forward: x is int32"));
  CHECK(contains(forward(x, half), "activation_forward: y is bf16"));
  CHECK(contains(forward(x, shorter), "activation_forward: y is fp32 [3, 3]"));
  CHECK(contains(forward(x, {}), "activation_forward: y"));
  CHECK(contains(backward(half, x), "activation_backward: d_y is bf16"));
  CHECK(contains(backward(x, shorter), "activation_backward: d_x is fp32 [3, 3]"));
}
