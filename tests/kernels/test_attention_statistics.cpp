#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include "kernels/ops/attention/attention.h"
#include "tests/kernels/attention_reference.h"
#include "tests/kernels/op_bounds.h"
#include "tests/kernels/op_checks.h"
#include "tests/support/catch.h"

// What attention's backward pass computes, against loops in double; on every other device against the CPU.
using namespace parka;
using namespace parka::test;

namespace {

// One key, primes, grouped heads, more rows of heads than a GPU has warps for, heads wider than a warp.
const std::vector<AttentionShape> kShapes = {{1, 1, 1, 1, 1},   {3, 7, 2, 2, 5},    {2, 13, 6, 2, 16},
                                             {1, 67, 4, 1, 33}, {2, 131, 2, 1, 64}, {9, 300, 4, 2, 2}};

AttentionTotals read(const TestTensor& totals) {
  AttentionTotals result;
  const std::vector<std::byte> bytes = totals.bytes();
  std::memcpy(&result, bytes.data(), sizeof(result));
  return result;
}

// The tensors of one call, whose output `out` is off by `error`, relative to each element.
struct Case {
  AttentionShape s;
  DType dtype;
  FirstKeys first_keys;
  std::vector<float> qkv, out, d_out, lse;
  float scale;

  Case(const AttentionShape& shape, DType type, float error, const FirstKeys& first = {})
      : s(shape),
        dtype(type),
        first_keys(first),
        qkv(random_values(type, s.T() * s.width(), 1)),
        d_out(random_values(type, s.T() * s.out_width(), 2)),
        scale(1.0f / std::sqrt(static_cast<float>(s.D))) {
    const TestTensor x(cpu_device(), dtype, {s.T(), s.width()}, qkv),
        y(cpu_device(), dtype, {s.T(), s.out_width()}), z(cpu_device(), DType::kF32, {s.B, s.H, s.S});
    const std::unique_ptr<TestTensor> keys = keys_on(cpu_device());
    attention_forward(cpu_device(), {.qkv = x,
                                     .out = y,
                                     .lse = z,
                                     .sequence_length = s.S,
                                     .num_heads = s.H,
                                     .num_kv_heads = s.Hkv,
                                     .scale = scale,
                                     .first_key = keys ? keys->view() : TensorView{}});
    out = y.host();
    lse = z.host();
    const std::vector<float> noise = random_values(DType::kF32, static_cast<int64_t>(out.size()), 3);
    for (size_t i = 0; i < out.size(); ++i) out[i] *= 1 + error * noise[i];
  }

  std::unique_ptr<TestTensor> keys_on(Device& device) const {
    if (first_keys.empty()) return nullptr;
    return std::make_unique<TestTensor>(device, DType::kI32, std::initializer_list<int64_t>{s.T()},
                                        std::vector<float>(first_keys.begin(), first_keys.end()));
  }

  AttentionTotals on(Device& device, int64_t rows) const {
    const TestTensor x(device, dtype, {s.T(), s.width()}, qkv), y(device, dtype, {s.T(), s.out_width()}, out),
        d_y(device, dtype, {s.T(), s.out_width()}, d_out), z(device, DType::kF32, {s.B, s.H, s.S}, lse),
        totals(device, DType::kF32, {AttentionTotals::kCount});
    const std::unique_ptr<TestTensor> keys = keys_on(device);
    attention_statistics(device, {.qkv = x,
                                  .out = y,
                                  .d_out = d_y,
                                  .lse = z,
                                  .totals = totals,
                                  .rows = rows,
                                  .sequence_length = s.S,
                                  .num_heads = s.H,
                                  .num_kv_heads = s.Hkv,
                                  .scale = scale,
                                  .first_key = keys ? keys->view() : TensorView{}});
    CHECK(totals.guard_intact());
    return read(totals);
  }
};

struct PlainTotals {
  double rows = 0, sums = 0, squares = 0, delta_squares = 0, scores = 0, largest = 0;
};

PlainTotals plain_totals(const Case& c, int64_t rows) {
  const AttentionShape& s = c.s;
  const TestTensor stored(cpu_device(), c.dtype, {s.T(), s.out_width()}, c.out);
  const Doubles x = to_doubles(c.qkv), d_y = to_doubles(c.d_out), y = to_doubles(stored.host());
  PlainTotals totals;
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t b = row / s.S, i = row % s.S;
    for (int64_t h = 0; h < s.H; ++h) {
      const int64_t at = s.out(b, i, h);
      double delta = 0, sum = 0, magnitude = 0, score = 0;
      for (int64_t d = 0; d < s.D; ++d) {
        delta += d_y[at + d] * y[at + d];
        totals.delta_squares += std::pow(d_y[at + d] * y[at + d], 2);
      }
      for (int64_t j = first_key_of(c.first_keys, s, b, i); j <= i; ++j) {
        const double scaled = c.scale * dot(&x[s.q(b, i, h)], &x[s.k(b, j, h / s.group())], s.D).value;
        const double p = std::exp(scaled - c.lse[s.lse(b, i, h)]);
        const double d_s = p * (dot(&d_y[at], &x[s.v(b, j, h / s.group())], s.D).value - delta);
        sum += d_s;
        magnitude += std::abs(d_s);
        score += p * scaled;
        totals.largest = std::max(totals.largest, std::abs(scaled));
      }
      ++totals.rows;
      totals.sums += sum * sum;
      totals.squares += magnitude * magnitude;
      totals.scores += score * score;
    }
  }
  return totals;
}

// `slack` is what rounding may make of a sum that should be zero, relative to what it is the sum of.
bool is_near(double got, double want, double slack = 0) {
  return std::abs(got - want) <= 2e-5 * std::abs(want) + slack;
}

void check(const AttentionTotals& got, const PlainTotals& want) {
  CAPTURE(got.sum_norm, std::sqrt(want.sums));
  CHECK(got.rows == want.rows);
  CHECK(got.not_finite == 0);
  CHECK(is_near(got.sum_norm, std::sqrt(want.sums), 1e-5 * std::sqrt(want.squares + want.delta_squares)));
  CHECK(is_near(got.norm, std::sqrt(want.squares), 1e-5 * std::sqrt(want.delta_squares)));
  CHECK(is_near(got.delta_norm, std::sqrt(want.delta_squares)));
  CHECK(is_near(got.score_norm, std::sqrt(want.scores), 1e-6));
  CHECK(is_near(got.largest_score, want.largest, 1e-6));
}

}  // namespace

TEST_CASE("attention statistics are those of plain loops", "[kernels][telemetry]") {
  const AttentionShape s = GENERATE(from_range(kShapes));
  for (Device* device : devices()) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      for (const FirstKeys& first : {FirstKeys(), windowed(s, 5)}) {
        CAPTURE(s.B, s.S, s.H, s.D, name_of(dtype), first.empty(), device->name());
        const Case c(s, dtype, 0.1f, first);
        for (const int64_t rows : {int64_t{0}, std::min<int64_t>(40, s.T()), s.T()}) {
          CAPTURE(rows);
          const AttentionTotals got = c.on(*device, rows), again = c.on(*device, rows);
          check(got, plain_totals(c, rows));
          CHECK(std::memcmp(&got, &again, sizeof(got)) == 0);
        }
      }
    }
  }
}

TEST_CASE("score gradients add up to zero unless attention's output is off, and say by how much",
          "[kernels][telemetry]") {
  const AttentionShape s = {2, 131, 2, 1, 64};
  for (Device* device : devices()) {
    CAPTURE(device->name());
    const auto imbalance = [&](DType dtype, float error) {
      const AttentionTotals totals = Case(s, dtype, error).on(*device, s.T());
      return totals.sum_norm / totals.delta_norm;
    };
    CHECK(imbalance(DType::kF32, 0) < 1e-5);
    CHECK(imbalance(DType::kBF16, 0) < 0.003);  // 2^-9 at most of each product
    for (const float error : {0.02f, 0.1f}) {
      // The noise of `Case` has a variance of its own.
      const std::vector<float> noise = random_values(DType::kF32, s.T() * s.out_width(), 3);
      double squares = 0;
      for (const float n : noise) squares += double{n} * n;
      const double rms = error * std::sqrt(squares / static_cast<double>(noise.size()));
      CHECK(std::abs(imbalance(DType::kF32, error) / rms - 1) < 0.1);
    }
  }
}

TEST_CASE("rows that are not finite are counted apart in attention statistics", "[kernels][telemetry]") {
  const AttentionShape s = {1, 20, 2, 2, 4};
  for (Device* device : devices()) {
    for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
      Case c(s, DType::kF32, 0.1f);
      c.d_out[static_cast<size_t>(s.out(0, 12, 1))] = bad;  // one row of one head
      const AttentionTotals got = c.on(*device, s.T());
      CHECK((got.rows == 39 && got.not_finite == 1));
      CHECK((std::isfinite(got.sum_norm) && std::isfinite(got.norm) && std::isfinite(got.score_norm)));
    }
  }
}

TEST_CASE("attention statistics of tensors that do not fit are refused", "[kernels][telemetry]") {
  const AttentionShape s = {1, 4, 2, 2, 4};
  const TestTensor qkv(cpu_device(), DType::kF32, {s.T(), s.width()}), out(cpu_device(), DType::kF32, {4, 8}),
      narrow(cpu_device(), DType::kF32, {4, 7}), lse(cpu_device(), DType::kF32, {1, 2, 4}),
      totals(cpu_device(), DType::kF32, {AttentionTotals::kCount}), few(cpu_device(), DType::kF32, {3});
  const auto refusal = [&](const TensorView& d_out, const TensorView& into, int64_t rows) {
    const AttentionStatistics a = {.qkv = qkv,
                                   .out = out,
                                   .d_out = d_out,
                                   .lse = lse,
                                   .totals = into,
                                   .rows = rows,
                                   .sequence_length = s.S,
                                   .num_heads = s.H,
                                   .num_kv_heads = s.Hkv,
                                   .scale = 1.0f};
    return internal_error([&] { attention_statistics(cpu_device(), a); });
  };
  CHECK(contains(refusal(narrow, totals, 4), "d_out is fp32 [4, 7]"));
  CHECK(contains(refusal(out, few, 4), "totals is fp32 [3]"));
  CHECK(contains(refusal(out, totals, 5), "attention_statistics: 5 rows of qkv"));
}
