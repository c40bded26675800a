#include "kernels/ops/swiglu/swiglu.h"
#include "tests/kernels/float8_devices.h"

// SwiGLU in FP8 on every other device. Exponentials may be rounded otherwise than on the CPU, so outputs are
// compared in two steps: values in fp32 are near the CPU's, and codes are, bit for bit, what the CPU makes of the
// values that the same device computes in fp32. Without another device there is nothing to compare.
using namespace parka;
using namespace parka::test;

namespace {

const Format kGroup16{DType::kE4M3, Scaling::kGroup, 16, DType::kBF16};
const Format kGroupOfTwoThreads{DType::kE4M3, Scaling::kGroup, 32, DType::kBF16};
const Format kGroupOfFourThreads{DType::kE4M3, Scaling::kGroup, 64, DType::kBF16};
const Format kGroup32{DType::kE5M2, Scaling::kGroup, 32, DType::kF32};
const Format kGroup128{DType::kE4M3, Scaling::kGroup, 128, DType::kF32};
const Format kE4M3{DType::kE4M3, Scaling::kTensor};
const Format kE5M2{DType::kE5M2, Scaling::kTensor};

// [up | gate] of each row, with gates from -40 to 40, some groups of zeros, and some tiny ones. The last 16 columns
// tend to have the largest products, and the 48 before them the largest of up in their groups.
std::vector<float> up_gate_values(const MatrixShape& s) {
  std::vector<float> x = random_bf16(s.rows * 2 * s.cols, 211);
  for (int64_t i = 0; i < s.rows * 2 * s.cols; ++i) {
    const int64_t col = i % s.cols;
    const bool is_gate = i % (2 * s.cols) >= s.cols;
    if (is_gate && i % 5 == 0) x[i] *= 8;
    if (s.cols > 64 && col >= s.cols - 64) x[i] *= col >= s.cols - 16 ? (is_gate ? 1 : 4) : (is_gate ? 0.0625f : 8);
    if (i / 16 % 29 == 3) x[i] = 0;
    if (i / 16 % 29 == 7) x[i] = std::ldexp(x[i], -108);
  }
  return x;
}

// What a pass reads and saves. With `plain` the op itself makes up_gate, in `up_gate`, of bf16 numbers.
struct SwigluCase {
  MatrixShape shape;  // of the product
  Format up_gate;
  bool from_plain;
  const Format* silu;  // null: not saved
  GateActivation activation = GateActivation::kSilu;
};

std::string describe(const SwigluCase& c) {
  return std::to_string(c.shape.rows) + " x " + std::to_string(c.shape.cols) + ", up_gate " +
         std::string(name_of(c.up_gate.dtype)) + " groups of " + std::to_string(c.up_gate.group) +
         (c.from_plain ? " made by the op" : "") + (c.silu ? ", silu saved" : "") +
         (c.activation == GateActivation::kGeluTanh ? ", GELU" : "");
}

// A forward pass on one device, with the product in some format.
struct SwigluPass {
  SwigluPass(Device& device, const SwigluCase& c_, const Format& product_format, Copies copies)
      : c(c_),
        plain(device, DType::kBF16, {c.shape.rows, 2 * c.shape.cols}, up_gate_values(c.shape)),
        product(device, product_format, c.shape.rows, c.shape.cols, copies) {
    const Output made(cpu_device(), c.up_gate, c.shape.rows, 2 * c.shape.cols, Copies::kRow);
    const TestTensor values(cpu_device(), DType::kF32, {c.shape.rows, 2 * c.shape.cols}, up_gate_values(c.shape));
    quantize(cpu_device(), {.x = values, .out = made.row()});
    want_up_gate = copy_on(cpu_device(), made.matrix);
    up_gate =
        c.from_plain
            ? std::unique_ptr<TestMatrix>(new TestMatrix(c.up_gate.make(device, c.shape.rows, 2 * c.shape.cols)))
            : copy_on(device, made.matrix);
    if (c.silu) silu.reset(new TestMatrix(c.silu->make(device, c.shape.rows, c.shape.cols)));
    swiglu_forward(device, {.up_gate = up_gate->view(),
                            .silu = silu_view(),
                            .product = product.row(),
                            .product_t = product.transposed(),
                            .up_gate_plain = c.from_plain ? plain.view() : TensorView(),
                            .activation = c.activation});
  }
  ScaledView silu_view() const { return silu ? silu->view() : ScaledView(); }

  SwigluCase c;
  TestTensor plain;
  Output product;
  std::unique_ptr<TestMatrix> up_gate, want_up_gate, silu;
};

// act(gate) in fp32 as the device computes it: the product with up = 1.
std::unique_ptr<TestTensor> activated_values(Device& device, const TestMatrix& up_gate, const SwigluCase& c) {
  const MatrixShape& s = c.shape;
  std::vector<float> ones = up_gate.host();
  for (int64_t i = 0; i < s.rows * 2 * s.cols; ++i) {
    if (i % (2 * s.cols) < s.cols) ones[i] = 1;
  }
  const TestTensor input(device, DType::kF32, {s.rows, 2 * s.cols}, ones);
  auto result = std::make_unique<TestTensor>(device, DType::kF32, std::initializer_list<int64_t>{s.rows, s.cols});
  swiglu_forward(device, {.up_gate = input, .product = *result, .activation = c.activation});
  return result;
}

// up * act(gate) of what was saved of that is one product of given numbers: it is known exactly.
std::vector<float> product_of_saved(const SwigluPass& pass) {
  const MatrixShape& s = pass.c.shape;
  const std::vector<float> up_gate = pass.up_gate->host();
  std::vector<float> product = pass.silu->host();
  for (int64_t i = 0; i < s.numel(); ++i) product[i] *= up_gate[i / s.cols * 2 * s.cols + i % s.cols];
  return product;
}

void check_swiglu_forward(Device& device, const SwigluCase& c, const Format& format, Copies copies) {
  const MatrixShape& s = c.shape;
  const SwigluPass got(device, c, format, copies), again(device, c, format, copies);
  CAPTURE(describe(c), describe(got.product.matrix.view()), copies);
  CHECK(first_difference("up_gate", *got.up_gate, *got.want_up_gate) == "");
  const TestTensor product(device, DType::kF32, {s.rows, s.cols}),
      want(cpu_device(), DType::kF32, {s.rows, s.cols});
  if (c.silu) {
    const std::unique_ptr<TestTensor> silu = activated_values(device, *got.up_gate, c);
    const std::unique_ptr<TestTensor> want_silu = activated_values(cpu_device(), *got.want_up_gate, c);
    CHECK(first_far("silu", *silu, *want_silu, row_slack(want_silu->host(), s.rows)) == "");
    const Output saved(cpu_device(), *c.silu, s.rows, s.cols, Copies::kRow);
    const TestTensor silu_here(cpu_device(), DType::kF32, {s.rows, s.cols}, silu->host());
    quantize(cpu_device(), {.x = silu_here, .out = saved.row()});
    CHECK(first_difference("silu", *got.silu, saved.matrix) == "");
    const TestTensor exact(cpu_device(), DType::kF32, {s.rows, s.cols}, product_of_saved(got));
    CHECK(unlike_quantized("product", got.product, exact) == "");
  } else {
    swiglu_forward(device, {.up_gate = got.up_gate->view(), .product = product, .activation = c.activation});
    swiglu_forward(cpu_device(),
                   {.up_gate = got.want_up_gate->view(), .product = want, .activation = c.activation});
    CHECK(first_far("product", product, want, row_slack(want.host(), s.rows)) == "");
    CHECK(unlike_quantized("product", got.product, product) == "");
  }
  CHECK(first_difference("product again", again.product, got.product) == "");
}

const std::vector<MatrixShape> kSwigluShapes = {{1, 16},    {37, 48},  {130, 128}, {64, 256}, {129, 96},
                                                {33, 1376}, {70, 320}, {192, 640}, {5, 11008}};

// Every way to be given up_gate that is possible at this width. Which activation it is is a number that kernels are
// given: with GELU what has kernels of its own, and one of the rest, a bf16 up_gate with a saved silu.
std::vector<SwigluCase> swiglu_cases(const MatrixShape& s) {
  std::vector<SwigluCase> cases = {{s, plain_format(DType::kF32), false, nullptr},
                                   {s, plain_format(DType::kBF16), false, nullptr},
                                   {s, plain_format(DType::kBF16), false, &kGroup16}};
  const std::pair<Format, const Format*> coded[] = {{kGroup16, &kGroup16},
                                                    {kGroup32, &kGroup16},
                                                    {kGroupOfTwoThreads, &kGroupOfTwoThreads},
                                                    {kGroupOfFourThreads, &kGroupOfFourThreads},
                                                    {kGroup128, &kGroup128}};
  for (const auto& [format, of_silu] : coded) {
    if (s.cols % format.group != 0) continue;
    for (const bool from_plain : {false, true}) {
      for (const Format* silu : {static_cast<const Format*>(nullptr), of_silu}) {
        cases.push_back({s, format, from_plain, silu});
      }
    }
  }
  cases.push_back({s, plain_format(DType::kBF16), false, nullptr, GateActivation::kGeluTanh});
  cases.push_back({s, plain_format(DType::kBF16), false, &kGroup16, GateActivation::kGeluTanh});
  if (s.cols % kGroup16.group == 0) {
    cases.push_back({s, kGroup16, true, nullptr, GateActivation::kGeluTanh});
    cases.push_back({s, kGroup16, true, &kGroup16, GateActivation::kGeluTanh});
  }
  return cases;
}

}  // namespace

TEST_CASE("swiglu_forward in fp8 on another device", "[kernels][swiglu][devices]") {
  const MatrixShape s = GENERATE(from_range(kSwigluShapes));
  for (Device* device : other_devices()) {
    for (const SwigluCase& c : swiglu_cases(s)) {
      check_swiglu_forward(*device, c, kE4M3, Copies::kRow);
      check_swiglu_forward(*device, c, kE4M3, Copies::kBoth);
      check_swiglu_forward(*device, c, kE5M2, Copies::kBoth);
      check_swiglu_forward(*device, c, kGroup128, Copies::kBoth);
      check_swiglu_forward(*device, c, kGroup16, Copies::kRow);
      check_swiglu_forward(*device, c, plain_format(DType::kBF16), Copies::kRow);
    }
  }
}

TEST_CASE("swiglu in fp8 on another device takes any number of columns", "[kernels][swiglu][devices]") {
  for (Device* device : other_devices()) {
    for (const MatrixShape s : {MatrixShape{1, 1}, MatrixShape{37, 65}, MatrixShape{130, 100}}) {
      for (const DType dtype : {DType::kF32, DType::kBF16}) {
        check_swiglu_forward(*device, {s, plain_format(dtype), false, nullptr}, kE4M3, Copies::kBoth);
        check_swiglu_forward(*device, {s, plain_format(dtype), false, nullptr}, kGroup128, Copies::kBoth);
        check_swiglu_forward(*device, {s, plain_format(dtype), false, &kGroup16}, kE4M3, Copies::kBoth);
      }
    }
  }
}

namespace {

// What swiglu_backward is asked for beside each other.
struct Wanted {
  Copies gradient = Copies::kBoth, product = Copies::kTransposed;
  bool has_gradient = true, has_product = true;
  bool samples_amax = false;
  float factor = 1;  // of d_product in the second row, which is not in the sample
};

// The maximum that samples_amax takes of these.
float sampled_amax(const TestTensor& values) {
  const int64_t cols = values.view().dim[1];
  const std::vector<float> host = values.host();
  float sampled = 0, all = 0;
  for (int64_t i = 0; i < values.view().numel(); ++i) {
    if (i / cols % kAmaxSampling == 0) sampled = std::max(sampled, std::abs(host[i]));
    all = std::max(all, std::abs(host[i]));
  }
  return std::max(kAmaxRoom * sampled, all);
}

void check_swiglu_backward(Device& device, const SwigluCase& c, const Format& format, const Format& product_format,
                           const Wanted& wanted, DType d_dtype) {
  const MatrixShape& s = c.shape;
  const SwigluPass pass(device, c, product_format, Copies::kBoth);
  std::vector<float> d = random_bf16(s.numel(), 212, 1e-3f);
  for (int64_t i = s.cols; i < std::min(2 * s.cols, s.numel()); ++i) d[i] *= wanted.factor;
  const TestTensor d_product(device, d_dtype, {s.rows, s.cols}, d),
      d_product_here(cpu_device(), d_dtype, {s.rows, s.cols}, d);
  const Output gradient(device, format, s.rows, 2 * s.cols, wanted.gradient);
  const Output product(device, product_format, s.rows, s.cols, wanted.product);
  if (product_format.scaling == Scaling::kTensor) product.set_scale(device, pass.product.tensor_scale());
  const SwigluBackward op{.up_gate = pass.up_gate->view(),
                          .silu = pass.silu_view(),
                          .d_product = wanted.has_gradient ? d_product.view() : TensorView(),
                          .d_up_gate = wanted.has_gradient ? gradient.row() : ScaledView(),
                          .d_up_gate_t = wanted.has_gradient ? gradient.transposed() : ScaledView(),
                          .samples_amax = wanted.samples_amax,
                          .product = wanted.has_product ? product.row() : ScaledView(),
                          .product_t = wanted.has_product ? product.transposed() : ScaledView(),
                          .activation = c.activation};
  swiglu_backward(device, op);
  CAPTURE(describe(c), describe(gradient.matrix.view()), describe(product.matrix.view()), name_of(d_dtype));
  CAPTURE(wanted.has_gradient, wanted.gradient, wanted.has_product, wanted.product, wanted.samples_amax,
          wanted.factor);
  if (wanted.has_product) {
    const TestMatrix &row = product.matrix, &column = product.matrix_t;
    if (wanted.product != Copies::kTransposed) {
      CHECK(first_difference("product", row.data, pass.product.matrix.data) == "");
    }
    if (wanted.product != Copies::kRow) {
      CHECK(first_difference("product_t", column.data, pass.product.matrix_t.data) == "");
    }
    CHECK((row.guard_intact() && column.guard_intact()));
  }
  if (!wanted.has_gradient) return;
  // The same gradient in fp32.
  const TestTensor plain(device, DType::kF32, {s.rows, 2 * s.cols}),
      want(cpu_device(), DType::kF32, {s.rows, 2 * s.cols});
  swiglu_backward(device, {.up_gate = op.up_gate,
                           .silu = op.silu,
                           .d_product = op.d_product,
                           .d_up_gate = plain,
                           .activation = c.activation});
  const std::unique_ptr<TestMatrix> up_gate = copy_on(cpu_device(), *pass.up_gate);
  const std::unique_ptr<TestMatrix> silu = pass.silu ? copy_on(cpu_device(), *pass.silu) : nullptr;
  swiglu_backward(cpu_device(), {.up_gate = up_gate->view(),
                                 .silu = silu ? silu->view() : ScaledView(),
                                 .d_product = d_product_here,
                                 .d_up_gate = want,
                                 .activation = c.activation});
  CHECK(first_far("d_up_gate", plain, want, row_slack(want.host(), s.rows)) == "");
  const TestTensor amax(cpu_device(), DType::kF32, {1}, {sampled_amax(plain)});
  CHECK(unlike_quantized("d_up_gate", gradient, plain, wanted.samples_amax ? amax.view() : TensorView()) == "");
}

}  // namespace

TEST_CASE("swiglu_backward in fp8 on another device", "[kernels][swiglu][devices]") {
  const MatrixShape s = GENERATE(from_range(kSwigluShapes));
  const std::vector<Wanted> every_way = {
      {},
      {.has_product = false},
      {.has_gradient = false},
      {.gradient = Copies::kRow, .product = Copies::kRow},
      {.gradient = Copies::kTransposed, .product = Copies::kBoth},
      {.product = Copies::kBoth, .has_gradient = false},
  };
  for (Device* device : other_devices()) {
    for (const SwigluCase& c : swiglu_cases(s)) {
      for (const Wanted& wanted : every_way) check_swiglu_backward(*device, c, kE5M2, kE4M3, wanted, DType::kBF16);
      check_swiglu_backward(*device, c, kE5M2, kE4M3, {}, DType::kF32);
      check_swiglu_backward(*device, c, kE4M3, kE5M2, {}, DType::kBF16);
      check_swiglu_backward(*device, c, kGroup128, kGroup128, {}, DType::kBF16);
      check_swiglu_backward(*device, c, kGroup128, kGroup128, {.has_product = false}, DType::kBF16);
      check_swiglu_backward(*device, c, plain_format(DType::kBF16), plain_format(DType::kBF16),
                            {.gradient = Copies::kRow, .product = Copies::kRow}, DType::kBF16);
    }
  }
}

TEST_CASE("swiglu_backward in fp8 on another device takes any number of columns", "[kernels][swiglu][devices]") {
  for (Device* device : other_devices()) {
    for (const MatrixShape s : {MatrixShape{1, 1}, MatrixShape{37, 65}, MatrixShape{130, 100}}) {
      for (const DType dtype : {DType::kF32, DType::kBF16}) {
        check_swiglu_backward(*device, {s, plain_format(dtype), false, nullptr}, kE5M2, kE4M3, {}, dtype);
        check_swiglu_backward(*device, {s, plain_format(dtype), false, &kGroup16}, kE4M3, kGroup128, {}, dtype);
      }
    }
  }
}

TEST_CASE("swiglu_backward on another device finds a scale from a sample", "[kernels][swiglu][devices]") {
  const MatrixShape s = GENERATE(from_range(kSwigluShapes));
  for (Device* device : other_devices()) {
    for (const SwigluCase& c : swiglu_cases(s)) {
      for (const float factor : {1.0f, 20.0f, 2048.0f}) {  // the last exceeds what the sample leaves room for
        check_swiglu_backward(*device, c, kE5M2, kE4M3, {.samples_amax = true, .factor = factor}, DType::kBF16);
        check_swiglu_backward(
            *device, c, kE5M2, kE4M3,
            {.gradient = Copies::kRow, .has_product = false, .samples_amax = true, .factor = factor}, DType::kBF16);
        check_swiglu_backward(*device, c, kE5M2, kE4M3, {.samples_amax = true, .factor = factor}, DType::kF32);
      }
    }
  }
}

TEST_CASE("swiglu in fp8 on another device keeps bad values visible", "[kernels][swiglu][devices]") {
  const MatrixShape s{21, 64};
  for (Device* device : other_devices()) {
    for (const float bad : {NAN, INFINITY}) {
      std::vector<float> values = up_gate_values(s);
      values[3 * 2 * s.cols + 5] = bad;            // an up
      values[7 * 2 * s.cols + s.cols + 40] = bad;  // a gate
      const auto run = [&](Device& d, const TestMatrix& up_gate, const TestMatrix& product) {
        const TestTensor plain(d, DType::kBF16, {s.rows, 2 * s.cols}, values);
        swiglu_forward(d, {.up_gate = up_gate, .product = product, .up_gate_plain = plain});
      };
      const TestMatrix want_up_gate = kGroup16.make(cpu_device(), s.rows, 2 * s.cols);
      const TestMatrix up_gate = kGroup16.make(*device, s.rows, 2 * s.cols);
      const TestMatrix want = kE4M3.make(cpu_device(), s.rows, s.cols), got = kE4M3.make(*device, s.rows, s.cols);
      run(cpu_device(), want_up_gate, want);
      run(*device, up_gate, got);
      const std::vector<float> a = got.host(), b = want.host();
      int wrong = 0;
      for (size_t i = 0; i < b.size(); ++i) wrong += std::isnan(a[i]) != std::isnan(b[i]);
      CAPTURE(bad);
      CHECK(first_difference("up_gate", up_gate, want_up_gate) == "");
      CHECK(wrong == 0);
    }
  }
}
