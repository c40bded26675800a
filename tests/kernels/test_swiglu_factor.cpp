#include "kernels/ops/swiglu/swiglu.h"
#include "tests/kernels/float8_devices.h"

// SwiGLU of rows that have a factor, beside what the same device makes without it in fp32: all bits are known.
using namespace parka;
using namespace parka::test;

namespace {

const Format kGroup16{DType::kE4M3, Scaling::kGroup, 16, DType::kBF16};
const Format kE4M3{DType::kE4M3, Scaling::kTensor};
const Format kE5M2{DType::kE5M2, Scaling::kTensor};

struct FactorCase {
  MatrixShape shape;  // of the product
  Format up_gate;
  bool saves_silu = false;
  GateActivation activation = GateActivation::kSilu;
};

std::string describe(const FactorCase& c) {
  return std::to_string(c.shape.rows) + " x " + std::to_string(c.shape.cols) + " " +
         std::string(name_of(c.up_gate.dtype)) + (c.saves_silu ? ", silu saved" : "") +
         (c.activation == GateActivation::kGeluTanh ? ", GELU" : "");
}

// What SwiGLU makes without factors, in fp32.
struct Unfactored {
  Unfactored(Device& device, const FactorCase& c)
      : rows(c.shape.rows),
        width(c.shape.cols),
        plain(device, DType::kBF16, {rows, 2 * width}, values()),
        up_gate(c.up_gate.make(device, rows, 2 * width)),
        silu(c.saves_silu ? std::unique_ptr<TestMatrix>(new TestMatrix(kGroup16.make(device, rows, width)))
                          : nullptr),
        d_product(device, DType::kBF16, {rows, width}, gradients()),
        product(device, DType::kF32, {rows, width}),
        d_up_gate(device, DType::kF32, {rows, 2 * width}) {
    quantize(device, {.x = plain, .out = up_gate});
    swiglu_forward(device, {.up_gate = up_gate, .silu = saved(), .product = product, .activation = c.activation});
    swiglu_backward(device, {.up_gate = up_gate,
                             .silu = saved(),
                             .d_product = d_product,
                             .d_up_gate = d_up_gate,
                             .activation = c.activation});
    for (int64_t t = 0; t < rows; ++t) {
      factors.push_back(t % 5 == 0 ? 0.0f : (t % 7 == 2 ? -0.3f : 0.2f) * static_cast<float>(t % 9 + 1));
    }
  }
  // The first row, whose factor is 0, has what must not show.
  std::vector<float> values() const {
    std::vector<float> x = random_bf16(rows * 2 * width, 81, 2.0f);
    x[0] = NAN;
    x[static_cast<size_t>(width)] = INFINITY;
    return x;
  }
  std::vector<float> gradients() const {
    std::vector<float> x = random_bf16(rows * width, 82);
    x[static_cast<size_t>(width) / 2] = NAN;
    return x;
  }
  ScaledView saved() const { return silu ? silu->view() : ScaledView(); }
  // These numbers, times the factors.
  std::unique_ptr<TestTensor> factored(const TestTensor& x) const {
    std::vector<float> values = x.host();
    const int64_t cols = x.view().dim[1];
    for (int64_t i = 0; i < rows * cols; ++i) {
      const float factor = factors[i / cols];
      values[i] = factor == 0 ? 0.0f : values[i] * factor;
    }
    return std::make_unique<TestTensor>(cpu_device(), DType::kF32, std::initializer_list<int64_t>{rows, cols},
                                        values);
  }

  int64_t rows, width;
  TestTensor plain;
  TestMatrix up_gate;
  std::unique_ptr<TestMatrix> silu;
  TestTensor d_product, product, d_up_gate;
  std::vector<float> factors;
};

std::vector<FactorCase> factor_cases() {
  std::vector<FactorCase> cases;
  for (const MatrixShape s : {MatrixShape{1, 1}, MatrixShape{37, 65}, MatrixShape{37, 48}, MatrixShape{130, 256}}) {
    for (const GateActivation activation : {GateActivation::kSilu, GateActivation::kGeluTanh}) {
      cases.push_back({s, plain_format(DType::kF32), false, activation});
      cases.push_back({s, plain_format(DType::kBF16), false, activation});
      if (s.cols % 16 != 0) continue;
      cases.push_back({s, kGroup16, false, activation});
      cases.push_back({s, kGroup16, true, activation});
    }
  }
  return cases;
}

// Formats of the product and of gradients; only of codes are there transposed copies.
struct Wanted {
  Format format;
  Copies copies;
};
const Wanted kWanted[] = {{plain_format(DType::kF32), Copies::kRow},
                          {plain_format(DType::kBF16), Copies::kRow},
                          {kE4M3, Copies::kRow},
                          {kE4M3, Copies::kBoth},
                          {kGroup16, Copies::kBoth}};

}  // namespace

TEST_CASE("swiglu_forward multiplies rows by their factors", "[kernels][swiglu]") {
  for (Device* device : devices()) {
    for (const FactorCase& c : factor_cases()) {
      const Unfactored plain(*device, c);
      const TestTensor factor(*device, DType::kF32, {c.shape.rows}, plain.factors);
      const auto want = plain.factored(plain.product);
      for (const Wanted& wanted : kWanted) {
        const Output got(*device, wanted.format, c.shape.rows, c.shape.cols, wanted.copies);
        SwigluForward op{.up_gate = plain.up_gate,
                         .silu = plain.saved(),
                         .product = got.row(),
                         .product_t = got.transposed(),
                         .activation = c.activation,
                         .row_factor = factor};
        swiglu_forward(*device, op);
        CAPTURE(describe(c), describe(got.matrix.view()), device->name());
        CHECK(unlike_quantized("product", got, *want) == "");
        if (c.up_gate.scaling == Scaling::kNone) continue;
        // From plain numbers: the same codes of them, and the same product.
        const TestMatrix codes = c.up_gate.make(*device, c.shape.rows, 2 * c.shape.cols);
        const Output again(*device, wanted.format, c.shape.rows, c.shape.cols, wanted.copies);
        op.up_gate = codes;
        op.up_gate_plain = plain.plain;
        op.product = again.row();
        op.product_t = again.transposed();
        swiglu_forward(*device, op);
        CHECK(first_difference("up_gate", codes, plain.up_gate) == "");
        CHECK(first_difference("product", again, got) == "");
      }
    }
  }
}

TEST_CASE("swiglu_backward multiplies gradient and product by the factors of rows", "[kernels][swiglu]") {
  for (Device* device : devices()) {
    for (const FactorCase& c : factor_cases()) {
      const Unfactored plain(*device, c);
      const TestTensor factor(*device, DType::kF32, {c.shape.rows}, plain.factors);
      const auto want = plain.factored(plain.d_up_gate), want_product = plain.factored(plain.product);
      for (const Wanted& wanted : kWanted) {
        const Output gradient(*device, wanted.format, c.shape.rows, 2 * c.shape.cols, wanted.copies);
        const Output product(*device, wanted.format, c.shape.rows, c.shape.cols, wanted.copies);
        const Output forward(*device, wanted.format, c.shape.rows, c.shape.cols, wanted.copies);
        swiglu_forward(*device, {.up_gate = plain.up_gate,
                                 .silu = plain.saved(),
                                 .product = forward.row(),
                                 .product_t = forward.transposed(),
                                 .activation = c.activation,
                                 .row_factor = factor});
        if (wanted.format.scaling == Scaling::kTensor) product.set_scale(*device, forward.tensor_scale());
        SwigluBackward op{.up_gate = plain.up_gate,
                          .silu = plain.saved(),
                          .d_product = plain.d_product,
                          .d_up_gate = gradient.row(),
                          .d_up_gate_t = gradient.transposed(),
                          .product = product.row(),
                          .product_t = product.transposed(),
                          .activation = c.activation,
                          .row_factor = factor};
        swiglu_backward(*device, op);
        CAPTURE(describe(c), describe(gradient.matrix.view()), device->name());
        CHECK(unlike_quantized("d_up_gate", gradient, *want) == "");
        CHECK(first_difference("product", product, forward) == "");
        op.d_product = {};
        op.d_up_gate = op.d_up_gate_t = {};
        swiglu_backward(*device, op);
        CHECK(first_difference("product alone", product, forward) == "");
      }
    }
  }
}

TEST_CASE("swiglu_backward samples the maximum of rows times their factors", "[kernels][swiglu]") {
  for (Device* device : devices()) {
    for (const FactorCase& c : factor_cases()) {
      const Unfactored plain(*device, c);
      const TestTensor factor(*device, DType::kF32, {c.shape.rows}, plain.factors);
      const auto want = plain.factored(plain.d_up_gate);
      const std::vector<float> values = want->host();
      float sampled = 0, all = 0;
      for (size_t i = 0; i < values.size(); ++i) {
        const auto row = static_cast<int64_t>(i) / (2 * c.shape.cols);
        if (row % kAmaxSampling == 0) sampled = std::max(sampled, std::abs(values[i]));
        all = std::max(all, std::abs(values[i]));
      }
      const TestTensor amax(cpu_device(), DType::kF32, {1}, {std::max(kAmaxRoom * sampled, all)});
      const Output gradient(*device, kE5M2, c.shape.rows, 2 * c.shape.cols, Copies::kBoth);
      swiglu_backward(*device, {.up_gate = plain.up_gate,
                                .silu = plain.saved(),
                                .d_product = plain.d_product,
                                .d_up_gate = gradient.row(),
                                .d_up_gate_t = gradient.transposed(),
                                .samples_amax = true,
                                .activation = c.activation,
                                .row_factor = factor});
      CAPTURE(describe(c), device->name());
      CHECK(unlike_quantized("d_up_gate", gradient, *want, amax) == "");
    }
  }
}

TEST_CASE("swiglu_row_gradient is the derivative by the factor of each row", "[kernels][swiglu]") {
  for (Device* device : devices()) {
    for (const FactorCase& c : factor_cases()) {
      for (const DType dtype : {DType::kBF16, DType::kF32}) {
        const Unfactored plain(*device, c);
        const std::vector<float> product = plain.product.host();
        const TestTensor d_product(*device, dtype, {c.shape.rows, c.shape.cols}, plain.gradients());
        const TestTensor got(*device, DType::kF32, {c.shape.rows}), again(*device, DType::kF32, {c.shape.rows});
        SwigluRowGradient op{.up_gate = plain.up_gate,
                             .silu = plain.saved(),
                             .d_product = d_product,
                             .d_row_factor = got,
                             .activation = c.activation};
        swiglu_row_gradient(*device, op);
        op.d_row_factor = again;
        swiglu_row_gradient(*device, op);
        const std::vector<float> sums = got.host(), d = d_product.host();
        int wrong = std::isnan(sums[0]) ? 0 : 1;
        for (int64_t t = 1; t < c.shape.rows; ++t) {
          double want = 0, magnitude = 0;
          for (int64_t i = t * c.shape.cols; i < (t + 1) * c.shape.cols; ++i) {
            want += double{product[i]} * d[i];
            magnitude += std::abs(double{product[i]} * d[i]);
          }
          wrong += !(std::abs(sums[t] - want) <= static_cast<double>(c.shape.cols + 2) * 0x1p-24 * magnitude);
        }
        CAPTURE(describe(c), name_of(dtype), device->name());
        CHECK(wrong == 0);
        CHECK((again.bytes() == got.bytes()));
        CHECK(got.guard_intact());
      }
    }
  }
}

TEST_CASE("swiglu refuses factors of rows that do not fit, by name", "[kernels][swiglu]") {
  Device& device = cpu_device();
  const TestTensor up_gate(device, DType::kF32, {4, 12}), product(device, DType::kF32, {4, 6});
  const TestTensor five(device, DType::kF32, {5}), halves(device, DType::kBF16, {4}),
      four(device, DType::kF32, {4});
  const auto row_gradient = [&](const SwigluRowGradient& op) {
    return internal_error([&] { swiglu_row_gradient(device, op); });
  };
  CHECK(contains(
      internal_error([&] { swiglu_forward(device, {.up_gate = up_gate, .product = product, .row_factor = five}); }),
      "swiglu_forward: row_factor is fp32 [5]"));
  CHECK(contains(internal_error([&] {
                   swiglu_backward(device, {.up_gate = up_gate, .product = product, .row_factor = halves});
                 }),
                 "swiglu_backward: row_factor is bf16 [4]"));
  CHECK(contains(row_gradient({.up_gate = up_gate, .d_product = five, .d_row_factor = four}),
                 "swiglu_row_gradient: d_product is fp32 [5]"));
  CHECK(contains(row_gradient({.up_gate = product, .d_product = product, .d_row_factor = four}),
                 "swiglu_row_gradient: d_product is fp32 [4, 6]"));
  CHECK(contains(row_gradient({.up_gate = up_gate, .d_product = product, .d_row_factor = five}),
                 "swiglu_row_gradient: d_row_factor is fp32 [5]"));
}
