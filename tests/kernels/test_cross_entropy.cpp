#include <algorithm>
#include <cmath>
#include <limits>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "kernels/ops/elementwise/cross_entropy.h"
#include "tests/kernels/op_bounds.h"
#include "tests/support/catch.h"

using namespace parka;
using namespace parka::test;

namespace {

// One row of ops/elementwise/cross_entropy.h in double, and bounds on what fp32 may make of it.
struct Reference {
  double lse, loss, z_loss_value;
  std::vector<double> gradient;
  double p_error;    // relative, of a probability
  double lse_error;  // absolute; of the loss too
};

Reference reference_row(const float* x, int64_t V, int64_t target, double z_loss, double grad_scale) {
  Reference r;
  const double max = *std::max_element(x, x + V), min = *std::min_element(x, x + V);
  double sum = 0;
  for (int64_t v = 0; v < V; ++v) sum += std::exp(x[v] - max);
  r.lse = max + std::log(sum);
  r.loss = r.lse - x[target];
  r.z_loss_value = z_loss * r.lse * r.lse;
  for (int64_t v = 0; v < V; ++v) {
    const double p = std::exp(x[v] - r.lse);
    r.gradient.push_back(grad_scale * (p * (1 + 2 * z_loss * r.lse) - (v == target)));
  }
  // x - max is rounded, exp is good to 2^-20, and a sum of V terms to V roundings at worst.
  const double u = 0x1p-24;
  r.p_error = 0x1p-20 + u * (max - min) + u * static_cast<double>(V);
  r.lse_error = r.p_error + u * (std::abs(r.lse) + std::abs(r.loss));
  return r;
}

struct Case {
  int64_t T, V;
  float spread, z_loss, grad_scale;
};

std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << "T " << c.T << " V " << c.V << " spread " << c.spread << " z " << c.z_loss << " scale "
             << c.grad_scale;
}

const std::vector<Case> kCases = {{1, 1, 1.0f, 0.0f, 1.0f},          {3, 2, 3.0f, 0.5f, 1.0f},
                                  {13, 257, 2.0f, 0.0f, 0.25f},      {7, 256, 20.0f, 1e-2f, 1.0f / 1024},
                                  {3, 50304, 4.0f, 1e-4f, 1.0f / 3}, {5, 97, 3000.0f, 1e-3f, 1.0f}};

std::vector<float> random_targets(int64_t T, int64_t V, uint64_t seed) {
  std::vector<float> targets;
  for (int64_t t = 0; t < T; ++t) {
    targets.push_back(
        static_cast<float>(philox4x32(seed, 2, static_cast<uint64_t>(t))[0] % static_cast<uint64_t>(V)));
  }
  targets[0] = static_cast<float>(V - 1);  // the last column, that a ragged loop would miss
  return targets;
}

TEST_CASE("the reference gradient of cross_entropy agrees with finite differences", "[kernels][cross_entropy]") {
  constexpr int64_t kV = 9, kTarget = 4;
  const double z_loss = GENERATE(0.0, 0.3), step = 0x1p-10;
  const std::vector<float> x = random_normal(kV, 1);
  const Reference r = reference_row(x.data(), kV, kTarget, z_loss, 0.5);
  int wrong = 0;
  for (int64_t v = 0; v < kV; ++v) {
    const auto objective = [&](double shift) {
      std::vector<float> moved = x;
      moved[v] += static_cast<float>(shift);
      const Reference m = reference_row(moved.data(), kV, kTarget, z_loss, 0.5);
      return std::pair(0.5 * (m.loss + m.z_loss_value), double{moved[v]});
    };
    const auto [above, x_above] = objective(step);
    const auto [below, x_below] = objective(-step);
    wrong += !(std::abs((above - below) / (x_above - x_below) - r.gradient[v]) <= 4 * step * step);
  }
  CHECK(wrong == 0);
}

TEST_CASE("cross_entropy agrees with the double reference", "[kernels][cross_entropy]") {
  const Case c = GENERATE(from_range(kCases));
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  CAPTURE(c, name_of(dtype));
  const std::vector<float> x = random_values(dtype, c.T * c.V, 2, c.spread), targets = random_targets(c.T, c.V, 3);
  for (Device* device : devices()) {
    TestTensor logits(*device, dtype, {c.T, c.V}, x), target(*device, DType::kI32, {c.T}, targets);
    TestTensor loss(*device, DType::kF32, {c.T}), z_value(*device, DType::kF32, {c.T});
    cross_entropy(*device, {.logits = logits,
                            .targets = target,
                            .loss = loss,
                            .z_loss_value = z_value,
                            .z_loss = c.z_loss,
                            .grad_scale = c.grad_scale});
    const std::vector<float> losses = loss.host(), z_values = z_value.host(), gradient = logits.host();
    int wrong_loss = 0, wrong_z = 0, wrong_gradient = 0;
    for (int64_t t = 0; t < c.T; ++t) {
      const auto target_t = static_cast<int64_t>(targets[t]);
      const Reference r = reference_row(x.data() + t * c.V, c.V, target_t, c.z_loss, c.grad_scale);
      wrong_loss += !(std::abs(losses[t] - r.loss) <= r.lse_error);
      const double z_bound = 2.01 * c.z_loss * std::abs(r.lse) * r.lse_error + 0x1p-22 * r.z_loss_value;
      wrong_z += !(std::abs(z_values[t] - r.z_loss_value) <= z_bound);
      const double factor = 1 + 2 * c.z_loss * std::abs(r.lse);
      for (int64_t v = 0; v < c.V; ++v) {
        const double p = r.gradient[v] / c.grad_scale + (v == target_t);
        const double bound = std::abs(p) * (r.p_error + 2 * c.z_loss * r.lse_error) + 0x1p-22 * factor;
        wrong_gradient += !(std::abs(gradient[t * c.V + v] - r.gradient[v]) <=
                            c.grad_scale * bound + 1.01 * unit_roundoff(dtype) * std::abs(r.gradient[v]));
      }
    }
    CHECK(wrong_loss == 0);
    CHECK(wrong_z == 0);
    CHECK(wrong_gradient == 0);
    CHECK((logits.guard_intact() && loss.guard_intact() && z_value.guard_intact()));
  }
}

TEST_CASE("cross_entropy neither reads nor writes columns that pad rows", "[kernels][cross_entropy]") {
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  const auto [V, padding] = GENERATE(table<int64_t, int64_t>({{131, 13}, {50278, 10}, {1, 15}}));
  const int64_t T = 5, stride = V + padding;
  CAPTURE(V, name_of(dtype));
  std::vector<float> targets = random_targets(T, V, 5);
  targets[3] = kIgnoreTarget;
  const std::vector<float> x = random_values(dtype, T * V, 4);
  std::vector<float> padded(static_cast<size_t>(T * stride), std::numeric_limits<float>::infinity());
  for (int64_t t = 0; t < T; ++t) std::copy_n(x.begin() + t * V, V, padded.begin() + t * stride);
  for (Device* device : devices()) {
    const TestTensor dense(*device, dtype, {T, V}, x), rows(*device, dtype, {T, stride}, padded);
    const TestTensor target(*device, DType::kI32, {T}, targets);
    const TestTensor loss(*device, DType::kF32, {T}), want_loss(*device, DType::kF32, {T});
    CrossEntropy call{.logits = dense, .targets = target, .loss = want_loss, .z_loss_value = {}, .z_loss = 1e-3f};
    cross_entropy(*device, call);
    call.logits = rows;
    call.loss = loss;
    call.padding = padding;
    cross_entropy(*device, call);
    const std::vector<float> want = dense.host(), got = rows.host();
    const float bound = 2.0f * unit_roundoff(dtype);  // sums over a row may begin elsewhere
    int wrong = 0;
    for (int64_t t = 0; t < T; ++t) {
      for (int64_t v = 0; v < stride; ++v) {
        const float value = got[t * stride + v];
        wrong += v < V ? !(std::abs(value - want[t * V + v]) <= bound * std::abs(want[t * V + v]) + 1e-7f)
                       : value != std::numeric_limits<float>::infinity();
      }
      wrong += !(std::abs(loss.host()[t] - want_loss.host()[t]) <= 1e-5f);
    }
    CAPTURE(device->name());
    CHECK(wrong == 0);
    CHECK((rows.guard_intact() && loss.guard_intact()));
  }
}

TEST_CASE("cross_entropy leaves the logits alone without write_gradient", "[kernels][cross_entropy]") {
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  const int64_t T = 5, V = 131;
  for (Device* device : devices()) {
    const std::vector<float> x = random_values(dtype, T * V, 4);
    std::vector<float> targets = random_targets(T, V, 5);
    targets[3] = kIgnoreTarget;
    TestTensor logits(*device, dtype, {T, V}, x), target(*device, DType::kI32, {T}, targets);
    TestTensor loss(*device, DType::kF32, {T}), again(*device, DType::kF32, {T});
    const std::vector<std::byte> before = logits.bytes();
    CrossEntropy call{
        .logits = logits, .targets = target, .loss = loss, .z_loss_value = {}, .write_gradient = false};
    cross_entropy(*device, call);
    CHECK(logits.bytes() == before);
    call.loss = again;
    call.write_gradient = true;
    cross_entropy(*device, call);
    CHECK(again.bytes() == loss.bytes());
    CHECK(logits.bytes() != before);
  }
}

TEST_CASE("cross_entropy gives ignored rows loss 0 and gradient 0, whatever they hold",
          "[kernels][cross_entropy]") {
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  const int64_t T = 3, V = 37;
  std::vector<float> x = random_values(dtype, T * V, 6);
  x[2 * V + 5] = std::nanf("");
  for (Device* device : devices()) {
    TestTensor logits(*device, dtype, {T, V}, x), loss(*device, DType::kF32, {T}),
        z_value(*device, DType::kF32, {T});
    TestTensor target(*device, DType::kI32, {T}, {kIgnoreTarget, 7, kIgnoreTarget});
    cross_entropy(*device,
                  {.logits = logits, .targets = target, .loss = loss, .z_loss_value = z_value, .z_loss = 1});
    const std::vector<float> losses = loss.host(), z_values = z_value.host(), gradient = logits.host();
    CHECK((losses[0] == 0 && losses[1] > 0 && losses[2] == 0));
    CHECK((z_values[0] == 0 && z_values[1] > 0 && z_values[2] == 0));
    int wrong = 0;
    for (int64_t v = 0; v < V; ++v) wrong += gradient[v] != 0 || gradient[V + v] == 0 || gradient[2 * V + v] != 0;
    CHECK(wrong == 0);
  }
}

TEST_CASE("cross_entropy counts padding columns in the softmax", "[kernels][cross_entropy]") {
  for (Device* device : devices()) {
    TestTensor logits(*device, DType::kF32, {1, 8}, std::vector<float>(8, 0.5f)), loss(*device, DType::kF32, {1});
    TestTensor target(*device, DType::kI32, {1}, {2});
    cross_entropy(*device,
                  {.logits = logits, .targets = target, .loss = loss, .z_loss_value = {}, .grad_scale = 4});
    CHECK(std::abs(loss.host()[0] - std::log(8.0)) <= 0x1p-21);
    CHECK(logits.host() == std::vector<float>{0.5f, 0.5f, -3.5f, 0.5f, 0.5f, 0.5f, 0.5f, 0.5f});
  }
}

// What linear layers use for output gradients: one scale, or one per 1x128.
const std::vector<Format> kGradientFormats = {{DType::kE5M2, Scaling::kTensor},
                                              {DType::kE4M3, Scaling::kTensor},
                                              {DType::kE4M3, Scaling::kGroup, 128, DType::kF32}};

// Elements that rounding `want` to half a last place, or to half the smallest number, does not explain; `slack` of
// fp32 aside.
int count_beyond_rounding(const TestMatrix& got, const std::vector<double>& want, double slack) {
  const ScaledView view = got;
  const Float8Traits& traits = float8_traits(view.data.dtype);
  const std::vector<float> values = got.host(), scales = got.scale->host();
  const int64_t cols = view.num_cols(), groups = view.scaling == Scaling::kTensor ? 1 : ceil_div(cols, view.group);
  int beyond = 0;
  for (int64_t i = 0; i < view.data.numel(); ++i) {
    const double scale =
        view.scaling == Scaling::kTensor ? scales[0] : scales[i / cols * groups + i % cols / view.group];
    const double half_place =
        std::max(std::ldexp(std::abs(want[i]), -traits.mantissa_bits - 1), scale * traits.min_subnormal / 2);
    beyond += !(std::abs(values[i] - want[i]) <= 1.001 * half_place + slack);
  }
  return beyond;
}

TEST_CASE("cross_entropy leaves its gradient in FP8, in rows and transposed", "[kernels][cross_entropy][head]") {
  const Format format = GENERATE(from_range(kGradientFormats));
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  // Whole tiles, ragged ones, and rows of other lengths than multiples of 16 without and with padding.
  const auto [T, V, padding] =
      GENERATE(table<int64_t, int64_t, int64_t>({{256, 512, 0}, {144, 1000, 8}, {37, 1001, 7}, {13, 250, 0}}));
  const int64_t cols = V + padding;
  const float grad_scale = 1.0f / 300, factor = 0.5f, z_loss = 1e-3f, g = grad_scale * factor;
  CAPTURE(name_of(dtype), name_of(format.dtype), T, V);
  std::vector<float> targets = random_targets(T, V, 11);
  targets[T / 2] = kIgnoreTarget;
  const std::vector<float> x = random_values(dtype, T * V, 12, 4.0f);
  std::vector<float> padded(static_cast<size_t>(T * cols), std::numeric_limits<float>::infinity());
  std::vector<double> want(padded.size(), 0.0), want_t(want);
  for (int64_t t = 0; t < T; ++t) {
    std::copy_n(x.begin() + t * V, V, padded.begin() + t * cols);
    if (t == T / 2) continue;
    const Reference r =
        reference_row(x.data() + t * V, V, static_cast<int64_t>(targets[t]), double{z_loss}, double{g});
    for (int64_t v = 0; v < V; ++v) want[t * cols + v] = want_t[v * T + t] = r.gradient[v];
  }
  for (Device* device : devices()) {
    std::vector<double> want_scaled = want;
    const TestTensor logits(*device, dtype, {T, cols}, padded), target(*device, DType::kI32, {T}, targets);
    const TestTensor loss(*device, DType::kF32, {T}), loss_alone(*device, DType::kF32, {T});
    const TestTensor grad_factor(*device, DType::kF32, {1}, {factor});
    const TestMatrix codes = format.make(*device, T, cols), codes_t = format.make(*device, cols, T);
    ScaledView transposed = codes_t;
    if (format.scaling == Scaling::kTensor) transposed.scale = codes.scale->view();
    const std::vector<std::byte> before = logits.bytes();
    CrossEntropy call{.logits = logits,
                      .targets = target,
                      .loss = loss,
                      .z_loss_value = {},
                      .z_loss = z_loss,
                      .grad_scale = grad_scale,
                      .grad_factor = grad_factor,
                      .padding = padding,
                      .d_logits = codes,
                      .d_logits_t = transposed};
    cross_entropy(*device, call);
    if (format.scaling == Scaling::kTensor) {
      // Each row is scaled so that its gradient at the target is a number of the format.
      const std::vector<float> values = codes.host();
      int far = 0;
      for (int64_t t = 0; t < T; ++t) {
        if (t == T / 2) continue;
        const int64_t at = t * cols + static_cast<int64_t>(targets[t]);
        const double factor = values[at] / want[at];
        far += !(std::abs(factor - 1) <= (format.dtype == DType::kE5M2 ? 0.126 : 0.063));
        for (int64_t v = 0; v < V; ++v) want_scaled[t * cols + v] = factor * want[t * cols + v];
      }
      CHECK(far == 0);
    }
    CHECK(count_beyond_rounding(codes, want_scaled, 2e-6 * g) == 0);
    if (format.scaling == Scaling::kTensor) {
      CHECK(codes.scale->host()[0] == g / (format.dtype == DType::kE5M2 ? 0x1p15f : 0x1p8f));
      const std::vector<float> rows = codes.data.host(), columns = codes_t.data.host();
      int differ = 0;
      for (int64_t i = 0; i < T * cols; ++i) differ += rows[i] != columns[i % cols * T + i / cols];
      CHECK(differ == 0);
    } else {
      CHECK(count_beyond_rounding(codes_t, want_t, 2e-6 * g) == 0);
    }
    CHECK(logits.bytes() == before);
    CHECK((codes.guard_intact() && codes_t.guard_intact() && loss.guard_intact()));
    // One of the two alone has the same bits, and so has the loss without a gradient.
    const TestMatrix alone = format.make(*device, T, cols);
    call.d_logits = alone;
    call.d_logits_t = {};
    cross_entropy(*device, call);
    CHECK(same_bits(alone, codes));
    call.d_logits = {};
    call.loss = loss_alone;
    call.write_gradient = false;
    cross_entropy(*device, call);
    CHECK(loss_alone.bytes() == loss.bytes());
  }
}

TEST_CASE("an FP8 gradient of the logits shows a bad logit, and saturates where z-loss takes it beyond its range",
          "[kernels][cross_entropy][head]") {
  const int64_t T = 3, V = 64;
  std::vector<float> x(static_cast<size_t>(T * V), 0.0f);
  x[5] = std::numeric_limits<float>::quiet_NaN();
  x[V + 7] = 1000;  // a probability of 1, times 1 + 2 * 1000 z
  for (Device* device : devices()) {
    const TestTensor logits(*device, DType::kF32, {T, V}, x), target(*device, DType::kI32, {T}, {1, 2, 3});
    const TestTensor loss(*device, DType::kF32, {T});
    const TestMatrix codes(*device, DType::kE5M2, T, V, Scaling::kTensor);
    cross_entropy(*device, {.logits = logits,
                            .targets = target,
                            .loss = loss,
                            .z_loss_value = {},
                            .z_loss = 1e-3f,
                            .grad_scale = 0.25f,
                            .d_logits = codes});
    const std::vector<float> values = codes.host();
    int wrong = 0;
    for (int64_t v = 0; v < V; ++v) wrong += !std::isnan(values[v]) || !std::isfinite(values[2 * V + v]);
    CHECK(wrong == 0);
    CHECK(values[V + 7] == 1.75f * 0.25f);
    CHECK(values[V + 2] == -0.25f);
  }
}

TEST_CASE("cross_entropy takes a factor of the gradient from the device", "[kernels][cross_entropy]") {
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  const int64_t T = 5, V = 131;
  const std::vector<float> x = random_values(dtype, T * V, 4), targets = random_targets(T, V, 5);
  for (Device* device : devices()) {
    TestTensor given(*device, dtype, {T, V}, x), multiplied(*device, dtype, {T, V}, x);
    TestTensor target(*device, DType::kI32, {T}, targets), loss(*device, DType::kF32, {T});
    TestTensor factor(*device, DType::kF32, {1}, {0.125f}), other_loss(*device, DType::kF32, {T});
    cross_entropy(*device, {.logits = given,
                            .targets = target,
                            .loss = loss,
                            .z_loss_value = {},
                            .z_loss = 0.1f,
                            .grad_scale = 0.375f});
    cross_entropy(*device, {.logits = multiplied,
                            .targets = target,
                            .loss = other_loss,
                            .z_loss_value = {},
                            .z_loss = 0.1f,
                            .grad_scale = 3.0f,
                            .grad_factor = factor});
    CHECK(multiplied.host() == given.host());
    CHECK(other_loss.host() == loss.host());  // the loss itself is not scaled
  }
}

TEST_CASE("cross_entropy takes huge logits", "[kernels][cross_entropy]") {
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  const float huge = 9984;  // bf16 holds it
  for (Device* device : devices()) {
    TestTensor logits(*device, dtype, {2, 3}, {huge, -huge, huge, -huge, -huge, -huge});
    TestTensor target(*device, DType::kI32, {2}, {1, 2}), loss(*device, DType::kF32, {2});
    cross_entropy(*device, {.logits = logits, .targets = target, .loss = loss, .z_loss_value = {}});
    const std::vector<float> losses = loss.host(), gradient = logits.host();
    CHECK(std::abs(losses[0] - (2.0 * huge + std::log(2.0))) <= 1.01 * 0x1p-24 * 2 * huge);
    CHECK(std::abs(losses[1] - std::log(3.0)) <= 0x1p-21);
    const double third = 1.0 / 3;
    const double want[] = {0.5, -1, 0.5, third, third, third - 1};
    int wrong = 0;
    for (int i = 0; i < 6; ++i)
      wrong += !(std::abs(gradient[i] - want[i]) <= 1.01 * unit_roundoff(dtype) + 0x1p-21);
    CHECK(wrong == 0);
  }
}

TEST_CASE("cross_entropy shows a bad logit in its row alone", "[kernels][cross_entropy]") {
  const float bad = GENERATE(std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity());
  const int64_t T = 3, V = 101;
  const int64_t where = GENERATE(int64_t{0}, int64_t{63}, int64_t{100});
  CAPTURE(bad, where);
  std::vector<float> x = random_normal(T * V, 7);
  x[V + where] = bad;
  for (Device* device : devices()) {
    TestTensor logits(*device, DType::kF32, {T, V}, x), target(*device, DType::kI32, {T}, {1, 2, 3});
    TestTensor loss(*device, DType::kF32, {T}), z_value(*device, DType::kF32, {T});
    cross_entropy(*device,
                  {.logits = logits, .targets = target, .loss = loss, .z_loss_value = z_value, .z_loss = 1});
    const std::vector<float> losses = loss.host(), z_values = z_value.host(), gradient = logits.host();
    CHECK((std::isfinite(losses[0]) && std::isnan(losses[1]) && std::isfinite(losses[2])));
    CHECK((std::isfinite(z_values[0]) && std::isnan(z_values[1]) && std::isfinite(z_values[2])));
    int wrong = 0;
    for (int64_t i = 0; i < T * V; ++i) wrong += std::isnan(gradient[i]) != (i / V == 1);
    CHECK(wrong == 0);
  }
}

TEST_CASE("cross_entropy refuses a target outside the vocabulary before it writes", "[kernels][cross_entropy]") {
  const int bad = GENERATE(-1, 5, -101, 1 << 20);
  Device& device = *devices()[0];
  const std::vector<float> x = random_normal(20, 8);
  TestTensor logits(device, DType::kF32, {4, 5}, x),
      target(device, DType::kI32, {4}, {0, 4, static_cast<float>(bad), 1});
  TestTensor loss(device, DType::kF32, {4});
  const std::string message = bad_input_error([&] { cross_entropy(device, {logits, target, loss, {}}); });
  CHECK(contains(message, "cross_entropy: row 2 has target " + std::to_string(bad)));
  CHECK(logits.host() == x);
}

TEST_CASE("cross_entropy gives the same bits on any number of threads", "[kernels][cross_entropy]") {
  const int64_t T = 41, V = 203;
  Device& device = *devices()[0];
  TestTensor target(device, DType::kI32, {T}, random_targets(T, V, 9)), loss(device, DType::kF32, {T});
  CHECK(same_on_one_thread([&] {
    TestTensor logits(device, DType::kF32, {T, V}, random_normal(T * V, 10));
    cross_entropy(device, {logits, target, loss, {}, 0.1f});
    return logits.bytes();
  }));
}

TEST_CASE("cross_entropy accepts no rows and refuses wrong arguments", "[kernels][cross_entropy]") {
  Device& device = *devices()[0];
  TestTensor logits(device, DType::kF32, {4, 5}), target(device, DType::kI32, {4}, {0, 1, 2, 3});
  TestTensor loss(device, DType::kF32, {4}), half(device, DType::kBF16, {4});
  const auto message = [&](const TensorView& x, const TensorView& y, const TensorView& l, const TensorView& z) {
    return internal_error([&] { cross_entropy(device, {x, y, l, z}); });
  };
  cross_entropy(device, {logits.view().rows(0, 0), target.view().rows(0, 0), loss.view().rows(0, 0), {}});
  CHECK((std::isnan(logits.host()[0]) && std::isnan(loss.host()[0])));
  CHECK(contains(message(target, target, loss, {}), "cross_entropy: logits"));
  CHECK(contains(message(logits, loss, loss, {}), "cross_entropy: targets"));
  CHECK(contains(message(logits, target, half, {}), "cross_entropy: loss"));
  CHECK(contains(message(logits, target, loss, half), "cross_entropy: z_loss_value"));
  CHECK(contains(message(logits, target.view().rows(0, 3), loss, {}), "cross_entropy: targets"));
  CHECK(contains(message(TensorView(logits.view().data, DType::kF32, {4, 0}), target, loss, {}), "one column"));
  const auto codes_message = [&](const ScaledView& d_logits, const ScaledView& d_logits_t) {
    return internal_error([&] {
      cross_entropy(device, {.logits = logits,
                             .targets = target,
                             .loss = loss,
                             .z_loss_value = {},
                             .d_logits = d_logits,
                             .d_logits_t = d_logits_t});
    });
  };
  const TestMatrix codes(device, DType::kE5M2, 4, 5, Scaling::kTensor),
      codes_t(device, DType::kE5M2, 5, 4, Scaling::kTensor);
  CHECK(contains(codes_message(codes_t, {}), "cross_entropy: d_logits"));
  CHECK(contains(codes_message({}, codes), "cross_entropy: d_logits_t"));
  CHECK(contains(codes_message(logits.view(), {}), "wanted fp8"));
  CHECK(contains(codes_message(codes, codes_t), "scale"));
}

}  // namespace
