#include "tests/kernels/float8_devices.h"

#include <limits>
#include <utility>

#include "kernels/ops/attention/attention.h"
#include "kernels/ops/attention/rope.h"
#include "tests/kernels/op_bounds.h"

// Quantization, rotation and the attention maximum on every other device against the CPU. All of these are defined
// operation by operation, so bits are equal. Without another device there is nothing to compare. Norm and SwiGLU:
// test_float8_norm_devices.cpp and test_float8_swiglu_devices.cpp; optimizer: test_moment_devices.cpp.
using namespace parka;
using namespace parka::test;

namespace {

// ---- Quantize ----

// Whole and ragged, narrow and wide, and one that fills many blocks of a GPU.
const std::vector<MatrixShape> kShapes = {{1, 1},     {1, 300},   {300, 1},   {37, 53},   {16, 16},   {48, 80},
                                          {130, 129}, {128, 128}, {129, 144}, {256, 384}, {512, 1024}};

// What quantize writes: plain formats, both FP8 formats in one scale, and groups and blocks with the scales that
// each may have.
std::vector<Format> output_formats() {
  std::vector<Format> formats = {plain_format(DType::kF32), plain_format(DType::kBF16)};
  for (const DType dtype : {DType::kE4M3, DType::kE5M2}) {
    formats.push_back({dtype, Scaling::kTensor});
    formats.push_back({dtype, Scaling::kBlock, 128});
    for (const int64_t group : {16, 32, 64, 128}) {
      for (const DType scale : {DType::kBF16, DType::kF32}) {
        formats.push_back({dtype, Scaling::kGroup, group, scale});
      }
    }
  }
  return formats;
}

const std::vector<Format> kSources = {plain_format(DType::kF32),
                                      plain_format(DType::kBF16),
                                      {DType::kE4M3, Scaling::kTensor},
                                      {DType::kE5M2, Scaling::kTensor},
                                      {DType::kE4M3, Scaling::kGroup, 16, DType::kBF16},
                                      {DType::kE5M2, Scaling::kGroup, 128, DType::kF32},
                                      {DType::kE4M3, Scaling::kBlock, 128}};

enum class Content { kMixed, kZeros, kTiny, kNan, kInfinity, kLargest };

// kMixed: magnitudes over many powers of two; of the tiles of 16 x 16 some are all zero, and some so small that
// they get scale 1. The others: one kind of trouble.
std::vector<float> contents(Content content, const MatrixShape& s) {
  std::vector<float> x = random_normal(s.numel(), 101);
  for (int64_t i = 0; i < s.numel(); ++i) {
    const int64_t tile = i / s.cols / 16 * 5 + i % s.cols / 16;
    float& v = x[i];
    switch (content) {
      case Content::kMixed:
        v = std::ldexp(v, static_cast<int>(i * 7 % 23) - 15);
        if (tile % 7 == 3) v = std::signbit(v) ? -0.0f : 0.0f;
        if (tile % 7 == 5) v = std::ldexp(v, -110);
        break;
      case Content::kZeros: v = i % 3 == 0 ? -0.0f : 0.0f; break;
      case Content::kTiny: v = std::ldexp(v, -104 - static_cast<int>(i % 40)); break;  // subnormal ones, too
      case Content::kNan: v = i % 37 == 5 ? -NAN : v; break;
      case Content::kInfinity: v = i == s.numel() / 2 ? -INFINITY : v; break;
      case Content::kLargest:
        v = std::copysign(std::numeric_limits<float>::max() / static_cast<float>(1 + i % 5), v);
    }
  }
  return x;
}

std::unique_ptr<TestMatrix> source(const Format& format, const MatrixShape& s, const std::vector<float>& x) {
  std::unique_ptr<TestMatrix> made(new TestMatrix(format.make(cpu_device(), s.rows, s.cols)));
  quantize(cpu_device(), {.x = TestTensor(cpu_device(), DType::kF32, {s.rows, s.cols}, x), .out = *made});
  return made;
}

void check_quantize(Device& device, const TestMatrix& x, const Format& format, const MatrixShape& s) {
  const std::unique_ptr<TestMatrix> x_there = copy_on(device, x);
  for (const Copies copies : kAllCopies) {
    const Output want(cpu_device(), format, s.rows, s.cols, copies), got(device, format, s.rows, s.cols, copies);
    quantize(cpu_device(), {.x = x, .out = want.row(), .out_t = want.transposed()});
    quantize(device, {.x = *x_there, .out = got.row(), .out_t = got.transposed()});
    CAPTURE(s, describe(x.view()), describe(got.matrix.view()), copies);
    CHECK(first_difference("quantized", got, want) == "");
  }
  CHECK(first_difference("x", *x_there, x) == "");
}

}  // namespace

TEST_CASE("quantize on another device gives the CPU's bits", "[kernels][quantize][devices]") {
  const MatrixShape s = GENERATE(from_range(kShapes));
  for (Device* device : other_devices()) {
    const std::vector<float> values = contents(Content::kMixed, s);
    for (const Format& from : kSources) {
      const std::unique_ptr<TestMatrix> x = source(from, s, values);
      for (const Format& to : output_formats()) check_quantize(*device, *x, to, s);
    }
  }
}

TEST_CASE("quantize on another device treats zeros, tiny and bad values as the CPU does",
          "[kernels][quantize][devices]") {
  const Content content =
      GENERATE(Content::kZeros, Content::kTiny, Content::kNan, Content::kInfinity, Content::kLargest);
  for (Device* device : other_devices()) {
    for (const MatrixShape s : {MatrixShape{37, 53}, MatrixShape{128, 256}}) {
      CAPTURE(static_cast<int>(content));
      const std::vector<float> values = contents(content, s);
      for (const Format& from : kSources) {
        const std::unique_ptr<TestMatrix> x = source(from, s, values);
        for (const Format& to : output_formats()) check_quantize(*device, *x, to, s);
      }
    }
  }
}

TEST_CASE("quantize on another device takes a given scale and a given maximum as the CPU does",
          "[kernels][quantize][devices]") {
  for (Device* device : other_devices()) {
    for (const MatrixShape s :
         {MatrixShape{1, 1}, MatrixShape{37, 53}, MatrixShape{128, 256}, MatrixShape{256, 128}}) {
      for (const Format& from : kSources) {
        for (const Content content : {Content::kMixed, Content::kNan, Content::kInfinity}) {
          const std::unique_ptr<TestMatrix> x = source(from, s, contents(content, s));
          const std::unique_ptr<TestMatrix> x_there = copy_on(*device, *x);
          float largest = 0;
          for (const float v : x->host()) largest = std::isnan(v) ? largest : std::max(largest, std::abs(v));
          for (const DType dtype : {DType::kE4M3, DType::kE5M2}) {
            for (const Copies copies : kAllCopies) {
              CAPTURE(s, describe(x->view()), static_cast<int>(content), name_of(dtype), copies);
              const Format format{dtype, Scaling::kTensor};
              const Output got(*device, format, s.rows, s.cols, copies),
                  want(cpu_device(), format, s.rows, s.cols, copies);
              // So small that many values lie beyond the format's maximum.
              const TestTensor scale(cpu_device(), DType::kF32, {1}, {0.003f});
              for (const Output* out : {&got, &want}) out->set_scale(out == &got ? *device : cpu_device(), scale);
              quantize(cpu_device(), {.x = *x, .out = want.row(), .out_t = want.transposed(), .scale_given = true});
              quantize(*device, {.x = *x_there, .out = got.row(), .out_t = got.transposed(), .scale_given = true});
              CHECK(first_difference("with the scale given", got, want) == "");

              const Output found(*device, format, s.rows, s.cols, copies);
              const Output searched(cpu_device(), format, s.rows, s.cols, copies);
              const TestTensor amax(*device, DType::kF32, {1}, {largest});
              quantize(*device, {.x = *x_there, .out = found.row(), .out_t = found.transposed(), .amax = amax});
              quantize(cpu_device(), {.x = *x, .out = searched.row(), .out_t = searched.transposed()});
              CHECK(first_difference("with the maximum given", found, searched) == "");
              CHECK((amax.guard_intact() && amax.host()[0] == largest));
            }
          }
        }
      }
    }
  }
}

TEST_CASE("quantize on another device takes tensors that are not aligned", "[kernels][quantize][devices]") {
  // Rows from the second on of a matrix with an odd number of columns.
  constexpr int64_t kRows = 70, kCols = 131, kAll = kRows + 1;
  const auto below = [](const TensorView& t) { return t.rows(1, t.dim[0] - 1); };
  for (Device* device : other_devices()) {
    for (const DType from : {DType::kF32, DType::kBF16}) {
      const std::vector<float> values = random_bf16(kAll * kCols, 102);
      for (const Format to : {Format{DType::kE4M3, Scaling::kTensor}, Format{DType::kE5M2, Scaling::kGroup, 16},
                              Format{DType::kE4M3, Scaling::kGroup, 128}}) {
        const auto run = [&](Device& d, const TestTensor& codes, const TestTensor& codes_t,
                             const TestMatrix& scales, const TestMatrix& scales_t) {
          const TestTensor x(d, from, {kAll, kCols}, values);
          const ScaledView out(below(codes), *scales.scale, to.scaling, to.group);
          const bool shared = to.scaling == Scaling::kTensor;
          const ScaledView out_t(below(codes_t), shared ? *scales.scale : *scales_t.scale, to.scaling, to.group);
          quantize(d, {.x = below(x), .out = out, .out_t = out_t});
        };
        const TestTensor want(cpu_device(), to.dtype, {kAll, kCols}), got(*device, to.dtype, {kAll, kCols});
        const TestTensor want_t(cpu_device(), to.dtype, {kCols + 1, kRows}),
            got_t(*device, to.dtype, {kCols + 1, kRows});
        const TestMatrix want_s = to.make(cpu_device(), kRows, kCols), got_s = to.make(*device, kRows, kCols);
        const TestMatrix want_s_t = to.make(cpu_device(), kCols, kRows), got_s_t = to.make(*device, kCols, kRows);
        run(cpu_device(), want, want_t, want_s, want_s_t);
        run(*device, got, got_t, got_s, got_s_t);
        CAPTURE(name_of(from), describe(want_s.view()));
        CHECK(first_difference("out", got, want) == "");
        CHECK(first_difference("out_t", got_t, want_t) == "");
        CHECK(first_difference("scales", got_s, want_s) == "");
        CHECK(first_difference("scales of out_t", got_s_t, want_s_t) == "");
        CHECK((got.guard_intact() && got_t.guard_intact()));
      }
    }
  }
}

TEST_CASE("another device computes other groups and blocks as the CPU does, or refuses them",
          "[kernels][quantize][devices]") {
  const MatrixShape s{37, 60};
  for (Device* device : other_devices()) {
    const std::unique_ptr<TestMatrix> x = source(plain_format(DType::kF32), s, contents(Content::kMixed, s));
    const std::unique_ptr<TestMatrix> x_there = copy_on(*device, *x);
    for (const Format to : {Format{DType::kE4M3, Scaling::kGroup, 5}, Format{DType::kE5M2, Scaling::kGroup, 256},
                            Format{DType::kE4M3, Scaling::kBlock, 16}}) {
      const Output want(cpu_device(), to, s.rows, s.cols, Copies::kBoth),
          got(*device, to, s.rows, s.cols, Copies::kBoth);
      quantize(cpu_device(), {.x = *x, .out = want.row(), .out_t = want.transposed()});
      bool is_refused = false;
      try {
        quantize(*device, {.x = *x_there, .out = got.row(), .out_t = got.transposed()});
      } catch (const Error&) {
        is_refused = true;
      }
      CAPTURE(describe(got.matrix.view()), is_refused);
      if (!is_refused) CHECK(first_difference("quantized", got, want) == "");
    }
  }
}

namespace {

// ---- Rope ----

struct Heads {
  int64_t T, S, H, Hkv, D;
  int64_t width() const { return (H + 2 * Hkv) * D; }
};
std::ostream& operator<<(std::ostream& out, const Heads& s) {
  return out << "T " << s.T << " S " << s.S << " H " << s.H << " Hkv " << s.Hkv << " D " << s.D;
}

// Head widths of which halves are whole groups, of which they are not (48, 96), and that fit nothing. The last one
// has more heads than a thread block.
const std::vector<Heads> kHeads = {{1, 1, 1, 1, 32},     {37, 13, 4, 2, 64},   {130, 65, 3, 3, 128},
                                   {33, 40, 4, 1, 48},   {35, 7, 2, 2, 96},    {26, 13, 5, 1, 34},
                                   {256, 128, 8, 8, 64}, {64, 64, 16, 4, 128}, {129, 50, 3, 1, 80},
                                   {70, 35, 2, 1, 256},  {20, 7, 30, 10, 128}};

}  // namespace

TEST_CASE("rope_forward on another device saves the CPU's codes and leaves what they decode to",
          "[kernels][rope][devices]") {
  const Heads s = GENERATE(from_range(kHeads));
  for (Device* device : other_devices()) {
    const std::vector<float> cos_sin = rope_table(s.S, s.D, 1e4);
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      std::vector<float> x = random_values(dtype, s.T * s.width(), 111);
      for (int64_t i = 0; i < s.T * s.width(); ++i) {
        if (i / 48 % 9 == 4) x[i] = 0;  // whole groups of zeros among the values
      }
      for (const Format& format :
           {Format{DType::kE4M3, Scaling::kGroup, 16, DType::kBF16}, Format{DType::kE4M3, Scaling::kGroup, 16},
            Format{DType::kE5M2, Scaling::kGroup, 32, DType::kBF16}, Format{DType::kE4M3, Scaling::kGroup, 64},
            Format{DType::kE4M3, Scaling::kGroup, 128, DType::kBF16}}) {
        const auto run = [&](Device& d, const TestTensor& qkv, const TestMatrix& saved) {
          const TestTensor table(d, DType::kF32, {s.S, s.D}, cos_sin);
          rope_forward(
              d, {.qkv = qkv, .cos_sin = table, .num_heads = s.H, .num_kv_heads = s.Hkv, .saved = saved.view()});
        };
        const TestTensor want(cpu_device(), dtype, {s.T, s.width()}, x), got(*device, dtype, {s.T, s.width()}, x);
        const TestMatrix want_saved = format.make(cpu_device(), s.T, s.width());
        const TestMatrix got_saved = format.make(*device, s.T, s.width());
        run(cpu_device(), want, want_saved);
        run(*device, got, got_saved);
        CAPTURE(s, name_of(dtype), describe(want_saved.view()));
        CHECK(first_difference("saved", got_saved, want_saved) == "");
        CHECK(first_difference("qkv", got, want) == "");
        CHECK(got.guard_intact());
      }
    }
  }
}

// ---- Attention ----

TEST_CASE("attention_forward on another device finds the largest output", "[kernels][attention][devices]") {
  const int64_t D = GENERATE(int64_t{64}, int64_t{128}, int64_t{48});
  for (Device* device : other_devices()) {
    for (const int64_t S : {1, 50, 128, 333}) {
      for (const DType dtype : {DType::kF32, DType::kBF16}) {
        constexpr int64_t kB = 3, kH = 4, kHkv = 2;
        const int64_t T = kB * S, width = (kH + 2 * kHkv) * D;
        for (const int64_t place : {int64_t{0}, T / 2, T - 1}) {
          std::vector<float> x = random_bf16(T * width, 121, 0.5f);
          x[place * width + (kH + kHkv) * D + D - 3] = -30.0f;  // in a value: the largest output is near this row
          const TestTensor qkv(*device, dtype, {T, width}, x), out(*device, dtype, {T, kH * D});
          const TestTensor same(*device, dtype, {T, kH * D}), lse(*device, DType::kF32, {kB, kH, S});
          const TestTensor amax(*device, DType::kF32, {1});  // poisoned: NaN
          AttentionForward op{qkv, out, lse, S, kH, kHkv, 1.0f / std::sqrt(static_cast<float>(D)), amax};
          attention_forward(*device, op);
          float largest = 0;
          for (const float v : out.host()) largest = std::max(largest, std::abs(v));
          CAPTURE(D, S, name_of(dtype), place);
          CHECK(amax.host()[0] == largest);
          CHECK((amax.guard_intact() && out.guard_intact() && lse.guard_intact()));
          // Asking for it changes nothing else.
          op.out = same;
          op.out_amax = {};
          attention_forward(*device, op);
          CHECK(first_difference("out", same, out) == "");
        }
      }
    }
  }
}
