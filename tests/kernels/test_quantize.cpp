#include "kernels/ops/quantize/quantize.h"

#include <algorithm>
#include <bit>
#include <limits>

#include "tests/kernels/op_checks.h"
#include "tests/support/catch.h"

using namespace parka;
using namespace parka::test;

namespace {

float decode_code(DType dtype, uint8_t code) {
  return dtype == DType::kE4M3 ? decode_e4m3({code}) : decode_e5m2({code});
}

// The code nearest to x by trying all of them, the even one of two equally near; saturating; NaN is 0x7f.
uint8_t nearest_code(DType dtype, float x) {
  if (std::isnan(x)) return 0x7f;
  const double magnitude = std::min(std::abs(double{x}), double{float8_traits(dtype).max});
  uint8_t best = 0;
  for (int code = 1; code <= float8_traits(dtype).max_code; ++code) {
    const double gap = std::abs(magnitude - decode_code(dtype, static_cast<uint8_t>(code)));
    const double best_gap = std::abs(magnitude - decode_code(dtype, best));
    if (gap < best_gap || (gap == best_gap && code % 2 == 0)) best = static_cast<uint8_t>(code);
  }
  return static_cast<uint8_t>(best | (std::signbit(x) ? 0x80 : 0));
}

// The scale of a piece by the rule of ops/quantize/quantize.h. A NaN is not its maximum.
float piece_scale(float amax, DType dtype, DType scale_dtype) {
  if (amax < 0x1p-100f) return 1.0f;
  const float scale = static_cast<float>(double{amax} / double{float8_traits(dtype).max});
  if (scale_dtype == DType::kF32) return scale;
  BFloat16 above{static_cast<uint16_t>(std::bit_cast<uint32_t>(scale) >> 16)};
  if (decode_bf16(above) < scale) ++above.bits;  // the next larger one: bfloat16 numbers order as their bits do
  return decode_bf16(above);
}

struct Expected {
  std::vector<uint8_t> codes;
  std::vector<float> scales;
};

Expected expect(const std::vector<float>& x, int64_t rows, int64_t cols, const Format& f) {
  const auto shape = scale_shape(f.scaling, f.group, rows, cols);
  const int64_t tile_rows = f.scaling == Scaling::kTensor ? rows : f.scaling == Scaling::kGroup ? 1 : f.group;
  const int64_t tile_cols = f.scaling == Scaling::kTensor ? cols : f.group;
  const auto piece_of = [&](int64_t i) { return i / cols / tile_rows * shape[1] + i % cols / tile_cols; };
  std::vector<float> amax(static_cast<size_t>(shape[0] * shape[1]), 0.0f);
  for (int64_t i = 0; i < rows * cols; ++i) {
    if (!std::isnan(x[i])) amax[piece_of(i)] = std::max(amax[piece_of(i)], std::abs(x[i]));
  }
  Expected want;
  for (float a : amax) want.scales.push_back(piece_scale(a, f.dtype, f.scale_dtype));
  for (int64_t i = 0; i < rows * cols; ++i) {
    // A piece too small to scale gets zero codes, with the signs of its elements.
    const float inverse = amax[piece_of(i)] < 0x1p-100f ? 0.0f : 1.0f / want.scales[piece_of(i)];
    want.codes.push_back(nearest_code(f.dtype, x[i] * inverse));
  }
  return want;
}

std::vector<float> transposed(const std::vector<float>& x, int64_t rows, int64_t cols) {
  std::vector<float> y(x.size());
  for (int64_t i = 0; i < rows * cols; ++i) y[i % cols * rows + i / cols] = x[i];
  return y;
}

std::vector<uint8_t> codes_of(const TestMatrix& m) {
  std::vector<uint8_t> codes;
  for (std::byte b : m.data.bytes()) codes.push_back(static_cast<uint8_t>(b));
  return codes;
}

bool equals(const TestMatrix& got, const Expected& want) {
  return codes_of(got) == want.codes && got.scale->host() == want.scales && got.guard_intact();
}

// One row quantized in groups: what most of the hazard tests need.
struct QuantizedRow {
  QuantizedRow(const std::vector<float>& x, const Format& f)
      : row(f.make(cpu_device(), 1, static_cast<int64_t>(x.size()))) {
    const TestTensor input(cpu_device(), DType::kF32, {1, static_cast<int64_t>(x.size())}, x);
    quantize(cpu_device(), {.x = input, .out = row});
  }
  TestMatrix row;
};

}  // namespace

TEST_CASE("quantize gives the nearest codes for the scales of its rule", "[kernels][quantize]") {
  const auto [rows, cols] =
      GENERATE(table<int64_t, int64_t>({{1, 1}, {3, 5}, {7, 33}, {1, 300}, {129, 2}, {37, 131}, {130, 144}}));
  const DType input = GENERATE(DType::kF32, DType::kBF16);
  auto x = input == DType::kBF16 ? random_bf16(rows * cols, 1) : random_normal(rows * cols, 1);
  // Magnitudes over many powers of two, so that groups differ and subnormal codes occur.
  for (size_t i = 0; i < x.size(); ++i) x[i] *= std::ldexp(1.0f, static_cast<int>(i * 7 % 23) - 15);
  const auto x_t = transposed(x, rows, cols);
  for (Device* device : devices()) {
    for (const Format& format : kFloat8Formats) {
      if (!has_scaling(*device, format.scaling, format.group)) continue;
      const TestTensor tx(*device, input, {rows, cols}, x);
      const TestMatrix out = format.make(*device, rows, cols), out_t = format.make(*device, cols, rows);
      quantize(*device, {.x = tx, .out = out});
      quantize(*device, {.x = tx, .out_t = out_t});
      CAPTURE(device->name(), rows, cols, name_of(input), describe(out.view()));
      CHECK(equals(out, expect(x, rows, cols, format)));
      CHECK(equals(out_t, expect(x_t, cols, rows, format)));
      CHECK(tx.guard_intact());

      // Both at once are what each is alone.
      const TestMatrix both = format.make(*device, rows, cols), both_t = format.make(*device, cols, rows);
      ScaledView view_t = both_t;
      if (format.scaling == Scaling::kTensor) view_t.scale = both.scale->view();
      quantize(*device, {.x = tx, .out = both, .out_t = view_t});
      CHECK(same_bits(both, out));
      CHECK((both_t.data.bytes() == out_t.data.bytes()));
    }
  }
}

TEST_CASE("quantize converts between plain formats and transposes them", "[kernels][quantize]") {
  constexpr int64_t kRows = 67, kCols = 45;
  const auto x = random_normal(kRows * kCols, 2);
  auto rounded = x;
  for (float& v : rounded) v = decode_bf16(encode_bf16(v));
  for (Device* device : devices()) {
    const TestTensor tx(*device, DType::kF32, {kRows, kCols}, x), down(*device, DType::kBF16, {kRows, kCols});
    const TestTensor down_t(*device, DType::kBF16, {kCols, kRows}), up_t(*device, DType::kF32, {kCols, kRows});
    quantize(*device, {.x = tx, .out = down, .out_t = down_t});
    quantize(*device, {.x = down, .out_t = up_t});
    CHECK((down.host() == rounded));
    CHECK((down_t.host() == transposed(rounded, kRows, kCols)));
    CHECK((up_t.host() == transposed(rounded, kRows, kCols)));
    CHECK((down.guard_intact() && down_t.guard_intact() && up_t.guard_intact()));
  }
}

TEST_CASE("quantize decodes fp8, and encodes it anew in another format", "[kernels][quantize]") {
  constexpr int64_t kRows = 35, kCols = 50;
  for (Device* device : devices()) {
    for (const Format& format : kFloat8Formats) {
      if (!has_scaling(*device, format.scaling, format.group)) continue;
      const TestMatrix x = format.make(*device, kRows, kCols);
      fill_random_codes(*device, x, 3);
      const TestTensor values(*device, DType::kF32, {kRows, kCols});
      quantize(*device, {.x = x, .out = values});
      CAPTURE(device->name(), describe(x.view()));
      CHECK((values.host() == x.host()));
      CHECK((values.guard_intact() && x.guard_intact()));

      const Format other{DType::kE4M3, Scaling::kGroup, 32, DType::kBF16};
      const TestMatrix again = other.make(*device, kRows, kCols);
      quantize(*device, {.x = x, .out = again});
      CHECK(equals(again, expect(x.host(), kRows, kCols, other)));
    }
  }
}

TEST_CASE("quantize moves codes that keep their scale", "[kernels][quantize]") {
  const DType dtype = GENERATE(DType::kE4M3, DType::kE5M2);
  const auto [rows, cols] =
      GENERATE(table<int64_t, int64_t>({{1, 1}, {5, 3}, {16, 256}, {70, 33}, {300, 31}, {130, 129}, {256, 384}}));
  std::vector<uint8_t> codes(static_cast<size_t>(rows * cols)), codes_t(codes);
  for (int64_t i = 0; i < rows * cols; ++i) codes[i] = static_cast<uint8_t>(i);  // NaN, infinity and -0 among them
  for (int64_t i = 0; i < rows * cols; ++i) codes_t[i % cols * rows + i / cols] = codes[i];
  for (Device* device : devices()) {
    const TestMatrix x(*device, dtype, rows, cols, Scaling::kTensor);
    const TestTensor moved(*device, dtype, {cols, rows}), copied(*device, dtype, {rows, cols});
    upload(*device, x.data.view(), codes);
    upload(*device, x.scale->view(), std::vector<float>{0.37f});
    quantize(*device, {.x = x,
                       .out = ScaledView(copied, *x.scale, Scaling::kTensor),
                       .out_t = ScaledView(moved, *x.scale, Scaling::kTensor)});
    const auto got = moved.bytes(), copy = copied.bytes();
    CAPTURE(device->name(), name_of(dtype), rows, cols);
    CHECK(std::equal(got.begin(), got.end(), codes_t.begin(),
                     [](std::byte a, uint8_t b) { return uint8_t(a) == b; }));
    CHECK(std::equal(copy.begin(), copy.end(), codes.begin(),
                     [](std::byte a, uint8_t b) { return uint8_t(a) == b; }));
    CHECK(x.scale->host() == std::vector<float>{0.37f});
    CHECK((moved.guard_intact() && copied.guard_intact() && x.guard_intact()));

    // A decoded copy beside the moved codes.
    const TestTensor values(*device, DType::kF32, {rows, cols}), moved_again(*device, dtype, {cols, rows});
    quantize(*device, {.x = x, .out = values, .out_t = ScaledView(moved_again, *x.scale, Scaling::kTensor)});
    const auto want = x.host(), decoded = values.host();
    int wrong = 0;
    for (size_t i = 0; i < want.size(); ++i) wrong += decoded[i] != want[i] && !std::isnan(want[i]);
    CHECK(wrong == 0);
    CHECK((moved_again.bytes() == moved.bytes()));
  }
}

TEST_CASE("quantize encodes anew for another format under the same given scale", "[kernels][quantize]") {
  for (Device* device : devices()) {
    const TestMatrix x(*device, DType::kE4M3, 6, 50, Scaling::kTensor);
    fill_random_codes(*device, x, 9);
    const TestTensor out(*device, DType::kE5M2, {6, 50});
    quantize(*device, {.x = x, .out = ScaledView(out, *x.scale, Scaling::kTensor), .scale_given = true});
    const float scale = x.scale->host()[0];
    const auto values = x.host();
    const auto got = out.bytes();
    int wrong = 0;
    for (size_t i = 0; i < values.size(); ++i) {
      wrong += static_cast<uint8_t>(got[i]) != nearest_code(DType::kE5M2, values[i] * (1.0f / scale));
    }
    CAPTURE(device->name());
    CHECK(wrong == 0);
    CHECK(out.guard_intact());
  }
}

TEST_CASE("quantize takes a given scale as it is", "[kernels][quantize]") {
  const DType dtype = GENERATE(DType::kE4M3, DType::kE5M2);
  constexpr int64_t kRows = 21, kCols = 19;
  constexpr float kScale = 0.003f;
  // A quarter of the values lie beyond what the scale can hold.
  auto x = random_normal(kRows * kCols, 4, float8_traits(dtype).max * kScale);
  x[5] = INFINITY;
  x[6] = -INFINITY;
  x[7] = NAN;
  Expected want;
  for (float v : x) want.codes.push_back(nearest_code(dtype, v * (1.0f / kScale)));
  want.scales = {kScale};
  for (Device* device : devices()) {
    const TestTensor tx(*device, DType::kF32, {kRows, kCols}, x);
    const TestMatrix out(*device, dtype, kRows, kCols, Scaling::kTensor);
    const TestTensor out_t(*device, dtype, {kCols, kRows});
    upload(*device, out.scale->view(), want.scales);
    quantize(*device,
             {.x = tx, .out = out, .out_t = ScaledView(out_t, *out.scale, Scaling::kTensor), .scale_given = true});
    CHECK(equals(out, want));
    const auto values = out.data.host();
    CHECK(std::none_of(values.begin(), values.end(), [](float v) { return std::isinf(v); }));

    const TestTensor only_t(*device, dtype, {kCols, kRows});
    quantize(*device, {.x = tx, .out_t = ScaledView(only_t, *out.scale, Scaling::kTensor), .scale_given = true});
    CHECK((only_t.bytes() == out_t.bytes()));
    CHECK(out_t.guard_intact());
  }
}

TEST_CASE("a bf16 scale never lets a group pass the format's maximum", "[kernels][quantize]") {
  const Format format = GENERATE(Format{DType::kE4M3, Scaling::kGroup, 16, DType::kBF16},
                                 Format{DType::kE5M2, Scaling::kGroup, 16, DType::kBF16});
  const Float8Traits& traits = float8_traits(format.dtype);
  constexpr int64_t kCount = 16 * 2000;
  const auto x = random_normal(kCount, 5, 1e-3f);
  const QuantizedRow quantized(x, format);
  const auto codes = quantized.row.data.host(), scales = quantized.row.scale->host(), values = quantized.row.host();
  int too_large = 0, too_far = 0, range_wasted = 0;
  for (int64_t i = 0; i < kCount; ++i) {
    const double scale = scales[i / 16], magnitude = std::abs(double{x[i]});
    too_large += magnitude / scale > traits.max * (1 + 0x1p-22);
    // Half the distance of neighbouring codes: no bias from a scale rounded after the division.
    const double unit = std::max(std::exp2(std::floor(std::log2(magnitude / scale))), double{traits.min_normal});
    too_far +=
        std::abs(double{values[i]} - double{x[i]}) > 1.0001 * scale * unit * std::exp2(-traits.mantissa_bits - 1);
  }
  for (int64_t g = 0; g < kCount / 16; ++g) {
    float largest = 0;
    for (int64_t i = g * 16; i < (g + 1) * 16; ++i) largest = std::max(largest, std::abs(codes[i]));
    range_wasted += largest != traits.max;
  }
  CHECK(too_large == 0);
  CHECK(too_far == 0);
  CHECK(range_wasted == 0);
}

TEST_CASE("quantize uses the whole range for tiny values, and zeroes what is too small", "[kernels][quantize]") {
  const Format format = GENERATE(
      Format{DType::kE4M3, Scaling::kGroup, 4, DType::kBF16}, Format{DType::kE4M3, Scaling::kGroup, 4, DType::kF32},
      Format{DType::kE5M2, Scaling::kGroup, 4, DType::kF32}, Format{DType::kE5M2, Scaling::kTensor});
  const float amax = GENERATE(1e-12f, 0x1p-99f, 0x1p-100f, 0.999f * 0x1p-100f, 1e-38f, 1e-45f, 0.0f);
  const std::vector<float> x = {amax, -amax, 0.0f, amax / 2};
  const QuantizedRow quantized(x, format);
  const auto codes = quantized.row.data.host(), scales = quantized.row.scale->host();
  CAPTURE(amax);
  if (amax < 0x1p-100f) {
    CHECK(scales == std::vector<float>{1.0f});
    CHECK(codes == std::vector<float>(4, 0.0f));
  } else {
    const float max = float8_traits(format.dtype).max;
    CHECK(std::vector<float>(codes.begin(), codes.begin() + 3) == std::vector<float>{max, -max, 0.0f});
    CHECK(std::abs(codes[3] * scales[0] - amax / 2) <= amax / 16);
  }
}

TEST_CASE("quantize keeps bad values visible, in their own group only", "[kernels][quantize]") {
  const Format format = GENERATE(Format{DType::kE4M3, Scaling::kGroup, 16, DType::kBF16},
                                 Format{DType::kE5M2, Scaling::kGroup, 16, DType::kF32});
  auto x = random_normal(16 * 6, 6);
  x[3] = NAN;            // group 0: the NaN alone
  x[16 + 2] = INFINITY;  // group 1: all of it
  x[32 + 15] = -INFINITY;
  std::fill_n(x.begin() + 64, 16, NAN);
  std::fill_n(x.begin() + 80, 16, 0.0f);
  x[95] = NAN;
  const QuantizedRow quantized(x, format);
  const auto values = quantized.row.host();
  int wrong = 0;
  for (size_t i = 0; i < values.size(); ++i) {
    const bool is_bad = i == 3 || (i >= 16 && i < 48) || (i >= 64 && i < 80) || i == 95;
    wrong += std::isnan(values[i]) != is_bad;
  }
  CHECK(wrong == 0);

  // The rest of group 0 is what it would be without the NaN.
  x[3] = 0.0f;
  const QuantizedRow without(x, format);
  const auto expected = without.row.host();
  CHECK(std::equal(values.begin() + 4, values.begin() + 16, expected.begin() + 4));
}

TEST_CASE("an infinity shows in a tensor of one scale", "[kernels][quantize]") {
  const DType dtype = GENERATE(DType::kE4M3, DType::kE5M2);
  auto x = random_normal(40, 7);
  x[11] = -INFINITY;
  const QuantizedRow quantized(x, {dtype, Scaling::kTensor});
  const auto values = quantized.row.host();
  CHECK(std::all_of(values.begin(), values.end(), [](float v) { return std::isnan(v); }));
}

TEST_CASE("the largest numbers quantize without overflow", "[kernels][quantize]") {
  const DType dtype = GENERATE(DType::kE4M3, DType::kE5M2);
  const float largest = std::numeric_limits<float>::max();
  const std::vector<float> x = {largest, -largest / 2, 1.0f, largest / 4};
  const QuantizedRow quantized(x, {dtype, Scaling::kTensor});
  CHECK(equals(quantized.row, expect(x, 1, 4, {dtype, Scaling::kTensor})));
}

TEST_CASE("quantize gives the same bits on any number of threads", "[kernels][quantize]") {
  constexpr int64_t kRows = 301, kCols = 97;
  const TestTensor x(cpu_device(), DType::kF32, {kRows, kCols}, random_normal(kRows * kCols, 8));
  for (const Format& format : kFloat8Formats) {
    const TestMatrix parallel = format.make(cpu_device(), kRows, kCols),
                     serial = format.make(cpu_device(), kRows, kCols);
    const TestMatrix parallel_t = format.make(cpu_device(), kCols, kRows),
                     serial_t = format.make(cpu_device(), kCols, kRows);
    set_num_threads(3);
    quantize(cpu_device(), {.x = x, .out = parallel});
    quantize(cpu_device(), {.x = x, .out_t = parallel_t});
    set_num_threads(1);
    quantize(cpu_device(), {.x = x, .out = serial});
    quantize(cpu_device(), {.x = x, .out_t = serial_t});
    set_num_threads(0);
    CHECK((same_bits(parallel, serial) && same_bits(parallel_t, serial_t)));
  }
}

TEST_CASE("quantize of nothing does nothing", "[kernels][quantize]") {
  const TestTensor x(cpu_device(), DType::kF32, {0, 8}), out(cpu_device(), DType::kBF16, {0, 8}),
      some(cpu_device(), DType::kF32, {2, 2});
  quantize(cpu_device(), {.x = x, .out = out});
  quantize(cpu_device(), {.x = some});
  CHECK((out.guard_intact() && some.guard_intact()));
}

TEST_CASE("quantize refuses tensors that do not fit, by name", "[kernels][quantize]") {
  const TestTensor x(cpu_device(), DType::kF32, {4, 6}), small(cpu_device(), DType::kF32, {4, 5}),
      ids(cpu_device(), DType::kI32, {4, 6});
  const TestTensor codes(cpu_device(), DType::kE4M3, {4, 6}), codes_t(cpu_device(), DType::kE4M3, {6, 4});
  const TestTensor codes_e5m2(cpu_device(), DType::kE5M2, {4, 6}), vector(cpu_device(), DType::kF32, {24});
  const TestTensor scale(cpu_device(), DType::kF32, {1}, {1.0f}),
      other_scale(cpu_device(), DType::kF32, {1}, {1.0f});
  const TestTensor scale16(cpu_device(), DType::kBF16, {1});
  const TestMatrix groups(cpu_device(), DType::kE4M3, 4, 6, Scaling::kGroup, 4);
  const auto one_scale = [&](const TestTensor& t, const TestTensor& s) {
    return ScaledView(t, s, Scaling::kTensor);
  };
  const auto refused = [&](const Quantize& op, const std::string& tensor) {
    const std::string text = internal_error([&] { quantize(cpu_device(), op); });
    return contains(text, "quantize: ") && contains(text, tensor);
  };
  CHECK(refused({.x = x, .out = small}, "out is fp32 [4, 5], wanted shape [4, 6]"));
  CHECK(refused({.x = x, .out_t = x}, "out_t is fp32 [4, 6], wanted shape [6, 4]"));
  CHECK(refused({.x = ids, .out = x}, "x is int32"));
  CHECK(refused({.x = vector, .out = x}, "x is fp32 [24]"));
  CHECK(refused({.x = {}, .out = x}, "x is no tensor"));
  CHECK(refused({.x = x, .out = codes}, "out is e4m3"));
  CHECK(refused({.x = x, .out = one_scale(codes, scale16)}, "scale of out is bf16 [1]"));
  CHECK(refused({.x = x, .out = one_scale(small, scale)}, "out is fp32"));
  CHECK(refused({.x = x, .out = one_scale(codes, scale), .out_t = one_scale(codes_t, other_scale)},
                "share one scale"));
  CHECK(refused({.x = x, .out = groups, .scale_given = true}, "out is e4m3 [4, 6], fp32 scale per 1x4"));
  CHECK(refused({.x = one_scale(codes, scale), .out = one_scale(codes_e5m2, scale)}, "has the scale of x"));
  CHECK(refused({.x = x, .out = ScaledView(codes, *groups.scale, Scaling::kGroup, 0)}, "out has group size 0"));
  CHECK(refused({.x = x, .out = ScaledView(codes, *groups.scale, Scaling::kGroup, 2)},
                "scale of out is fp32 [4, 2]"));
}
