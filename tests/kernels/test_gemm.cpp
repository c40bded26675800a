#include "kernels/ops/gemm/gemm.h"

#include <cmath>
#include <limits>
#include <vector>

#include "tests/kernels/op_checks.h"
#include "tests/support/catch.h"

using namespace parka;
using namespace parka::test;

namespace {

struct Shape {
  int64_t m, n, k;
};

// Which arithmetic a GPU multiplies in.
enum class Operands { kF32, kBF16, kFloat8, kFloat8Fast };

// What FP8 tensor cores may be off by, as a part of the sum of the terms' magnitudes: a cut at 2^-13 of the largest
// number in an addition, for each of the terms, most of which are far smaller. Without fast accumulation sums of
// 128 terms are added up in fp32. Tests on whole numbers, which are exact, are the ones that find wrong elements.
constexpr double kFloat8Error = 0x1p-10;
constexpr double kFastFloat8Error = 0x1p-9;

// sum_k a[m,k] b[n,k] and sum_k |a[m,k] b[n,k]|, in double. Operands may be stored transposed.
struct Reference {
  std::vector<double> sum, magnitude;

  Reference(const Shape& s, const std::vector<float>& a, bool a_transposed, const std::vector<float>& b,
            bool b_transposed)
      : sum(static_cast<size_t>(s.m * s.n)), magnitude(sum) {
    for (int64_t m = 0; m < s.m; ++m) {
      for (int64_t n = 0; n < s.n; ++n) {
        double total = 0, total_magnitude = 0;
        for (int64_t k = 0; k < s.k; ++k) {
          const double term = double{a[a_transposed ? k * s.m + m : m * s.k + k]} *
                              double{b[b_transposed ? k * s.n + n : n * s.k + k]};
          total += term;
          total_magnitude += std::abs(term);
        }
        sum[m * s.n + n] = total;
        magnitude[m * s.n + n] = total_magnitude;
      }
    }
  }

  // Elements of `out` off by more than an fp32 sum of K products and one rounding to the output's format allow.
  // `operands` is their format, `device` where the sum was made, and `has_factor`: with a factor other than 1.
  int count_wrong(const std::vector<float>& out, int64_t depth, DType dtype, const std::vector<float>& before = {},
                  const Device& device = cpu_device(), Operands operands = Operands::kF32,
                  bool has_factor = false) {
    const bool tensor_cores = device.kind() == DeviceKind::kCuda && operands != Operands::kF32;
    // Tensor cores cut off instead of rounding when they align the terms of a sum: 2 bits less.
    const double unit = tensor_cores ? 0x1p-22 : 0x1p-24;
    // FP8 ones keep some 14 bits of the largest term or partial sum, here of the sum of magnitudes.
    const double float8_error = !tensor_cores || operands == Operands::kBF16 ? 0.0
                                : operands == Operands::kFloat8Fast          ? kFastFloat8Error
                                                                             : kFloat8Error;
    const double sum_error = static_cast<double>(depth + 4) * unit + float8_error;
    const double rounding = dtype == DType::kBF16 ? 0x1p-8 : 0x1p-24;
    int wrong = 0;
    for (size_t i = 0; i < sum.size(); ++i) {
      const double want = sum[i] + (before.empty() ? 0.0 : double{before[i]});
      // cuBLASLt may round an fp8 product, or one with a factor, before it adds it, too.
      const bool may_round = float8_error > 0 || (tensor_cores && has_factor);
      const double also_rounded = may_round && !before.empty() ? std::abs(sum[i]) : 0.0;
      const double bound =
          1.01 * (sum_error * (magnitude[i] + std::abs(want)) + rounding * (std::abs(want) + also_rounded));
      wrong += !(std::abs(out[i] - want) <= bound);
    }
    return wrong;
  }
};

}  // namespace

TEST_CASE("gemm of plain operands rounds the fp64 sum", "[kernels][gemm]") {
  const auto [m, n, k] = GENERATE(table<int64_t, int64_t, int64_t>(
      {{1, 1, 1}, {1, 7, 3}, {7, 1, 5}, {2, 3, 11}, {17, 33, 64}, {129, 65, 31}, {3, 300, 513}, {1030, 520, 9}}));
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  const Shape shape{m, n, k};
  // fp32 operands with all their bits: a product in a narrower format would show.
  const auto random = dtype == DType::kBF16 ? random_bf16 : random_normal;
  const auto a = random(m * k, 1, 1.0f), b = random(n * k, 2, 1.0f), before = random(m * n, 3, 1.0f);
  for (Device* device : devices()) {
    for (const bool a_transposed : {false, true}) {
      for (const bool b_transposed : {false, true}) {
        const TestTensor ta =
            a_transposed ? TestTensor(*device, dtype, {k, m}, a) : TestTensor(*device, dtype, {m, k}, a);
        const TestTensor tb =
            b_transposed ? TestTensor(*device, dtype, {k, n}, b) : TestTensor(*device, dtype, {n, k}, b);
        const TestTensor out(*device, dtype, {m, n}), sum(*device, dtype, {m, n}, before);
        Gemm op{.a = ta, .b = tb, .a_transposed = a_transposed, .b_transposed = b_transposed, .out = out};
        gemm(*device, op);
        op.out = sum;
        op.accumulate = true;
        gemm(*device, op);

        Reference want(shape, a, a_transposed, b, b_transposed);
        const Operands operands = dtype == DType::kBF16 ? Operands::kBF16 : Operands::kF32;
        CAPTURE(m, n, k, a_transposed, b_transposed, name_of(dtype), device->name());
        CHECK(want.count_wrong(out.host(), k, dtype, {}, *device, operands) == 0);
        CHECK(want.count_wrong(sum.host(), k, dtype, before, *device, operands) == 0);
        CHECK((out.guard_intact() && sum.guard_intact() && ta.guard_intact() && tb.guard_intact()));
      }
    }
  }
}

namespace {

// Rows of `cols` elements, each followed by `padding` NaNs.
std::vector<float> padded_rows(const std::vector<float>& x, int64_t cols, int64_t padding) {
  std::vector<float> rows;
  for (size_t i = 0; i < x.size(); i += static_cast<size_t>(cols)) {
    rows.insert(rows.end(), x.begin() + static_cast<int64_t>(i), x.begin() + static_cast<int64_t>(i) + cols);
    rows.insert(rows.end(), static_cast<size_t>(padding), std::numeric_limits<float>::quiet_NaN());
  }
  return rows;
}

}  // namespace

TEST_CASE("gemm neither reads nor writes columns that pad rows", "[kernels][gemm]") {
  const auto [m, n, k, padding] =
      GENERATE(table<int64_t, int64_t, int64_t, int64_t>({{5, 7, 9, 9}, {33, 70, 64, 10}, {130, 278, 48, 10}}));
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  const auto random = dtype == DType::kBF16 ? random_bf16 : random_normal;
  const auto a = random(m * k, 1, 1.0f), b = random(n * k, 2, 1.0f), before = random(m * n, 3, 1.0f);
  for (Device* device : devices()) {
    for (const bool a_transposed : {false, true}) {
      for (const bool accumulate : {false, true}) {
        const int64_t a_rows = a_transposed ? k : m, a_cols = a_transposed ? m : k;
        const TestTensor ta(*device, dtype, {a_rows, a_cols + padding}, padded_rows(a, a_cols, padding));
        const bool b_transposed = a_transposed != accumulate;
        const int64_t b_rows = b_transposed ? k : n, b_cols = b_transposed ? n : k;
        const TestTensor tb(*device, dtype, {b_rows, b_cols + padding}, padded_rows(b, b_cols, padding));
        const TestTensor out(*device, dtype, {m, n + padding}, padded_rows(before, n, padding));
        gemm(*device, {.a = ta,
                       .b = tb,
                       .a_transposed = a_transposed,
                       .b_transposed = b_transposed,
                       .out = out,
                       .accumulate = accumulate,
                       .a_padding = padding,
                       .b_padding = padding,
                       .out_padding = padding});
        const std::vector<float> rows = out.host();
        std::vector<float> product;
        int64_t written = 0;  // of the padding
        for (size_t i = 0; i < rows.size(); ++i) {
          const bool is_padding = static_cast<int64_t>(i) % (n + padding) >= n;
          if (!is_padding) product.push_back(rows[i]);
          written += is_padding && !std::isnan(rows[i]);
        }
        Reference want({m, n, k}, a, a_transposed, b, b_transposed);
        const Operands operands = dtype == DType::kBF16 ? Operands::kBF16 : Operands::kF32;
        CAPTURE(m, n, k, a_transposed, b_transposed, accumulate, name_of(dtype), device->name());
        CHECK(want.count_wrong(product, k, dtype, accumulate ? before : std::vector<float>{}, *device, operands) ==
              0);
        CHECK(written == 0);
        CHECK(out.guard_intact());
      }
    }
  }
}

// As adapters of some rows of a weight need it: columns inside of wider rows, the last of which end with the
// memory.
TEST_CASE("gemm reads and writes columns inside of rows, and multiplies its sum by a factor", "[kernels][gemm]") {
  constexpr int64_t kM = 33, kN = 24, kK = 40, kBefore = 16, kBehind = 8, kWidth = kBefore + kN + kBehind;
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  const bool accumulate = GENERATE(false, true);
  const auto random = dtype == DType::kBF16 ? random_bf16 : random_normal;
  const auto a = random(kM * kK, 1, 1.0f), b = random(kN * kK, 2, 1.0f), before = random(kM * kWidth, 3, 1.0f);
  std::vector<float> half = b, inside, wide_a(static_cast<size_t>(kM * (kK + kBefore)), 7.0f);
  for (float& value : half) value *= 0.5f;
  for (int64_t i = 0; i < kM; ++i) {
    for (int64_t n = 0; n < kN; ++n) inside.push_back(before[i * kWidth + kBefore + n]);
    for (int64_t k = 0; k < kK; ++k) wide_a[i * (kK + kBefore) + kBefore + k] = a[i * kK + k];
  }
  for (Device* device : devices()) {
    CAPTURE(name_of(dtype), accumulate, device->name());
    const auto columns = [](TensorView t, int64_t first) {
      t.data = static_cast<std::byte*>(t.data) + first * size_of(t.dtype);
      return t;
    };
    const TestTensor ta(*device, dtype, {kM, kK + kBefore}, wide_a), tb(*device, dtype, {kN, kK}, b);
    const TestTensor out(*device, dtype, {kM, kWidth}, before);
    gemm(*device, {.a = columns(ta, kBefore),
                   .b = tb,
                   .out = columns(out, kBefore),
                   .accumulate = accumulate,
                   .factor = 0.5f,
                   .a_padding = kBefore,
                   .out_padding = kWidth - kN});
    const std::vector<float> rows = out.host();
    std::vector<float> product;
    int64_t num_changed = 0;  // of the other columns
    for (int64_t i = 0; i < kM * kWidth; ++i) {
      const bool is_inside = i % kWidth >= kBefore && i % kWidth < kBefore + kN;
      if (is_inside) product.push_back(rows[i]);
      num_changed += !is_inside && rows[i] != before[i];
    }
    Reference want({kM, kN, kK}, a, false, half, false);
    const Operands operands = dtype == DType::kBF16 ? Operands::kBF16 : Operands::kF32;
    CHECK(want.count_wrong(product, kK, dtype, accumulate ? inside : std::vector<float>{}, *device, operands,
                           /*has_factor=*/true) == 0);
    CHECK(num_changed == 0);
    CHECK(out.guard_intact());
  }
}

namespace {

// Whole numbers of up to 4.
std::vector<float> whole_numbers(int64_t count, uint64_t seed) {
  std::vector<float> values(static_cast<size_t>(count));
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = static_cast<float>(static_cast<int>(philox4x32(seed, 3, i)[0] % 9) - 4);
  }
  return values;
}

// out += 0.5 a b of whole numbers, where a and out are columns of wider rows: all of `out`, as floats. Sums are
// exact, and so is what is rounded to bf16, once.
struct FewTerms {
  static constexpr int64_t kBefore = 16, kBehind = 40;  // columns beside those
  Shape shape;
  bool b_transposed;
  int64_t width = kBefore + shape.n + kBehind, a_width = shape.k + kBefore;

  std::vector<float> run(Device& device) const {
    const TestTensor a(device, DType::kBF16, {shape.m, a_width}, whole_numbers(shape.m * a_width, 31));
    const std::vector<float> b = whole_numbers(shape.n * shape.k, 32);
    const TestTensor tb = b_transposed ? TestTensor(device, DType::kBF16, {shape.k, shape.n}, b)
                                       : TestTensor(device, DType::kBF16, {shape.n, shape.k}, b);
    // Beside sums of some hundreds these have digits that bf16 rounds.
    const TestTensor out(device, DType::kBF16, {shape.m, width}, random_bf16(shape.m * width, 33, 4.0f));
    const auto columns = [](TensorView t) {
      t.data = static_cast<std::byte*>(t.data) + kBefore * size_of(t.dtype);
      return t;
    };
    gemm(device, {.a = columns(a),
                  .b = tb,
                  .b_transposed = b_transposed,
                  .out = columns(out),
                  .accumulate = true,
                  .factor = 0.5f,
                  .a_padding = kBefore,
                  .out_padding = kBefore + kBehind});
    CHECK((out.guard_intact() && a.guard_intact() && tb.guard_intact()));
    return out.host();
  }
};

}  // namespace

// As adapters add them to the output of their layer and to its input gradient.
TEST_CASE("gemm rounds once when it adds a product of few terms", "[kernels][gemm]") {
  const auto [m, n, k] = GENERATE(table<int64_t, int64_t, int64_t>({{1, 8, 8},
                                                                    {5, 40, 16},
                                                                    {33, 264, 40},
                                                                    {17, 128, 64},
                                                                    {130, 520, 64},
                                                                    {257, 136, 96},
                                                                    {70, 776, 128},
                                                                    {300, 264, 128}}));
  const bool b_transposed = GENERATE(false, true);
  const FewTerms product{{m, n, k}, b_transposed};
  const int64_t before_out = FewTerms::kBefore, width = product.width, a_width = product.a_width;
  const auto a = whole_numbers(m * a_width, 31), b = whole_numbers(n * k, 32),
             before = random_bf16(m * width, 33, 4.0f);
  for (Device* device : devices()) {
    const std::vector<float> got = product.run(*device);
    int64_t wrong = 0;
    for (int64_t i = 0; i < m * width; ++i) {
      const int64_t row = i / width, col = i % width - before_out;
      double want = before[i];
      for (int64_t j = 0; j < k && col >= 0 && col < n; ++j) {
        want +=
            0.5 * double{a[row * a_width + before_out + j]} * double{b[b_transposed ? j * n + col : col * k + j]};
      }
      wrong += got[i] != decode_bf16(encode_bf16(static_cast<float>(want)));
    }
    CAPTURE(m, n, k, b_transposed, device->name());
    CHECK(wrong == 0);
  }
}

// So many rows and columns that blocks of a GPU take several tiles one after another.
TEST_CASE("gemm of few terms and many columns on a GPU gives the CPU's bits", "[kernels][gemm][devices][slow]") {
  const auto [m, n, k] = GENERATE(table<int64_t, int64_t, int64_t>(
      {{4100, 2056, 64}, {2048, 11008, 64}, {8200, 1032, 16}, {4100, 4104, 128}, {777, 9000, 96}}));
  const bool b_transposed = GENERATE(false, true);
  if (gpu() == nullptr) return;
  const FewTerms product{{m, n, k}, b_transposed};
  CAPTURE(m, n, k, b_transposed);
  const std::vector<float> got = product.run(*gpu());
  CHECK((got == product.run(cpu_device())));
  CHECK((got == product.run(*gpu())));
}

TEST_CASE("gemm of fp8 operands multiplies what their codes and scales mean", "[kernels][gemm]") {
  const auto [m, n, k] = GENERATE(table<int64_t, int64_t, int64_t>(
      {{1, 1, 1}, {5, 3, 16}, {17, 33, 37}, {65, 130, 131}, {48, 80, 272}, {33, 16, 48}}));
  const DType out_dtype = GENERATE(DType::kF32, DType::kBF16);
  const auto before = random_bf16(m * n, 12, 1000.0f);
  for (Device* device : devices()) {
    for (const Format& a_format : kFloat8Formats) {
      for (const Format& b_format : kFloat8Formats) {
        const TestMatrix a = a_format.make(*device, m, k), b = b_format.make(*device, n, k);
        fill_random_codes(*device, a, 10);
        fill_random_codes(*device, b, 11);
        const TestTensor out(*device, out_dtype, {m, n}), sum(*device, out_dtype, {m, n}, before);
        gemm(*device, {.a = a, .b = b, .out = out});
        gemm(*device, {.a = a, .b = b, .out = sum, .accumulate = true});

        Reference want({m, n, k}, a.host(), false, b.host(), false);
        CAPTURE(m, n, k, describe(a.view()), describe(b.view()), device->name());
        CHECK(want.count_wrong(out.host(), k, out_dtype, {}, *device, Operands::kFloat8) == 0);
        CHECK(want.count_wrong(sum.host(), k, out_dtype, before, *device, Operands::kFloat8) == 0);
        CHECK((out.guard_intact() && sum.guard_intact() && a.guard_intact() && b.guard_intact()));
      }
    }
  }
}

namespace {

// The operands of one product of the model's FP8 recipes, and how they are scaled.
struct Float8Pair {
  Format a, b;
};
constexpr int64_t kBlock = 128;
const Float8Pair kModelPairs[] = {
    {{DType::kE4M3, Scaling::kTensor}, {DType::kE4M3, Scaling::kTensor}},
    {{DType::kE5M2, Scaling::kTensor}, {DType::kE4M3, Scaling::kTensor}},
    {{DType::kE4M3, Scaling::kTensor}, {DType::kE5M2, Scaling::kTensor}},
    {{DType::kE4M3, Scaling::kGroup, kBlock}, {DType::kE4M3, Scaling::kBlock, kBlock}},
    {{DType::kE5M2, Scaling::kGroup, kBlock}, {DType::kE4M3, Scaling::kBlock, kBlock}},
    {{DType::kE4M3, Scaling::kBlock, kBlock}, {DType::kE4M3, Scaling::kGroup, kBlock}},
    {{DType::kE4M3, Scaling::kGroup, kBlock}, {DType::kE4M3, Scaling::kGroup, kBlock}},
    {{DType::kE5M2, Scaling::kGroup, kBlock}, {DType::kE4M3, Scaling::kGroup, kBlock}},
};

// Whole numbers of up to 3 for codes, and powers of two for scales.
void fill_whole(Device& device, const TestMatrix& m, uint64_t seed) {
  std::vector<uint8_t> codes(static_cast<size_t>(m.data.view().numel()));
  for (size_t i = 0; i < codes.size(); ++i) {
    const float value = static_cast<float>(static_cast<int>(philox4x32(seed, 1, i)[0] % 7) - 3);
    codes[i] = m.data.view().dtype == DType::kE4M3 ? encode_e4m3(value).bits : encode_e5m2(value).bits;
  }
  upload(device, m.data.view(), codes);
  std::vector<float> scales(static_cast<size_t>(m.scale->view().numel()));
  for (size_t i = 0; i < scales.size(); ++i) {
    scales[i] = std::ldexp(1.0f, static_cast<int>(philox4x32(seed, 2, i)[0] % 4) - 2);
  }
  upload(device, m.scale->view(), scales);
}

}  // namespace

TEST_CASE("gemm of fp8 whole numbers scaled by powers of two is exact", "[kernels][gemm][slow]") {
  // Sums over 128 terms stay below 2^11, which FP8 tensor cores hold exactly; so does fp32 the scaled ones. A scale
  // that is read from the wrong place shows.
  const auto [m, n, k] = GENERATE(table<int64_t, int64_t, int64_t>({{16, 16, 16},
                                                                    {48, 80, 112},
                                                                    {256, 128, 512},
                                                                    {144, 272, 656},
                                                                    {400, 144, 1040},
                                                                    {20, 32, 160},
                                                                    {16, 20, 160},
                                                                    {33, 65, 200}}));
  const DType out_dtype = GENERATE(DType::kF32, DType::kBF16);
  std::vector<float> before(static_cast<size_t>(m * n));
  for (size_t i = 0; i < before.size(); ++i) before[i] = static_cast<float>(i % 31);
  for (Device* device : devices()) {
    for (const Float8Pair& pair : kModelPairs) {
      const TestMatrix a = pair.a.make(*device, m, k), b = pair.b.make(*device, n, k);
      fill_whole(*device, a, 20);
      fill_whole(*device, b, 21);
      const TestTensor out(*device, out_dtype, {m, n}), sum(*device, out_dtype, {m, n}, before);
      gemm(*device, {.a = a, .b = b, .out = out});
      gemm(*device, {.a = a, .b = b, .out = sum, .accumulate = true});
      // After other products: equal input gives equal bits.
      const TestTensor again(*device, out_dtype, {m, n});
      gemm(*device, {.a = a, .b = b, .out = again});

      const Reference want({m, n, k}, a.host(), false, b.host(), false);
      const auto rounded = [&](double x) {
        return out_dtype == DType::kBF16 ? decode_bf16(encode_bf16(static_cast<float>(x))) : static_cast<float>(x);
      };
      const auto got = out.host(), got_sum = sum.host();
      // What a GPU may do to products that accumulate to bf16.
      const bool rounds_twice = device->kind() == DeviceKind::kCuda && out_dtype == DType::kBF16;
      int wrong = 0, wrong_sum = 0;
      for (size_t i = 0; i < got.size(); ++i) {
        wrong += got[i] != rounded(want.sum[i]);
        const float product = rounds_twice ? rounded(want.sum[i]) : static_cast<float>(want.sum[i]);
        const float total = rounded(want.sum[i] + double{before[i]});
        wrong_sum += got_sum[i] != total && got_sum[i] != rounded(double{product} + double{before[i]});
      }
      CAPTURE(m, n, k, describe(a.view()), describe(b.view()), device->name());
      CHECK(wrong == 0);
      CHECK(wrong_sum == 0);
      CHECK((again.bytes() == out.bytes()));
      CHECK((out.guard_intact() && sum.guard_intact() && a.guard_intact() && b.guard_intact()));
    }
  }
}

TEST_CASE("gemm of fp8 operands accumulates fast where that is asked for", "[kernels][gemm]") {
  const int64_t k = GENERATE(16, 4096);
  constexpr int64_t kM = 32, kN = 48;
  for (Device* device : devices()) {
    for (const Float8Pair& pair : kModelPairs) {
      const TestMatrix a = pair.a.make(*device, kM, k), b = pair.b.make(*device, kN, k);
      fill_random_codes(*device, a, 22);
      fill_random_codes(*device, b, 23);
      const TestTensor exact(*device, DType::kF32, {kM, kN}), fast(*device, DType::kF32, {kM, kN});
      gemm(*device, {.a = a, .b = b, .out = exact});
      gemm(*device, {.a = a, .b = b, .out = fast, .fast_accumulation = true});
      Reference want({kM, kN, k}, a.host(), false, b.host(), false);
      CAPTURE(k, describe(a.view()), describe(b.view()), device->name());
      CHECK(want.count_wrong(exact.host(), k, DType::kF32, {}, *device, Operands::kFloat8) == 0);
      CHECK(want.count_wrong(fast.host(), k, DType::kF32, {}, *device, Operands::kFloat8Fast) == 0);
      // Block scaling and the CPU have nothing to speed up.
      const bool may_differ = device->kind() == DeviceKind::kCuda && pair.a.scaling == Scaling::kTensor;
      CHECK((may_differ || fast.bytes() == exact.bytes()));
    }
  }
}

TEST_CASE("gemm scales the sum of per-tensor codes once", "[kernels][gemm]") {
  // Whole numbers, so that the sum of products is exact: the result then has the bits of sum * (scale_a * scale_b).
  constexpr int64_t kM = 9, kN = 20, kK = 40;
  constexpr float kScaleA = 0.1f, kScaleB = 1.0f / 3.0f;
  std::vector<float> a(kM * kK), b(kN * kK);
  for (size_t i = 0; i < a.size(); ++i) a[i] = static_cast<float>(static_cast<int>(i * 7 % 17) - 8);
  for (size_t i = 0; i < b.size(); ++i) b[i] = static_cast<float>(static_cast<int>(i * 5 % 9) - 4);
  for (Device* device : devices()) {
    const TestTensor ta(*device, DType::kE4M3, {kM, kK}, a), tb(*device, DType::kE5M2, {kN, kK}, b);
    const TestTensor scale_a(*device, DType::kF32, {1}, {kScaleA}), scale_b(*device, DType::kF32, {1}, {kScaleB});
    const TestTensor out(*device, DType::kF32, {kM, kN});
    gemm(*device, {.a = ScaledView(ta, scale_a, Scaling::kTensor),
                   .b = ScaledView(tb, scale_b, Scaling::kTensor),
                   .out = out});
    const Reference exact({kM, kN, kK}, a, false, b, false);
    const auto got = out.host();
    int wrong = 0;
    for (size_t i = 0; i < got.size(); ++i)
      wrong += got[i] != static_cast<float>(exact.sum[i]) * (kScaleA * kScaleB);
    CHECK(wrong == 0);
  }
}

TEST_CASE("gemm over no terms yields zeros, or leaves what it accumulates to", "[kernels][gemm]") {
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  const auto before = random_bf16(15, 4);
  for (Device* device : devices()) {
    const TensorView a(nullptr, dtype, {3, 0}), b(nullptr, dtype, {5, 0});
    const TestTensor out(*device, dtype, {3, 5}), sum(*device, dtype, {3, 5}, before);
    gemm(*device, {.a = a, .b = b, .out = out});
    gemm(*device, {.a = a, .b = b, .out = sum, .accumulate = true});
    CHECK((out.host() == std::vector<float>(15, 0.0f)));
    CHECK((sum.host() == before));
    CHECK((out.guard_intact() && sum.guard_intact()));
  }
}

TEST_CASE("gemm with an empty output does nothing", "[kernels][gemm]") {
  for (Device* device : devices()) {
    const TestTensor b(*device, DType::kF32, {5, 4}, random_normal(20, 5));
    const TestTensor a(*device, DType::kF32, {0, 4}), out(*device, DType::kF32, {0, 5});
    gemm(*device, {.a = a, .b = b, .out = out});
    CHECK(out.guard_intact());
  }
}

TEST_CASE("gemm gives the same bits on any number of threads and anywhere in memory", "[kernels][gemm]") {
  const auto [m, n, k] =
      GENERATE(table<int64_t, int64_t, int64_t>({{3, 4, 5}, {1, 40, 70}, {300, 70, 200}, {1100, 500, 20}}));
  const auto a = random_normal(m * k, 6), b = random_normal(n * k, 7);
  // One element of padding in front: the same operands at another alignment.
  std::vector<float> shifted_a = a, shifted_b = b;
  shifted_a.insert(shifted_a.begin(), 0.0f);
  shifted_b.insert(shifted_b.begin(), 0.0f);
  const TestTensor ta(cpu_device(), DType::kF32, {m, k}, a), tb(cpu_device(), DType::kF32, {n, k}, b);
  const TestTensor more_a(cpu_device(), DType::kF32, {m * k + 1}, shifted_a),
      more_b(cpu_device(), DType::kF32, {n * k + 1}, shifted_b);
  const TestTensor parallel(cpu_device(), DType::kF32, {m, n}), serial(cpu_device(), DType::kF32, {m, n});
  const TestTensor shifted(cpu_device(), DType::kF32, {m, n});
  set_num_threads(3);
  gemm(cpu_device(), {.a = ta, .b = tb, .out = parallel});
  set_num_threads(1);
  gemm(cpu_device(), {.a = ta, .b = tb, .out = serial});
  gemm(cpu_device(), {.a = more_a.view().rows(1, m * k).reshaped({m, k}),
                      .b = more_b.view().rows(1, n * k).reshaped({n, k}),
                      .out = shifted});
  set_num_threads(0);
  CAPTURE(m, n, k);
  CHECK((parallel.bytes() == serial.bytes()));
  CHECK((parallel.bytes() == shifted.bytes()));
}

TEST_CASE("gemm keeps bad values visible", "[kernels][gemm]") {
  const float bad = GENERATE(INFINITY, NAN);
  auto a = random_normal(6 * 40, 8);
  a[40 + 7] = bad;
  for (Device* device : devices()) {
    const TestTensor ta(*device, DType::kF32, {6, 40}, a), tb(*device, DType::kF32, {5, 40}, random_normal(200, 9));
    const TestTensor out(*device, DType::kF32, {6, 5});
    gemm(*device, {.a = ta, .b = tb, .out = out});
    const auto got = out.host();
    int wrong = 0;
    for (int64_t i = 0; i < 30; ++i) wrong += std::isfinite(got[i]) == (i / 5 == 1);
    CHECK(wrong == 0);
  }
}

TEST_CASE("gemm refuses operands that do not fit, by name", "[kernels][gemm]") {
  const TestTensor a(cpu_device(), DType::kF32, {4, 6}), b(cpu_device(), DType::kF32, {5, 6}),
      out(cpu_device(), DType::kF32, {4, 5});
  const TestTensor b16(cpu_device(), DType::kBF16, {5, 6}), codes(cpu_device(), DType::kE4M3, {5, 6}),
      ids(cpu_device(), DType::kI32, {4, 5});
  const TestTensor scale(cpu_device(), DType::kF32, {1}, {1.0f}), vector(cpu_device(), DType::kF32, {4});
  const TestTensor square(cpu_device(), DType::kF32, {5, 5});
  const ScaledView b8(codes, scale, Scaling::kTensor), unscaled(codes, {}, Scaling::kTensor);
  const auto message = [&](const Gemm& op) { return internal_error([&] { gemm(cpu_device(), op); }); };
  const auto refused = [&](const Gemm& op, const std::string& tensor) {
    const std::string text = message(op);
    return contains(text, "gemm: ") && contains(text, tensor);
  };
  CHECK(refused({.a = a, .b = a, .out = out}, "b is fp32 [4, 6], wanted shape [5, 6]"));
  CHECK(refused({.a = b, .b = b, .out = out}, "a is fp32 [5, 6], wanted shape [4, 6]"));
  CHECK(refused({.a = a, .b = b, .a_transposed = true, .out = out}, "a is fp32 [4, 6]"));
  CHECK(refused({.a = a, .b = b, .out = ids}, "out is"));
  CHECK(refused({.a = a, .b = b, .out = vector}, "out is fp32 [4]"));
  CHECK(refused({.a = a, .b = b, .out = {}}, "out is no tensor"));
  CHECK(refused({.a = a, .b = ScaledView(), .out = out}, "b is no tensor"));
  CHECK(refused({.a = a, .b = b16, .out = out}, "a is fp32 [4, 6] and b is bf16 [5, 6]"));
  CHECK(refused({.a = a, .b = b8, .out = out}, "b is e4m3 [5, 6]"));
  CHECK(refused({.a = b8,
                 .b = ScaledView(codes.view().reshaped({6, 5}), scale, Scaling::kTensor),
                 .b_transposed = true,
                 .out = square},
                "b is e4m3 [6, 5]"));
  CHECK(refused({.a = a, .b = unscaled, .out = out}, "scale of b is no tensor"));
}
