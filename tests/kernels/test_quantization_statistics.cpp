#include "kernels/ops/quantize/quantization_statistics.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <map>

#include "tests/kernels/float8_devices.h"
#include "tests/kernels/moment_fixtures.h"
#include "tests/kernels/op_bounds.h"

// What quantization did, against a plain count in double; on every other device against the CPU.
using namespace parka;
using namespace parka::test;

namespace {

// Narrow, ragged, whole, and more rows than a GPU has blocks for.
const std::vector<MatrixShape> kShapes = {{0, 16}, {1, 1}, {37, 53}, {16, 16}, {129, 144}, {256, 384}, {1100, 48}};

// Such as the kernels of other devices have.
const std::vector<Format> kDeviceFormats = {{DType::kE4M3, Scaling::kTensor},
                                            {DType::kE5M2, Scaling::kTensor},
                                            {DType::kE4M3, Scaling::kGroup, 16, DType::kBF16},
                                            {DType::kE5M2, Scaling::kGroup, 32, DType::kBF16},
                                            {DType::kE4M3, Scaling::kGroup, 128, DType::kF32},
                                            {DType::kE4M3, Scaling::kBlock, 128}};

QuantizationTotals read(const TestTensor& totals) {
  QuantizationTotals result;
  const std::vector<std::byte> bytes = totals.bytes();
  std::memcpy(&result, bytes.data(), sizeof(result));
  return result;
}

QuantizationTotals totals_of(Device& device, const TensorView& x, const ScaledView& q) {
  const TestTensor totals(device, DType::kF32, {QuantizationTotals::kCount});
  quantization_statistics(device, {.x = x, .q = q, .totals = totals});
  CHECK(totals.guard_intact());
  return read(totals);
}

struct PlainTotals {
  int64_t saturated = 0, underflowed = 0, not_finite = 0;
  double amax = 0, squares = 0, error_squares = 0;
};

// `codes` without scales, `values` with them; x in rows of x_cols.
PlainTotals plain_totals(const std::vector<float>& x, int64_t x_cols, const TestMatrix& q) {
  const std::vector<float> codes = q.data.host(), values = q.host();
  const int64_t cols = q.data.view().dim[1];
  const bool is_e4m3 = q.data.view().dtype == DType::kE4M3;
  // What rounds to the largest code: 464 is half way from 448 to 480, 61440 from 57344 to 65536.
  const double largest = is_e4m3 ? 448 : 57344, threshold = is_e4m3 ? 464 : 61440;
  PlainTotals totals;
  for (size_t i = 0; i < values.size(); ++i) {
    const double before = x[i / cols * x_cols + i % cols], after = values[i];
    if (!std::isfinite(before) || !std::isfinite(after)) {
      ++totals.not_finite;
      continue;
    }
    const double scale = codes[i] == 0 ? 0 : after / codes[i];
    totals.saturated += std::abs(codes[i]) == largest && std::abs(before) > threshold * scale * (1 + 1e-6);
    totals.underflowed += codes[i] == 0 && before != 0;
    totals.amax = std::max(totals.amax, std::abs(before));
    totals.squares += before * before;
    totals.error_squares += (before - after) * (before - after);
  }
  return totals;
}

bool is_near(double got, double want) { return std::abs(got - want) <= 1e-6 * std::abs(want); }

void check(const QuantizationTotals& got, const PlainTotals& want, const TestMatrix& q) {
  CHECK(got.elements == static_cast<float>(q.data.view().numel()));
  CHECK(got.amax == static_cast<float>(want.amax));
  const bool has_scale = got.elements > 0 && q.view().scaling == Scaling::kTensor;
  CHECK(got.scale == (has_scale ? q.scale->host()[0] : 0.0f));
  CHECK(got.saturated == static_cast<float>(want.saturated));
  CHECK(got.underflowed == static_cast<float>(want.underflowed));
  CHECK(got.not_finite == static_cast<float>(want.not_finite));
  CHECK(is_near(got.norm, std::sqrt(want.squares)));
  CHECK(is_near(got.error_norm, std::sqrt(want.error_squares)));
}

// Magnitudes over 40 powers of two, some zeros: some become zero in every format.
std::vector<float> wide_values(int64_t count) {
  std::vector<float> x = random_bf16(count, 9);
  for (int64_t i = 0; i < count; ++i) {
    x[i] = i % 11 == 3 ? 0.0f : std::ldexp(x[i], static_cast<int>(i * 7 % 41) - 30);
  }
  return x;
}

// A quantized copy of x, [rows, cols].
std::unique_ptr<TestMatrix> quantized(const Format& format, const MatrixShape& s, const std::vector<float>& x) {
  std::unique_ptr<TestMatrix> q(new TestMatrix(format.make(cpu_device(), s.rows, s.cols)));
  if (s.numel() > 0)
    quantize(cpu_device(), {.x = TestTensor(cpu_device(), DType::kF32, {s.rows, s.cols}, x), .out = *q});
  return q;
}

bool same(const QuantizationTotals& a, const QuantizationTotals& b) {
  return a.elements == b.elements && a.amax == b.amax && a.scale == b.scale && a.saturated == b.saturated &&
         a.underflowed == b.underflowed && a.not_finite == b.not_finite && is_near(a.norm, b.norm) &&
         is_near(a.error_norm, b.error_norm);
}

// Two devices on the same bits.
void check_device(Device& device, DType dtype, const MatrixShape& s, const std::vector<float>& x,
                  const TestMatrix& q) {
  const TestTensor here(cpu_device(), dtype, {s.rows, s.cols}, x), there(device, dtype, {s.rows, s.cols}, x);
  const std::unique_ptr<TestMatrix> q_there = copy_on(device, q);
  const QuantizationTotals want = totals_of(cpu_device(), here, q), got = totals_of(device, there, *q_there);
  CAPTURE(s, name_of(dtype), describe(q.view()));
  CHECK(same(got, want));
  const QuantizationTotals again = totals_of(device, there, *q_there);
  CHECK(std::memcmp(&got, &again, sizeof(got)) == 0);
}

}  // namespace

TEST_CASE("quantization statistics are those of a plain count", "[kernels][telemetry]") {
  const MatrixShape s = GENERATE(from_range(kShapes));
  for (const Format& format : kFloat8Formats) {
    const std::vector<float> x = wide_values(s.numel());
    const std::unique_ptr<TestMatrix> q = quantized(format, s, x);
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      CAPTURE(s, describe(q->view()), name_of(dtype));
      const PlainTotals want = plain_totals(x, s.cols, *q);
      if (s.numel() > 500) CHECK(want.underflowed > 0);
      CHECK(want.saturated == 0);  // scales are those of the values themselves
      const TestTensor before(cpu_device(), dtype, {s.rows, s.cols}, x);
      check(totals_of(cpu_device(), before, *q), want, *q);
    }
  }
}

TEST_CASE("numbers too large for a given scale count as saturated, rounding does not", "[kernels][telemetry]") {
  for (const DType dtype : {DType::kE4M3, DType::kE5M2}) {
    const bool is_e4m3 = dtype == DType::kE4M3;
    const float largest = is_e4m3 ? 448 : 57344, threshold = is_e4m3 ? 464 : 61440;
    CHECK(saturation_threshold(dtype) == threshold);
    const float just_beyond = std::nextafter(threshold, 1e9f);
    const std::vector<float> x = {largest,      -largest,    threshold, -threshold, just_beyond,
                                  -just_beyond, 2 * largest, 1.0f,      0.0f,       1e30f};
    const TestMatrix q(cpu_device(), dtype, 1, 10, Scaling::kTensor);
    for (const float scale : {1.0f, 0.25f, 0x1p-20f}) {  // exact, so that the thresholds are
      std::vector<float> scaled = x;
      for (float& v : scaled) v *= scale;
      const TestTensor before(cpu_device(), DType::kF32, {1, 10}, scaled);
      upload(cpu_device(), q.scale->view(), std::vector<float>{scale});
      quantize(cpu_device(), {.x = before, .out = q, .scale_given = true});
      const QuantizationTotals totals = totals_of(cpu_device(), before, q);
      CHECK(totals.saturated == 4);
      CHECK(totals.underflowed == 0);
      CHECK(totals.amax == 1e30f * scale);
      CHECK(totals.scale == scale);
    }
  }
}

TEST_CASE("zeros, and numbers that are not finite, are counted apart", "[kernels][telemetry]") {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN(),
                  kInfinity = std::numeric_limits<float>::infinity();
  const Format format{DType::kE4M3, Scaling::kGroup, 4, DType::kBF16};
  // Groups: zeros; too small to be stored; a NaN; an infinity, which makes all of its group NaN.
  const std::vector<float> x = {0, -0.0f, 0, 0, 0x1p-110f, -0x1p-110f, 0, 0x1p-120f,
                                1, kNan,  2, 3, 4,         5,          6, kInfinity};
  const std::unique_ptr<TestMatrix> q = quantized(format, {1, 16}, x);
  const QuantizationTotals totals = totals_of(cpu_device(), TestTensor(cpu_device(), DType::kF32, {1, 16}, x), *q);
  CHECK(totals.elements == 16);
  CHECK(totals.underflowed == 3);
  CHECK(totals.not_finite == 5);
  CHECK(totals.saturated == 0);
  CHECK(totals.amax == 3);
  CHECK(is_near(totals.norm, std::sqrt(1.0 + 4 + 9)));
  CHECK(totals.error_norm < 0.1);
}

TEST_CASE("columns behind those of the codes do not count", "[kernels][telemetry]") {
  for (const Format& format : kFloat8Formats) {
    const MatrixShape s{33, 48}, wide{33, 112};
    const std::vector<float> all = wide_values(wide.numel());
    std::vector<float> x;
    for (int64_t i = 0; i < s.numel(); ++i) x.push_back(all[i / s.cols * wide.cols + i % s.cols]);
    const std::unique_ptr<TestMatrix> q = quantized(format, s, x);
    const TestTensor before(cpu_device(), DType::kF32, {wide.rows, wide.cols}, all);
    check(totals_of(cpu_device(), before, *q), plain_totals(all, wide.cols, *q), *q);
    for (Device* device : other_devices()) {
      if (!has_scaling(*device, format.scaling, format.group)) continue;
      const TestTensor there(*device, DType::kF32, {wide.rows, wide.cols}, all);
      CHECK(same(totals_of(*device, there, *copy_on(*device, *q)), totals_of(cpu_device(), before, *q)));
    }
  }
}

TEST_CASE("quantization statistics of parts add up to those of the whole", "[kernels][telemetry]") {
  constexpr int64_t kParts = 3;
  const MatrixShape s{48, 64};
  const std::vector<float> x = wide_values(s.numel());
  for (const Format& format :
       {Format{DType::kE4M3, Scaling::kTensor}, {DType::kE5M2, Scaling::kGroup, 32, DType::kBF16}}) {
    const std::unique_ptr<TestMatrix> q = quantized(format, s, x);
    for (Device* device : devices()) {
      CAPTURE(device->name(), describe(q->view()));
      const TestTensor before(*device, DType::kF32, {s.rows, s.cols}, x),
          totals(*device, DType::kF32, {QuantizationTotals::kCount});
      const std::unique_ptr<TestMatrix> there = copy_on(*device, *q);
      const ScaledView all = there->view();
      for (int64_t part = 0; part < kParts; ++part) {
        const int64_t rows = s.rows / kParts, first = part * rows;
        const TensorView scale = all.scaling == Scaling::kTensor ? all.scale : all.scale.rows(first, rows);
        quantization_statistics(*device, {.x = before.view().rows(first, rows),
                                          .q = {all.data.rows(first, rows), scale, all.scaling, all.group},
                                          .totals = totals,
                                          .accumulate = part > 0});
      }
      CHECK(totals.guard_intact());
      CHECK(same(read(totals),
                 totals_of(cpu_device(), TestTensor(cpu_device(), DType::kF32, {s.rows, s.cols}, x), *q)));
    }
  }
}

TEST_CASE("quantization statistics do not depend on threads", "[kernels][telemetry]") {
  const MatrixShape s{301, 96};
  const std::vector<float> x = wide_values(s.numel());
  const std::unique_ptr<TestMatrix> q = quantized({DType::kE4M3, Scaling::kTensor}, s, x);
  const TestTensor before(cpu_device(), DType::kF32, {s.rows, s.cols}, x);
  CHECK(same_on_one_thread([&] {
    const TestTensor totals(cpu_device(), DType::kF32, {QuantizationTotals::kCount});
    quantization_statistics(cpu_device(), {.x = before, .q = *q, .totals = totals});
    return totals.bytes();
  }));
}

TEST_CASE("quantization statistics on another device are the CPU's", "[kernels][telemetry][devices]") {
  const MatrixShape s = GENERATE(from_range(kShapes));
  for (Device* device : other_devices()) {
    for (const Format& format : kDeviceFormats) {
      std::vector<float> x = wide_values(s.numel());
      for (const DType dtype : {DType::kF32, DType::kBF16}) {
        check_device(*device, dtype, s, x, *quantized(format, s, x));
      }
      if (s.numel() == 0) continue;
      // Numbers and codes that have nothing to do with each other saturate, too; with bad ones in between.
      const std::unique_ptr<TestMatrix> q = quantized(format, s, x);
      fill_random_codes(cpu_device(), *q, 3);
      for (size_t i = 0; i < x.size(); ++i) x[i] = std::ldexp(x[i], static_cast<int>(i % 31));
      x[x.size() / 2] = std::numeric_limits<float>::infinity();
      x[x.size() / 3] = std::numeric_limits<float>::quiet_NaN();
      check_device(*device, DType::kF32, s, x, *q);
    }
  }
}

TEST_CASE("quantization statistics of tensors that do not fit are refused", "[kernels][telemetry]") {
  const TestMatrix q(cpu_device(), DType::kE4M3, 4, 16, Scaling::kTensor);
  const TestTensor totals(cpu_device(), DType::kF32, {QuantizationTotals::kCount}),
      short_totals(cpu_device(), DType::kF32, {3});
  const TestTensor x(cpu_device(), DType::kF32, {4, 16}), narrow(cpu_device(), DType::kF32, {4, 15}),
      few(cpu_device(), DType::kF32, {3, 16});
  const auto refusal = [](const QuantizationStatistics& a) {
    return internal_error([&] { quantization_statistics(cpu_device(), a); });
  };
  CHECK(contains(refusal({.x = narrow, .q = q, .totals = totals}), "x is fp32 [4, 15]"));
  CHECK(contains(refusal({.x = few, .q = q, .totals = totals}), "x is fp32 [3, 16]"));
  CHECK(contains(refusal({.x = x, .q = x, .totals = totals}), "wanted fp8"));
  CHECK(contains(refusal({.x = x, .q = q, .totals = short_totals}), "totals is"));
}

TEST_CASE("moment statistics count exponents and find the range of maxima", "[kernels][telemetry]") {
  for (Device* device : devices()) {
    for (const int64_t N : {1, 127, 129, 5000, 1 << 20}) {
      CAPTURE(device->name(), N);
      const int64_t groups = ceil_div(N, kMomentGroup);
      std::vector<float> amax(static_cast<size_t>(groups)), exponent(amax);
      std::vector<int32_t> want(kNumMomentExponents);
      float smallest = std::numeric_limits<float>::infinity(), largest = 0;
      for (int64_t g = 0; g < groups; ++g) {
        const std::array<uint32_t, 4> random = philox4x32(4, 5, static_cast<uint64_t>(g));
        exponent[g] = static_cast<float>(16 + random[0] % 240);
        amax[g] =
            g % 5 == 1 ? 0.0f : std::ldexp(1.0f + static_cast<float>(random[1] % 8), -static_cast<int>(g % 90));
        if (amax[g] == 0) continue;
        ++want[static_cast<size_t>(exponent[g])];
        smallest = std::min(smallest, amax[g]);
        largest = std::max(largest, amax[g]);
      }
      const TestTensor values(*device, DType::kE4M3, {N}), maxima(*device, DType::kF32, {groups}, amax),
          exponents(*device, DType::kU8, {groups}, exponent);
      const TestTensor counts(*device, DType::kI32, {kNumMomentExponents}), range(*device, DType::kF32, {2});
      moment_statistics(*device, {.moment = {values, maxima, exponents}, .counts = counts, .amax = range});
      std::vector<int32_t> got(want.size());
      std::memcpy(got.data(), counts.bytes().data(), got.size() * sizeof(int32_t));
      CHECK(got == want);
      CHECK(range.host() == std::vector<float>{smallest, largest});
      CHECK((counts.guard_intact() && range.guard_intact()));
    }
    // Nothing but zeros.
    const TestMoment zeros(*device, {DType::kE4M3, true}, 300, /*zeroed=*/true);
    const TestTensor counts(*device, DType::kI32, {kNumMomentExponents}), range(*device, DType::kF32, {2});
    moment_statistics(*device, {.moment = zeros.view(), .counts = counts, .amax = range});
    CHECK(counts.host() == std::vector<float>(kNumMomentExponents));
    CHECK(range.host() == std::vector<float>{std::numeric_limits<float>::infinity(), 0.0f});
  }
}
