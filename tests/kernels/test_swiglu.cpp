#include "kernels/ops/swiglu/swiglu.h"

#include "kernels/ops/quantize/quantize.h"
#include "tests/kernels/op_checks.h"
#include "tests/support/catch.h"

using namespace parka;
using namespace parka::test;

namespace {

const Format kGroup16{DType::kE4M3, Scaling::kGroup, 16, DType::kBF16};
const Format kGroup3{DType::kE4M3, Scaling::kGroup, 3, DType::kF32};

double relative_rounding(DType dtype) { return dtype == DType::kBF16 ? 0x1p-8 : 0x1p-24; }
double sigmoid(double gate) { return 1 / (1 + std::exp(-gate)); }
double silu(double gate) { return gate * sigmoid(gate); }
constexpr GateActivation kActivations[] = {GateActivation::kSilu, GateActivation::kGeluTanh};
// The definitions in double. GELU with tanh as papers write it, where it is not all cancellation.
double activated(GateActivation activation, double gate) {
  if (activation == GateActivation::kSilu) return silu(gate);
  const double inner = std::sqrt(2 / std::acos(-1.0)) * (gate + 0.044715 * gate * gate * gate);
  return inner < -4 ? gate * sigmoid(2 * inner) : gate * 0.5 * (1 + std::tanh(inner));
}
// How much a relative error of the sigmoid's argument changes the result, relative to it.
double argument_magnitude(GateActivation activation, double gate) {
  if (activation == GateActivation::kSilu || gate > 0) return 0;
  return std::abs(gate) * (1.6 + 0.072 * gate * gate);
}

// up_gate of one token after another, with gates from -40 to 40.
std::vector<float> random_up_gate(int64_t rows, int64_t width) {
  auto x = random_bf16(rows * 2 * width, 80);
  for (int64_t i = 0; i < rows * 2 * width; ++i) {
    if (i % (2 * width) >= width && i % 5 == 0) x[i] *= 10;
  }
  return x;
}

struct Case {
  Case(const Format& format, int64_t rows_, int64_t width_)
      : rows(rows_), width(width_), up_gate(format.make(cpu_device(), rows, 2 * width)) {
    const TestTensor values(cpu_device(), DType::kF32, {rows, 2 * width}, random_up_gate(rows, width));
    quantize(cpu_device(), {.x = values, .out = up_gate});
    const auto x = up_gate.host();
    for (int64_t i = 0; i < rows * width; ++i) {
      up.push_back(x[i / width * 2 * width + i % width]);
      gate.push_back(x[i / width * 2 * width + width + i % width]);
    }
  }
  int64_t rows, width;
  TestMatrix up_gate;
  std::vector<float> up, gate;  // as the op reads them
};

}  // namespace

TEST_CASE("swiglu_forward rounds the fp64 result", "[kernels][swiglu]") {
  const auto [rows, width] = GENERATE(table<int64_t, int64_t>({{1, 1}, {3, 7}, {5, 48}, {37, 65}, {2, 300}}));
  const DType out_dtype = GENERATE(DType::kF32, DType::kBF16);
  const GateActivation activation = GENERATE(from_range(std::begin(kActivations), std::end(kActivations)));
  for (const Format& format :
       {Format{DType::kF32}, Format{DType::kBF16}, Format{DType::kE4M3, Scaling::kGroup, 1}}) {
    const Case c(format, rows, width);
    const TestTensor product(cpu_device(), out_dtype, {rows, width});
    swiglu_forward(cpu_device(), {.up_gate = c.up_gate, .product = product, .activation = activation});
    const auto got = product.host();
    int wrong = 0;
    for (int64_t i = 0; i < rows * width; ++i) {
      const double want = c.up[i] * activated(activation, c.gate[i]);
      // Rounding, the error of exp (5 units in the last place at the far end), and its flush to zero.
      const double argument = 4 * 0x1p-24 * argument_magnitude(activation, c.gate[i]);
      const double bound = (1.01 * relative_rounding(out_dtype) + 8e-7 + argument) * std::abs(want) + 1e-36;
      wrong += !(std::abs(got[i] - want) <= bound);
    }
    CAPTURE(rows, width, describe(c.up_gate.view()), int(activation));
    CHECK(wrong == 0);
    CHECK((product.guard_intact() && c.up_gate.guard_intact()));
  }
}

TEST_CASE("swiglu is right where exp overflows, and keeps bad values visible", "[kernels][swiglu]") {
  const GateActivation activation = GENERATE(from_range(std::begin(kActivations), std::end(kActivations)));
  const float most = activation == GateActivation::kSilu ? 3e38f : 1e18f;  // GELU's slope squares it
  const std::vector<float> gate = {-1e4f, -100.0f, -89.0f, -0.0f, 89.0f, 1e4f, most, NAN, INFINITY, -INFINITY};
  const std::vector<float> want = {0.0f, 0.0f, 0.0f, 0.0f, 89.0f, 1e4f, most, NAN, INFINITY, NAN};
  const auto count = static_cast<int64_t>(gate.size());
  std::vector<float> up_gate(gate.size(), 1.0f);
  up_gate.insert(up_gate.end(), gate.begin(), gate.end());
  const TestTensor input(cpu_device(), DType::kF32, {1, 2 * count}, up_gate),
      product(cpu_device(), DType::kF32, {1, count});
  const TestTensor d_product(cpu_device(), DType::kF32, {1, count}, std::vector<float>(gate.size(), 1.0f));
  const TestTensor d_up_gate(cpu_device(), DType::kF32, {1, 2 * count});
  swiglu_forward(cpu_device(), {.up_gate = input, .product = product, .activation = activation});
  swiglu_backward(cpu_device(),
                  {.up_gate = input, .d_product = d_product, .d_up_gate = d_up_gate, .activation = activation});
  const auto got = product.host(), gradient = d_up_gate.host();
  int wrong = 0;
  for (size_t i = 0; i < gate.size(); ++i) {
    const bool same =
        std::isnan(want[i]) ? std::isnan(got[i]) : got[i] == want[i] || std::abs(got[i] - want[i]) < 1e-30f;
    wrong += !same;
    // The derivative by the gate is 0 far to the left and 1 far to the right.
    const float d_gate = gradient[gate.size() + i];
    if (std::isfinite(gate[i]) && gate[i] != 0) wrong += !(std::abs(d_gate - (gate[i] > 0 ? 1.0f : 0.0f)) < 1e-30f);
    if (std::isnan(gate[i])) wrong += !std::isnan(d_gate);
  }
  CHECK(wrong == 0);
}

TEST_CASE("swiglu_forward computes the product from the silu it saves", "[kernels][swiglu]") {
  const Format format = GENERATE(Format{kGroup16}, Format{kGroup3});
  const auto [rows, width] = GENERATE(table<int64_t, int64_t>({{1, 3}, {21, 48}, {5, 33}}));
  const GateActivation activation = GENERATE(from_range(std::begin(kActivations), std::end(kActivations)));
  const Case c({DType::kBF16}, rows, width);
  const TestMatrix saved = format.make(cpu_device(), rows, width), want = format.make(cpu_device(), rows, width);
  const TestTensor product(cpu_device(), DType::kF32, {rows, width});
  swiglu_forward(cpu_device(), {.up_gate = c.up_gate, .silu = saved, .product = product, .activation = activation});

  // With up = 1 the product is act(gate).
  std::vector<float> ones(static_cast<size_t>(rows * 2 * width), 1.0f);
  for (int64_t i = 0; i < rows * width; ++i) ones[i / width * 2 * width + width + i % width] = c.gate[i];
  const TestTensor one_gate(cpu_device(), DType::kF32, {rows, 2 * width}, ones),
      plain(cpu_device(), DType::kF32, {rows, width});
  swiglu_forward(cpu_device(), {.up_gate = one_gate, .product = plain, .activation = activation});
  quantize(cpu_device(), {.x = plain, .out = want});
  CHECK(same_bits(saved, want));

  const auto values = saved.host(), got = product.host();
  int wrong = 0;
  for (int64_t i = 0; i < rows * width; ++i) wrong += got[i] != c.up[i] * values[i];
  CHECK(wrong == 0);
  CHECK((saved.guard_intact() && product.guard_intact()));
}

TEST_CASE("swiglu_forward quantizes its product", "[kernels][swiglu]") {
  const Case c(kGroup16, 37, 96);
  const TestTensor plain(cpu_device(), DType::kF32, {37, 96});
  swiglu_forward(cpu_device(), {.up_gate = c.up_gate, .product = plain});
  for (const Format& format : kFloat8Formats) {
    const TestMatrix product = format.make(cpu_device(), 37, 96), product_t = format.make(cpu_device(), 96, 37);
    const TestMatrix want = format.make(cpu_device(), 37, 96), want_t = format.make(cpu_device(), 96, 37);
    ScaledView view_t = product_t;
    if (format.scaling == Scaling::kTensor) view_t.scale = product.scale->view();
    swiglu_forward(cpu_device(), {.up_gate = c.up_gate, .product = product, .product_t = view_t});
    quantize(cpu_device(), {.x = plain, .out = want});
    quantize(cpu_device(), {.x = plain, .out_t = want_t});
    CAPTURE(describe(product.view()));
    CHECK(same_bits(product, want));
    CHECK((product_t.data.bytes() == want_t.data.bytes()));
    CHECK((format.scaling == Scaling::kTensor || same_bits(product_t, want_t)));
    CHECK((product.guard_intact() && product_t.guard_intact()));
  }
}

TEST_CASE("swiglu_backward is the derivative of swiglu_forward", "[kernels][swiglu]") {
  const auto [rows, width] = GENERATE(table<int64_t, int64_t>({{1, 1}, {3, 7}, {5, 48}, {37, 65}}));
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  const GateActivation activation = GENERATE(from_range(std::begin(kActivations), std::end(kActivations)));
  for (const Format& format : {Format{dtype}, Format{DType::kE4M3, Scaling::kGroup, 1}}) {
    const Case c(format, rows, width);
    const TestTensor d_product(cpu_device(), dtype, {rows, width}, random_bf16(rows * width, 81));
    const TestTensor d_up_gate(cpu_device(), dtype, {rows, 2 * width});
    swiglu_backward(
        cpu_device(),
        {.up_gate = c.up_gate, .d_product = d_product, .d_up_gate = d_up_gate, .activation = activation});
    const auto got = d_up_gate.host(), d = d_product.host();
    int wrong = 0;
    const auto is_wrong = [&](float value, double want) {
      return !(std::abs(value - want) <= 1.01 * relative_rounding(dtype) * std::abs(want) + 1e-5);
    };
    for (int64_t i = 0; i < rows * width; ++i) {
      constexpr double kStep = 1e-5;
      const double slope =
          (activated(activation, c.gate[i] + kStep) - activated(activation, c.gate[i] - kStep)) / (2 * kStep);
      const int64_t at = i / width * 2 * width + i % width;
      wrong += is_wrong(got[at], d[i] * activated(activation, c.gate[i]));
      wrong += is_wrong(got[at + width], d[i] * c.up[i] * slope);
    }
    CAPTURE(rows, width, describe(c.up_gate.view()), int(activation));
    CHECK(wrong == 0);
    CHECK((d_up_gate.guard_intact() && d_product.guard_intact()));
  }
}

TEST_CASE("swiglu_backward uses the saved silu wherever silu stands", "[kernels][swiglu]") {
  constexpr int64_t kRows = 21, kWidth = 48;
  const GateActivation activation = GENERATE(from_range(std::begin(kActivations), std::end(kActivations)));
  const Case c(kGroup16, kRows, kWidth);
  const TestMatrix saved = kGroup16.make(cpu_device(), kRows, kWidth);
  const TestTensor product(cpu_device(), DType::kF32, {kRows, kWidth}),
      again(cpu_device(), DType::kF32, {kRows, kWidth});
  const TestTensor d_product(cpu_device(), DType::kF32, {kRows, kWidth}, random_bf16(kRows * kWidth, 82));
  const TestTensor d_up_gate(cpu_device(), DType::kF32, {kRows, 2 * kWidth});
  swiglu_forward(cpu_device(), {.up_gate = c.up_gate, .silu = saved, .product = product, .activation = activation});
  swiglu_backward(cpu_device(), {.up_gate = c.up_gate,
                                 .silu = saved,
                                 .d_product = d_product,
                                 .d_up_gate = d_up_gate,
                                 .product = again,
                                 .activation = activation});
  CHECK((again.bytes() == product.bytes()));
  const auto s = saved.host(), d = d_product.host(), got = d_up_gate.host();
  int wrong = 0;
  for (int64_t i = 0; i < kRows * kWidth; ++i) {
    const double g = c.gate[i], c0 = 2 * std::sqrt(2 / std::acos(-1.0)), c1 = 0.044715 * c0;
    const bool is_silu = activation == GateActivation::kSilu;
    const double sig = sigmoid(is_silu ? g : c0 * g + c1 * g * g * g), inner = is_silu ? 1 : c0 + 3 * c1 * g * g;
    const double d_gate = d[i] * c.up[i] * (sig + s[i] * inner * (1 - sig));
    const int64_t at = i / kWidth * 2 * kWidth + i % kWidth;
    wrong += got[at] != d[i] * s[i];
    wrong +=
        !(std::abs(got[at + kWidth] - d_gate) <= 2e-6 * std::abs(d[i] * c.up[i]) * (1 + std::abs(s[i] * inner)));
  }
  CHECK(wrong == 0);
}

TEST_CASE("swiglu_backward recomputes the product of swiglu_forward bit for bit", "[kernels][swiglu]") {
  const auto [rows, width] = GENERATE(table<int64_t, int64_t>({{1, 1}, {37, 96}, {40, 65}}));
  const Format input = GENERATE(Format{DType::kBF16}, Format{DType::kE4M3, Scaling::kGroup, 1, DType::kBF16});
  const bool saves_silu = GENERATE(false, true);
  const GateActivation activation = GENERATE(from_range(std::begin(kActivations), std::end(kActivations)));
  const Case c(input, rows, width);
  std::vector<Format> formats(std::begin(kFloat8Formats), std::end(kFloat8Formats));
  formats.push_back({DType::kBF16});
  for (const Format& format : formats) {
    const TestMatrix saved = kGroup16.make(cpu_device(), rows, width);
    const ScaledView silu = saves_silu ? saved.view() : ScaledView();
    const TestMatrix product = format.make(cpu_device(), rows, width),
                     product_t = format.make(cpu_device(), width, rows);
    const TestMatrix again = format.make(cpu_device(), rows, width),
                     again_t = format.make(cpu_device(), width, rows);
    ScaledView view_t = product_t, again_view = again, again_view_t = again_t;
    if (format.scaling == Scaling::kTensor) {
      view_t.scale = again_view.scale = again_view_t.scale = product.scale->view();
    }
    swiglu_forward(
        cpu_device(),
        {.up_gate = c.up_gate, .silu = silu, .product = product, .product_t = view_t, .activation = activation});
    swiglu_backward(cpu_device(), {.up_gate = c.up_gate,
                                   .silu = silu,
                                   .product = again_view,
                                   .product_t = again_view_t,
                                   .activation = activation});
    CAPTURE(rows, width, saves_silu, describe(product.view()), int(activation));
    CHECK((again.data.bytes() == product.data.bytes()));
    CHECK((again_t.data.bytes() == product_t.data.bytes()));

    swiglu_backward(cpu_device(),
                    {.up_gate = c.up_gate, .silu = silu, .product_t = again_view_t, .activation = activation});
    CHECK((again_t.data.bytes() == product_t.data.bytes()));
    CHECK((again.guard_intact() && again_t.guard_intact() && product_t.guard_intact()));
  }
}

TEST_CASE("swiglu_backward reads the scale of the product and does not compute it", "[kernels][swiglu]") {
  const Case c(kGroup16, 9, 32);
  const TestTensor plain(cpu_device(), DType::kF32, {9, 32});
  const TestMatrix got(cpu_device(), DType::kE4M3, 9, 32, Scaling::kTensor),
      want(cpu_device(), DType::kE4M3, 9, 32, Scaling::kTensor);
  upload(cpu_device(), got.scale->view(), std::vector<float>{0.3f});
  upload(cpu_device(), want.scale->view(), std::vector<float>{0.3f});
  swiglu_forward(cpu_device(), {.up_gate = c.up_gate, .product = plain});
  quantize(cpu_device(), {.x = plain, .out = want, .scale_given = true});
  swiglu_backward(cpu_device(), {.up_gate = c.up_gate, .product = got});
  CHECK(same_bits(got, want));
}

TEST_CASE("swiglu values do not depend on their place in the tensor", "[kernels][swiglu]") {
  // 65 columns end in a tail that is no whole vector; a single column is a tail by itself.
  constexpr int64_t kWidth = 65;
  const auto up_gate = random_up_gate(1, kWidth);
  const TestTensor row(cpu_device(), DType::kF32, {1, 2 * kWidth}, up_gate),
      product(cpu_device(), DType::kF32, {1, kWidth});
  std::vector<float> pairs;
  for (int64_t i = 0; i < kWidth; ++i) pairs.insert(pairs.end(), {up_gate[i], up_gate[kWidth + i]});
  const TestTensor column(cpu_device(), DType::kF32, {kWidth, 2}, pairs),
      column_product(cpu_device(), DType::kF32, {kWidth, 1});
  swiglu_forward(cpu_device(), {.up_gate = row, .product = product});
  swiglu_forward(cpu_device(), {.up_gate = column, .product = column_product});
  CHECK((product.bytes() == column_product.bytes()));
}

TEST_CASE("swiglu_backward quantizes the gradient", "[kernels][swiglu]") {
  constexpr int64_t kRows = 37, kWidth = 50;
  const Case c({DType::kBF16}, kRows, kWidth);
  const TestTensor d_product(cpu_device(), DType::kBF16, {kRows, kWidth}, random_bf16(kRows * kWidth, 83));
  const TestTensor plain(cpu_device(), DType::kF32, {kRows, 2 * kWidth});
  swiglu_backward(cpu_device(), {.up_gate = c.up_gate, .d_product = d_product, .d_up_gate = plain});
  for (const Format& format : kFloat8Formats) {
    const TestMatrix d = format.make(cpu_device(), kRows, 2 * kWidth),
                     d_t = format.make(cpu_device(), 2 * kWidth, kRows);
    const TestMatrix want = format.make(cpu_device(), kRows, 2 * kWidth),
                     want_t = format.make(cpu_device(), 2 * kWidth, kRows);
    ScaledView view_t = d_t;
    if (format.scaling == Scaling::kTensor) view_t.scale = d.scale->view();
    swiglu_backward(cpu_device(),
                    {.up_gate = c.up_gate, .d_product = d_product, .d_up_gate = d, .d_up_gate_t = view_t});
    quantize(cpu_device(), {.x = plain, .out = want});
    quantize(cpu_device(), {.x = plain, .out_t = want_t});
    CAPTURE(describe(d.view()));
    CHECK(same_bits(d, want));
    CHECK((d_t.data.bytes() == want_t.data.bytes()));
    CHECK((d.guard_intact() && d_t.guard_intact()));
  }
}

TEST_CASE("swiglu_backward finds a scale from a sample of tokens", "[kernels][swiglu]") {
  constexpr int64_t kWidth = 20;
  const Format e5m2{DType::kE5M2, Scaling::kTensor};
  for (const int64_t rows : {1, 16, 17, 53}) {
    for (const auto& [row, factor] :
         {std::pair<int64_t, float>{-1, 1}, {0, 500}, {48, 500}, {47, 30}, {47, 500}, {52, 1e4f}}) {
      const Case c({DType::kBF16}, rows, kWidth);
      std::vector<float> d = random_bf16(rows * kWidth, 84);
      for (int64_t i = 0; i < rows * kWidth; ++i) {
        if (i / kWidth == row) d[i] *= factor;
      }
      const TestTensor d_product(cpu_device(), DType::kF32, {rows, kWidth}, d),
          plain(cpu_device(), DType::kF32, {rows, 2 * kWidth});
      swiglu_backward(cpu_device(), {.up_gate = c.up_gate, .d_product = d_product, .d_up_gate = plain});
      float sampled = 0, all = 0;
      const std::vector<float> values = plain.host();
      for (int64_t i = 0; i < rows * 2 * kWidth; ++i) {
        if (i / (2 * kWidth) % 16 == 0) sampled = std::max(sampled, std::abs(values[i]));
        all = std::max(all, std::abs(values[i]));
      }
      const TestTensor amax(cpu_device(), DType::kF32, {1}, {std::max(64 * sampled, all)});
      const TestMatrix got = e5m2.make(cpu_device(), rows, 2 * kWidth),
                       got_t = e5m2.make(cpu_device(), 2 * kWidth, rows),
                       want = e5m2.make(cpu_device(), rows, 2 * kWidth);
      ScaledView view_t = got_t;
      view_t.scale = got.scale->view();
      swiglu_backward(cpu_device(), {.up_gate = c.up_gate,
                                     .d_product = d_product,
                                     .d_up_gate = got,
                                     .d_up_gate_t = view_t,
                                     .samples_amax = true});
      quantize(cpu_device(), {.x = plain, .out = want, .amax = amax});
      CAPTURE(rows, row, factor);
      CHECK(same_bits(got, want));
      const std::vector<float> codes = got_t.data.host(), want_codes = want.data.host();
      int wrong = 0;
      for (int64_t i = 0; i < rows * 2 * kWidth; ++i) {
        wrong += codes[i % (2 * kWidth) * rows + i / (2 * kWidth)] != want_codes[i];
      }
      CHECK(wrong == 0);
    }
  }
}

TEST_CASE("swiglu_backward takes the maximum of all tokens where the sample is zeros", "[kernels][swiglu]") {
  constexpr int64_t kRows = 33, kWidth = 16;
  const Format e5m2{DType::kE5M2, Scaling::kTensor};
  const Case c({DType::kBF16}, kRows, kWidth);
  std::vector<float> d = random_bf16(kRows * kWidth, 85);
  for (int64_t i = 0; i < kRows * kWidth; ++i) {
    if (i / kWidth % 16 == 0) d[i] = 0;
  }
  const TestTensor d_product(cpu_device(), DType::kF32, {kRows, kWidth}, d);
  const TestMatrix sampled = e5m2.make(cpu_device(), kRows, 2 * kWidth),
                   of_all = e5m2.make(cpu_device(), kRows, 2 * kWidth);
  swiglu_backward(cpu_device(),
                  {.up_gate = c.up_gate, .d_product = d_product, .d_up_gate = sampled, .samples_amax = true});
  swiglu_backward(cpu_device(), {.up_gate = c.up_gate, .d_product = d_product, .d_up_gate = of_all});
  CHECK(same_bits(sampled, of_all));
}

TEST_CASE("swiglu gives the same bits on any number of threads", "[kernels][swiglu]") {
  constexpr int64_t kRows = 201, kWidth = 48;
  const Case c(kGroup16, kRows, kWidth);
  const Format format{DType::kE4M3, Scaling::kTensor};
  const TestMatrix parallel = format.make(cpu_device(), kRows, kWidth),
                   serial = format.make(cpu_device(), kRows, kWidth);
  set_num_threads(3);
  swiglu_forward(cpu_device(), {.up_gate = c.up_gate, .product = parallel});
  set_num_threads(1);
  swiglu_forward(cpu_device(), {.up_gate = c.up_gate, .product = serial});
  set_num_threads(0);
  CHECK(same_bits(parallel, serial));
}

TEST_CASE("swiglu of nothing does nothing", "[kernels][swiglu]") {
  const TestTensor up_gate(cpu_device(), DType::kF32, {0, 8}), product(cpu_device(), DType::kF32, {0, 4});
  swiglu_forward(cpu_device(), {.up_gate = up_gate, .product = product});
  swiglu_backward(cpu_device(), {.up_gate = up_gate, .d_product = product, .d_up_gate = up_gate});
  CHECK((up_gate.guard_intact() && product.guard_intact()));
}

TEST_CASE("swiglu refuses tensors that do not fit, by name", "[kernels][swiglu]") {
  const TestTensor up_gate(cpu_device(), DType::kF32, {4, 12}), product(cpu_device(), DType::kF32, {4, 6});
  const TestTensor odd(cpu_device(), DType::kF32, {4, 11}), ids(cpu_device(), DType::kI32, {4, 6});
  const TestMatrix codes(cpu_device(), DType::kE4M3, 4, 12, Scaling::kGroup, 4),
      whole(cpu_device(), DType::kE4M3, 4, 12, Scaling::kTensor);
  const TestMatrix silu(cpu_device(), DType::kE4M3, 4, 6, Scaling::kTensor),
      d_t(cpu_device(), DType::kE5M2, 12, 4, Scaling::kTensor);
  const TestMatrix d(cpu_device(), DType::kE5M2, 4, 12, Scaling::kTensor),
      p8(cpu_device(), DType::kE4M3, 4, 6, Scaling::kTensor);
  const TestMatrix p8_t(cpu_device(), DType::kE4M3, 6, 4, Scaling::kTensor);
  const auto forward = [](const SwigluForward& op) {
    return internal_error([&] { swiglu_forward(cpu_device(), op); });
  };
  const auto backward = [](const SwigluBackward& op) {
    return internal_error([&] { swiglu_backward(cpu_device(), op); });
  };
  CHECK(contains(forward({.up_gate = odd, .product = product}), "swiglu_forward: up_gate is fp32 [4, 11]"));
  CHECK(contains(forward({.up_gate = up_gate, .product = ids}), "swiglu_forward: product is int32"));
  CHECK(contains(forward({.up_gate = up_gate, .product = {}}), "swiglu_forward: product is no tensor"));
  CHECK(
      contains(forward({.up_gate = codes, .product = product}), "up_gate has groups of 4, which span both halves"));
  CHECK(contains(forward({.up_gate = whole, .product = product}),
                 "swiglu_forward: up_gate is e4m3 [4, 12], one scale"));
  CHECK(contains(forward({.up_gate = up_gate, .silu = silu, .product = product}), "swiglu_forward: silu is e4m3"));
  CHECK(
      contains(forward({.up_gate = up_gate, .silu = product, .product = product}), "swiglu_forward: silu is fp32"));
  CHECK(contains(forward({.up_gate = up_gate, .product = product, .product_t = product}),
                 "product_t is fp32 [4, 6]"));
  CHECK(contains(forward({.up_gate = up_gate, .product = p8, .product_t = p8_t}), "share one scale"));

  CHECK(contains(backward({.up_gate = odd, .product = product}), "swiglu_backward: up_gate is fp32 [4, 11]"));
  CHECK(contains(backward({.up_gate = up_gate, .d_product = odd, .d_up_gate = up_gate}),
                 "d_product is fp32 [4, 11]"));
  CHECK(contains(backward({.up_gate = up_gate, .d_up_gate = up_gate}), "d_product is not given"));
  CHECK(contains(backward({.up_gate = up_gate, .d_product = product, .d_up_gate = product}),
                 "d_up_gate is fp32 [4, 6]"));
  CHECK(contains(backward({.up_gate = up_gate, .d_product = product, .d_up_gate_t = d}),
                 "d_up_gate_t is e5m2 [4, 12]"));
  CHECK(contains(backward({.up_gate = up_gate, .d_product = product, .d_up_gate = d, .d_up_gate_t = d_t}),
                 "share one"));
  CHECK(contains(
      backward({.up_gate = up_gate, .d_product = product, .d_up_gate = whole, .samples_amax = true}),
      "swiglu_backward: d_up_gate is e4m3 [4, 12], one scale, and only of e5m2 with one scale is the maximum sampled"));
  CHECK(contains(backward({.up_gate = up_gate, .product = up_gate}), "swiglu_backward: product is fp32 [4, 12]"));
  CHECK(
      contains(backward({.up_gate = up_gate, .product_t = product}), "swiglu_backward: product_t is fp32 [4, 6]"));
}
