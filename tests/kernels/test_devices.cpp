#include <algorithm>
#include <cmath>
#include <cstdint>
#include <ostream>
#include <vector>

#include "kernels/ops/attention/rope.h"
#include "kernels/ops/norm/norm.h"
#include "kernels/ops/quantize/quantize.h"
#include "kernels/ops/swiglu/swiglu.h"
#include "tests/kernels/op_checks.h"
#include "tests/support/catch.h"

// Every device against the CPU, on the same inputs. Without a GPU there is nothing to compare.

using namespace parka;
using namespace parka::test;

namespace {

constexpr DType kPlain[] = {DType::kF32, DType::kBF16};
constexpr NormKind kKinds[] = {NormKind::kLayerNorm, NormKind::kRmsNorm, NormKind::kNone,
                               NormKind::kAffineLayerNorm};

// The devices that are not the reference.
std::vector<Device*> others() {
  std::vector<Device*> found;
  for (Device* device : devices()) {
    if (device->kind() != DeviceKind::kCpu) found.push_back(device);
  }
  return found;
}

struct Shape {
  int64_t rows, cols;
};

std::ostream& operator<<(std::ostream& out, const Shape& s) { return out << s.rows << " x " << s.cols; }

// Standard normals times `scale`, repeated in another order every 65536: cheap enough for large tensors. Values
// that bf16 holds.
std::vector<float> values(int64_t count, uint64_t seed, float scale = 1.0f) {
  constexpr int64_t kDistinct = 1 << 16;
  const std::vector<float> distinct = random_bf16(std::min(count, kDistinct), seed, scale);
  std::vector<float> all(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    all[i] = i < kDistinct ? distinct[i] : distinct[(i * 40503 + i / kDistinct * 7919) % kDistinct];
  }
  return all;
}

double largest_magnitude(const std::vector<float>& x, int64_t begin, int64_t count) {
  double largest = 0;
  for (int64_t i = begin; i < begin + count; ++i) largest = std::max(largest, std::abs(double{x[i]}));
  return largest;
}

// Distance from a bf16 number of this magnitude to the next.
double bf16_spacing(double magnitude) { return magnitude == 0 ? 0 : std::ldexp(1.0, std::ilogb(magnitude) - 7); }

// Whether `got` is `want` but for the rounding of fp32 arithmetic, `slack` at most in each row: then bf16 values
// differ by one place at most, and few differ at all.
bool agree(DType dtype, const std::vector<float>& want, const std::vector<float>& got,
           const std::vector<double>& slack) {
  if (want.size() != got.size()) return false;
  const size_t cols = want.size() / slack.size();
  size_t wrong = 0, different = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    const double magnitude = std::max(std::abs(double{want[i]}), std::abs(double{got[i]}));
    const double rounding = dtype == DType::kBF16 ? bf16_spacing(magnitude) : 0.0;
    wrong += !(std::abs(double{want[i]} - got[i]) <= rounding + slack[i / cols]);
    different += want[i] != got[i];
  }
  if (wrong > 0) UNSCOPED_INFO(wrong << " of " << want.size() << " are wrong, " << different << " differ");
  const bool few_differ = dtype != DType::kBF16 || different <= 2 + want.size() / 50;
  if (!few_differ) UNSCOPED_INFO(different << " of " << want.size() << " differ");
  return wrong == 0 && few_differ;
}

// 1e-5 of the largest element of each row.
std::vector<double> row_slack(const std::vector<float>& x, int64_t rows) {
  const auto cols = static_cast<int64_t>(x.size()) / rows;
  std::vector<double> slack;
  for (int64_t r = 0; r < rows; ++r) slack.push_back(1e-5 * largest_magnitude(x, r * cols, cols));
  return slack;
}

// Ragged and whole, narrow and wide; more rows than a GPU has blocks at once; rows too long for registers.
const std::vector<Shape> kShapes = {{1, 1},      {3, 7},     {33, 16},    {130, 100},  {130, 768},  {33, 2048},
                                    {130, 4096}, {33, 5120}, {3, 8192},   {1, 11008},  {33, 11008}, {130, 513},
                                    {5000, 7},   {5000, 16}, {900, 4096}, {300, 11008}};

bool is_large(const Shape& s) { return s.rows * s.cols > 1000000; }

struct NormInput {
  NormInput(NormKind kind_, DType dtype_, DType y_dtype_, const Shape& s)
      : kind(kind_),
        dtype(dtype_),
        y_dtype(y_dtype_),
        shape(s),
        residual(values(s.rows * s.cols, 1)),
        branch(values(s.rows * s.cols, 2, 0.5f)),
        weight(values(s.cols, 3)),
        bias(values(s.cols, 7)) {}

  bool has_weight() const { return parka::has_weight(kind); }
  bool has_mean() const { return parka::has_mean(kind); }
  bool has_bias() const { return kind == NormKind::kAffineLayerNorm; }
  bool is_norm() const { return kind != NormKind::kNone; }

  NormKind kind;
  DType dtype, y_dtype;
  Shape shape;
  std::vector<float> residual, branch, weight, bias;
};

// norm_forward as it ran on a device.
struct NormOutput {
  enum Variant { kApart, kInPlace, kNoBranch, kNoBranchInPlace };

  NormOutput(Device& device, const NormInput& in, Variant variant = kApart)
      : input(in),
        residual(device, in.dtype, {in.shape.rows, in.shape.cols}, in.residual),
        branch(device, in.dtype, {in.shape.rows, in.shape.cols}, in.branch),
        weight(device, in.dtype, {in.shape.cols}, in.weight),
        bias(device, in.dtype, {in.shape.cols}, in.bias),
        residual_out(device, in.dtype, {in.shape.rows, in.shape.cols}),
        y(device, in.y_dtype, {in.shape.rows, in.shape.cols}),
        mean(device, DType::kF32, {in.shape.rows}),
        rstd(device, DType::kF32, {in.shape.rows}),
        in_place(variant == kInPlace || variant == kNoBranchInPlace) {
    const bool has_branch = variant == kApart || variant == kInPlace;
    norm_forward(device, {.kind = in.kind,
                          .eps = 1e-5f,
                          .residual = residual,
                          .branch = has_branch ? branch.view() : TensorView(),
                          .weight = weight_view(),
                          .bias = bias_view(),
                          .residual_out = sum(),
                          .y = y,
                          .mean = mean_view(),
                          .rstd = rstd_view()});
  }
  const TestTensor& sum() const { return in_place ? residual : residual_out; }
  TensorView weight_view() const { return input.has_weight() ? weight.view() : TensorView(); }
  TensorView bias_view() const { return input.has_bias() ? bias.view() : TensorView(); }
  TensorView mean_view() const { return input.has_mean() ? mean.view() : TensorView(); }
  TensorView rstd_view() const { return input.is_norm() ? rstd.view() : TensorView(); }
  bool same_bits_as(const NormOutput& other) const {
    return sum().bytes() == other.sum().bytes() && y.bytes() == other.y.bytes() &&
           mean.bytes() == other.mean.bytes() && rstd.bytes() == other.rstd.bytes();
  }
  bool guards_intact() const {
    return residual.guard_intact() && branch.guard_intact() && weight.guard_intact() && bias.guard_intact() &&
           residual_out.guard_intact() && y.guard_intact() && mean.guard_intact() && rstd.guard_intact();
  }

  const NormInput& input;
  TestTensor residual, branch, weight, bias, residual_out, y, mean, rstd;
  bool in_place;
};

void check_norm_forward(Device& device, const NormInput& in, NormOutput::Variant variant) {
  const NormOutput want(cpu_device(), in, variant), got(device, in, variant), again(device, in, variant);
  CHECK((want.sum().bytes() == got.sum().bytes()));
  const std::vector<float> y = want.y.host();
  CHECK(agree(in.y_dtype, y, got.y.host(), row_slack(y, in.shape.rows)));
  const std::vector<float> rstd = want.rstd.host(), got_rstd = got.rstd.host();
  int wrong = 0;
  for (size_t t = 0; t < rstd.size() && in.is_norm(); ++t) {
    wrong += !(std::abs(rstd[t] - got_rstd[t]) <= 2e-6 * rstd[t]);
  }
  if (in.has_mean()) {
    const std::vector<float> mean = want.mean.host(), got_mean = got.mean.host();
    for (size_t t = 0; t < mean.size(); ++t) wrong += !(std::abs(mean[t] - got_mean[t]) <= 1e-6);
  }
  CHECK(wrong == 0);
  CHECK((got.same_bits_as(again)));
  CHECK((got.guards_intact()));

  const TestTensor y_again(device, in.y_dtype, {in.shape.rows, in.shape.cols});
  norm_recompute(device, {.kind = in.kind,
                          .x = got.sum(),
                          .weight = got.weight_view(),
                          .bias = got.bias_view(),
                          .mean = got.mean_view(),
                          .rstd = got.rstd_view(),
                          .y = y_again});
  CHECK((y_again.bytes() == got.y.bytes()));
  CHECK((y_again.guard_intact() && got.guards_intact()));
}

}  // namespace

TEST_CASE("norm_forward and norm_recompute on a GPU agree with the CPU", "[kernels][devices]") {
  const Shape s = GENERATE(from_range(kShapes));
  for (Device* device : others()) {
    for (const DType dtype : kPlain) {
      if (is_large(s) && dtype == DType::kF32) continue;
      for (const NormKind kind : kKinds) {
        CAPTURE(s, name_of(dtype), int(kind));
        const NormInput in(kind, dtype, dtype, s);
        check_norm_forward(*device, in, NormOutput::kApart);
        if (is_large(s)) continue;
        check_norm_forward(*device, in, NormOutput::kInPlace);
        check_norm_forward(*device, in, NormOutput::kNoBranch);
        check_norm_forward(*device, in, NormOutput::kNoBranchInPlace);
        const DType other = dtype == DType::kF32 ? DType::kBF16 : DType::kF32;
        check_norm_forward(*device, NormInput(kind, dtype, other, s), NormOutput::kApart);
      }
    }
  }
}

namespace {

struct NormBackwardInput {
  NormBackwardInput(NormKind kind, DType x_dtype, DType dtype_, const Shape& s)
      : forward(kind, x_dtype, x_dtype, s),
        dtype(dtype_),
        d_y(values(s.rows * s.cols, 4)),
        d_residual(values(s.rows * s.cols, 5)),
        d_weight(values(s.cols, 6)),
        d_bias(values(s.cols, 8)) {
    // Statistics by the CPU, so that both devices have the same.
    const NormOutput output(cpu_device(), forward);
    x = output.sum().host();
    rstd = forward.is_norm() ? output.rstd.host() : std::vector<float>(static_cast<size_t>(s.rows), 1.0f);
    mean = forward.has_mean() ? output.mean.host() : std::vector<float>(rstd.size(), 0.0f);
  }
  float xhat(int64_t i) const { return (x[i] - mean[i / forward.shape.cols]) * rstd[i / forward.shape.cols]; }
  // Of each row, 1e-5 of the largest terms that d_residual_out is the sum of.
  std::vector<double> slack() const {
    const Shape& s = forward.shape;
    const double weight = forward.has_weight() ? largest_magnitude(forward.weight, 0, s.cols) : 1.0;
    std::vector<double> result;
    for (int64_t t = 0; t < s.rows; ++t) {
      const double term = rstd[t] * largest_magnitude(d_y, t * s.cols, s.cols) * weight;
      result.push_back(1e-5 * (term + largest_magnitude(d_residual, t * s.cols, s.cols)));
    }
    return result;
  }
  // Of each column, 1e-5 of the sum of the magnitudes that d_weight is the sum of.
  std::vector<double> weight_slack() const {
    const Shape& s = forward.shape;
    std::vector<double> result;
    for (int64_t c = 0; c < s.cols; ++c) {
      double sum = std::abs(d_weight[c]);
      for (int64_t i = c; i < s.rows * s.cols; i += s.cols) sum += std::abs(double{d_y[i]} * xhat(i));
      result.push_back(1e-5 * sum);
    }
    return result;
  }
  std::vector<double> bias_slack() const {
    const Shape& s = forward.shape;
    std::vector<double> result(d_bias.begin(), d_bias.end());
    for (double& sum : result) sum = std::abs(sum);
    for (int64_t i = 0; i < s.rows * s.cols; ++i) result[i % s.cols] += std::abs(double{d_y[i]});
    for (double& sum : result) sum *= 1e-5;
    return result;
  }

  NormInput forward;
  DType dtype;
  std::vector<float> d_y, d_residual, d_weight, d_bias, x, mean, rstd;
};

// norm_backward as it ran on a device.
struct NormBackwardOutput {
  enum Variant { kApart, kOverResidual, kOverDy, kNoResidual, kNoWeightGradient };

  NormBackwardOutput(Device& device, const NormBackwardInput& in, DType weight_dtype, Variant variant = kApart)
      : x(device, in.forward.dtype, {in.forward.shape.rows, in.forward.shape.cols}, in.x),
        weight(device, in.forward.dtype, {in.forward.shape.cols}, in.forward.weight),
        mean(device, DType::kF32, {in.forward.shape.rows}, in.mean),
        rstd(device, DType::kF32, {in.forward.shape.rows}, in.rstd),
        d_y(device, in.dtype, {in.forward.shape.rows, in.forward.shape.cols}, in.d_y),
        d_residual(device, in.dtype, {in.forward.shape.rows, in.forward.shape.cols}, in.d_residual),
        d_residual_out(device, in.dtype, {in.forward.shape.rows, in.forward.shape.cols}),
        d_weight(device, weight_dtype, {in.forward.shape.cols}, in.d_weight),
        d_bias(device, weight_dtype, {in.forward.shape.cols}, in.d_bias),
        out(variant == kOverResidual ? d_residual
            : variant == kOverDy     ? d_y
                                     : d_residual_out) {
    const bool has_weight = in.forward.has_weight();
    norm_backward(device, {.kind = in.forward.kind,
                           .x = in.forward.is_norm() ? ScaledView(x) : ScaledView(),
                           .weight = has_weight ? weight.view() : TensorView(),
                           .mean = in.forward.has_mean() ? mean.view() : TensorView(),
                           .rstd = in.forward.is_norm() ? rstd.view() : TensorView(),
                           .d_y = d_y,
                           .d_residual = variant == kNoResidual ? TensorView() : d_residual.view(),
                           .d_residual_out = out,
                           .d_weight = has_weight && variant != kNoWeightGradient ? d_weight.view() : TensorView(),
                           .d_bias = in.forward.has_bias() ? d_bias.view() : TensorView()});
  }
  bool same_bits_as(const NormBackwardOutput& other) const {
    return out.bytes() == other.out.bytes() && d_weight.bytes() == other.d_weight.bytes() &&
           d_bias.bytes() == other.d_bias.bytes();
  }
  bool guards_intact() const {
    return x.guard_intact() && weight.guard_intact() && d_y.guard_intact() && d_residual.guard_intact() &&
           d_residual_out.guard_intact() && d_weight.guard_intact() && d_bias.guard_intact();
  }

  TestTensor x, weight, mean, rstd, d_y, d_residual, d_residual_out, d_weight, d_bias;
  const TestTensor& out;
};

void check_norm_backward(Device& device, const NormBackwardInput& in, DType weight_dtype) {
  using Output = NormBackwardOutput;
  const Output want(cpu_device(), in, weight_dtype), got(device, in, weight_dtype);
  CHECK(agree(in.dtype, want.out.host(), got.out.host(), in.slack()));
  const std::vector<double> weight_slack = in.weight_slack();
  CHECK(agree(weight_dtype, want.d_weight.host(), got.d_weight.host(), weight_slack));
  CHECK(agree(weight_dtype, want.d_bias.host(), got.d_bias.host(), in.bias_slack()));
  CHECK((got.guards_intact()));
  for (const Output::Variant variant : {Output::kApart, Output::kOverResidual, Output::kOverDy}) {
    const Output again(device, in, weight_dtype, variant);
    CHECK((again.same_bits_as(got)));
    CHECK((again.guards_intact()));
  }
  const Output frozen(device, in, weight_dtype, Output::kNoWeightGradient);
  CHECK((frozen.out.bytes() == got.out.bytes() && frozen.guards_intact()));
  const TestTensor untouched(device, weight_dtype, {in.forward.shape.cols}, in.d_weight);
  CHECK((frozen.d_weight.bytes() == untouched.bytes()));
}

}  // namespace

TEST_CASE("norm_backward on a GPU agrees with the CPU", "[kernels][devices]") {
  const Shape s = GENERATE(from_range(kShapes));
  for (Device* device : others()) {
    for (const DType dtype : kPlain) {
      if (is_large(s) && dtype == DType::kF32) continue;
      for (const NormKind kind : kKinds) {
        CAPTURE(s, name_of(dtype), int(kind));
        const NormBackwardInput in(kind, dtype, dtype, s);
        check_norm_backward(*device, in, DType::kF32);
        if (is_large(s)) continue;
        check_norm_backward(*device, in, DType::kBF16);
        const DType other = dtype == DType::kF32 ? DType::kBF16 : DType::kF32;
        check_norm_backward(*device, NormBackwardInput(kind, dtype, other, s), DType::kF32);
      }
    }
  }
}

TEST_CASE("norm_backward on a GPU takes no residual gradient as zero", "[kernels][devices]") {
  for (Device* device : others()) {
    for (const Shape s : {Shape{5, 33}, Shape{5, 64}}) {
      for (const NormKind kind : kKinds) {
        NormBackwardInput in(kind, DType::kBF16, DType::kBF16, s);
        const NormBackwardOutput none(*device, in, DType::kF32, NormBackwardOutput::kNoResidual);
        std::fill(in.d_residual.begin(), in.d_residual.end(), 0.0f);
        const NormBackwardOutput zero(*device, in, DType::kF32);
        CHECK((none.same_bits_as(zero)));
      }
    }
  }
}

TEST_CASE("rope on a GPU gives the bits of the CPU", "[kernels][devices]") {
  struct Heads {
    int64_t T, S, H, Hkv, D;
  };
  for (Device* device : others()) {
    for (const Heads s : {Heads{1, 1, 1, 1, 2}, Heads{6, 3, 4, 4, 8}, Heads{130, 33, 5, 1, 34},
                          Heads{33, 40, 3, 3, 96}, Heads{130, 65, 16, 16, 128}, Heads{35, 7, 32, 8, 128},
                          Heads{9, 4, 2, 1, 1030}, Heads{9, 4, 9, 3, 2560}}) {
      for (const DType dtype : kPlain) {
        CAPTURE(s.T, s.S, s.H, s.Hkv, s.D, name_of(dtype));
        const int64_t width = (s.H + 2 * s.Hkv) * s.D;
        const std::vector<float> x = values(s.T * width, 7), cos_sin = rope_table(s.S, s.D, 1e4);
        const TestTensor want(cpu_device(), dtype, {s.T, width}, x), got(*device, dtype, {s.T, width}, x);
        const TestTensor want_table(cpu_device(), DType::kF32, {s.S, s.D}, cos_sin);
        const TestTensor got_table(*device, DType::kF32, {s.S, s.D}, cos_sin);
        const auto rotate = [&](Device& d, const TensorView& qkv, const TensorView& table) {
          rope_forward(d, {.qkv = qkv, .cos_sin = table, .num_heads = s.H, .num_kv_heads = s.Hkv, .saved = {}});
        };
        rotate(cpu_device(), want, want_table);
        rotate(*device, got, got_table);
        CHECK((want.bytes() == got.bytes()));
        CHECK((got.guard_intact() && got_table.bytes() == want_table.bytes()));
      }
    }
  }
}

namespace {

struct SwigluInput {
  explicit SwigluInput(const Shape& s)
      : shape(s), up_gate(values(s.rows * 2 * s.cols, 8)), d_product(values(s.rows * s.cols, 9)) {
    for (int64_t i = 0; i < s.rows * 2 * s.cols; ++i) {
      if (i % (2 * s.cols) >= s.cols && i % 5 == 0) up_gate[i] *= 16;  // gates from -64 to 64
    }
  }
  Shape shape;
  std::vector<float> up_gate, d_product;
};

struct SwigluOutput {
  SwigluOutput(Device& device, const SwigluInput& in, GateActivation activation, DType x_dtype, DType d_dtype,
               DType y_dtype, DType product_dtype)
      : up_gate(device, x_dtype, {in.shape.rows, 2 * in.shape.cols}, in.up_gate),
        d_product(device, d_dtype, {in.shape.rows, in.shape.cols}, in.d_product),
        product(device, product_dtype, {in.shape.rows, in.shape.cols}),
        d_up_gate(device, y_dtype, {in.shape.rows, 2 * in.shape.cols}),
        both_d_up_gate(device, y_dtype, {in.shape.rows, 2 * in.shape.cols}),
        both_product(device, product_dtype, {in.shape.rows, in.shape.cols}),
        only_product(device, product_dtype, {in.shape.rows, in.shape.cols}) {
    swiglu_forward(device, {.up_gate = up_gate, .product = product, .activation = activation});
    swiglu_backward(device,
                    {.up_gate = up_gate, .d_product = d_product, .d_up_gate = d_up_gate, .activation = activation});
    swiglu_backward(device, {.up_gate = up_gate,
                             .d_product = d_product,
                             .d_up_gate = both_d_up_gate,
                             .product = both_product,
                             .activation = activation});
    swiglu_backward(device, {.up_gate = up_gate, .product = only_product, .activation = activation});
  }
  bool consistent() const {
    return product.bytes() == both_product.bytes() && product.bytes() == only_product.bytes() &&
           d_up_gate.bytes() == both_d_up_gate.bytes();
  }
  bool guards_intact() const {
    return up_gate.guard_intact() && d_product.guard_intact() && product.guard_intact() &&
           d_up_gate.guard_intact() && both_d_up_gate.guard_intact() && both_product.guard_intact() &&
           only_product.guard_intact();
  }
  TestTensor up_gate, d_product, product, d_up_gate, both_d_up_gate, both_product, only_product;
};

}  // namespace

TEST_CASE("swiglu on a GPU agrees with the CPU", "[kernels][devices]") {
  const GateActivation activation = GENERATE(GateActivation::kSilu, GateActivation::kGeluTanh);
  for (Device* device : others()) {
    for (const Shape s : {Shape{1, 1}, Shape{3, 7}, Shape{130, 16}, Shape{33, 100}, Shape{33, 768}, Shape{3, 2049},
                          Shape{33, 4096}, Shape{3, 11008}}) {
      const SwigluInput in(s);
      for (int dtypes = 0; dtypes < 16; ++dtypes) {
        const DType x = kPlain[dtypes & 1], d = kPlain[dtypes >> 1 & 1];
        const DType y = kPlain[dtypes >> 2 & 1], product = kPlain[dtypes >> 3];
        const bool all_equal = dtypes == 0 || dtypes == 15;
        if (s.rows * s.cols > 4000 && !all_equal) continue;
        CAPTURE(s, int(activation), name_of(x), name_of(d), name_of(y), name_of(product));
        const SwigluOutput want(cpu_device(), in, activation, x, d, y, product);
        const SwigluOutput got(*device, in, activation, x, d, y, product);
        const std::vector<float> want_product = want.product.host(), want_gradient = want.d_up_gate.host();
        CHECK(agree(product, want_product, got.product.host(), row_slack(want_product, s.rows)));
        CHECK(agree(y, want_gradient, got.d_up_gate.host(), row_slack(want_gradient, s.rows)));
        CHECK((got.consistent()));
        CHECK((got.guards_intact()));
      }
    }
  }
}

TEST_CASE("swiglu on a GPU keeps small values and is right where exp overflows", "[kernels][devices]") {
  for (Device* device : others()) {
    std::vector<float> gate = {-3e38f, -1e4f, -100.0f, 89.0f, 1e4f, 3e38f, 0.0f};
    for (int i = -80; i <= 80; ++i) gate.push_back(0.99f * static_cast<float>(i));
    const auto count = static_cast<int64_t>(gate.size());
    std::vector<float> up_gate(gate.size(), 1.0f);
    up_gate.insert(up_gate.end(), gate.begin(), gate.end());
    const TestTensor input(*device, DType::kF32, {1, 2 * count}, up_gate),
        product(*device, DType::kF32, {1, count});
    const TestTensor d_product(*device, DType::kF32, {1, count}, std::vector<float>(gate.size(), 1.0f));
    const TestTensor d_up_gate(*device, DType::kF32, {1, 2 * count});
    swiglu_forward(*device, {.up_gate = input, .product = product});
    swiglu_backward(*device, {.up_gate = input, .d_product = d_product, .d_up_gate = d_up_gate});
    const std::vector<float> got = product.host(), gradient = d_up_gate.host();
    int wrong = 0;
    for (size_t i = 0; i < gate.size(); ++i) {
      const double g = gate[i], sigmoid = 1 / (1 + std::exp(-g)), silu = g * sigmoid;
      const double derivative = sigmoid * (1 + g * (1 - sigmoid));
      wrong += !(std::abs(got[i] - silu) <= 2e-6 * std::abs(silu) + 1e-35);
      wrong += !(std::abs(gradient[i] - silu) <= 2e-6 * std::abs(silu) + 1e-35);
      wrong += !(std::abs(gradient[gate.size() + i] - derivative) <= 4e-6 * (sigmoid + std::abs(silu)) + 1e-35);
    }
    CHECK(wrong == 0);
  }
}

TEST_CASE("quantize on a GPU converts and transposes plain numbers as the CPU does", "[kernels][devices]") {
  for (Device* device : others()) {
    for (const Shape s : {Shape{1, 1}, Shape{3, 7}, Shape{33, 16}, Shape{130, 100}, Shape{64, 128}, Shape{65, 63},
                          Shape{33, 5120}}) {
      // Numbers that bf16 does not hold, and those that are no numbers.
      std::vector<float> x = random_normal(s.rows * s.cols, 10);
      const float special[] = {-0.0f, NAN, INFINITY, -INFINITY, 3.4e38f, 1e-40f, -1e-45f, 1.00390625f};
      for (size_t i = 0; i < std::size(special) && i < x.size(); ++i) x[i * 31 % x.size()] = special[i];
      for (const DType from : kPlain) {
        for (const DType to : kPlain) {
          CAPTURE(s, name_of(from), name_of(to));
          const TestTensor want_x(cpu_device(), from, {s.rows, s.cols}, x),
              got_x(*device, from, {s.rows, s.cols}, x);
          const TestTensor want(cpu_device(), to, {s.rows, s.cols}), got(*device, to, {s.rows, s.cols});
          const TestTensor want_t(cpu_device(), to, {s.cols, s.rows}), got_t(*device, to, {s.cols, s.rows});
          quantize(cpu_device(), {.x = want_x, .out = want, .out_t = want_t});
          quantize(*device, {.x = got_x, .out = got, .out_t = got_t});
          CHECK((want.bytes() == got.bytes()));
          CHECK((want_t.bytes() == got_t.bytes()));
          CHECK((got.guard_intact() && got_t.guard_intact() && got_x.guard_intact()));
        }
      }
    }
  }
}
