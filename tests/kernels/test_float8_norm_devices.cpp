#include <tuple>
#include <utility>

#include "kernels/ops/norm/norm.h"
#include "tests/kernels/float8_devices.h"

// Norms in FP8 on every other device. Sums may be rounded otherwise than on the CPU, so outputs are compared in two
// steps: values in fp32 are near the CPU's, and codes are, bit for bit, what the CPU makes of the values that the
// same device computes in fp32. Without another device there is nothing to compare.
using namespace parka;
using namespace parka::test;

namespace {

const Format kGroup16{DType::kE4M3, Scaling::kGroup, 16, DType::kBF16};
const Format kGroup32{DType::kE5M2, Scaling::kGroup, 32, DType::kF32};
const Format kGroup128{DType::kE4M3, Scaling::kGroup, 128, DType::kF32};
const Format kBlock128{DType::kE4M3, Scaling::kBlock, 128, DType::kF32};
const Format kE4M3{DType::kE4M3, Scaling::kTensor};
const Format kE5M2{DType::kE5M2, Scaling::kTensor};

// How a norm runs: what it reads (null: the sum as it is) and in which format it writes.
struct NormCase {
  NormKind kind;
  DType dtype;
  const Format* x_format;
  MatrixShape shape;

  bool has_weight() const { return parka::has_weight(kind); }
  bool has_bias() const { return kind == NormKind::kAffineLayerNorm; }
  bool has_mean() const { return parka::has_mean(kind); }
  bool is_norm() const { return kind != NormKind::kNone; }
};

std::vector<float> weights(int64_t cols) { return random_bf16(cols, 203); }

// The tensors of a forward pass on one device.
struct NormPass {
  NormPass(Device& device_, const NormCase& c_, const Format& y_format, Copies copies,
           const std::vector<float>& residual_values)
      : device(device_),
        c(c_),
        residual(device, c.dtype, {c.shape.rows, c.shape.cols}, residual_values),
        branch(device, c.dtype, {c.shape.rows, c.shape.cols}, random_bf16(c.shape.numel(), 202, 0.5f)),
        weight(device, c.dtype, {c.shape.cols}, weights(c.shape.cols)),
        bias(device, c.dtype, {c.shape.cols}, random_bf16(c.shape.cols, 204)),
        sum(device, c.dtype, {c.shape.rows, c.shape.cols}),
        y(device, y_format, c.shape.rows, c.shape.cols, copies),
        mean(device, DType::kF32, {c.shape.rows}),
        rstd(device, DType::kF32, {c.shape.rows}) {
    if (c.x_format) x.reset(new TestMatrix(c.x_format->make(device, c.shape.rows, c.shape.cols)));
  }
  NormForward op() const {
    return {.kind = c.kind,
            .eps = 1e-5f,
            .residual = residual,
            .branch = branch,
            .weight = c.has_weight() ? weight.view() : TensorView(),
            .bias = c.has_bias() ? bias.view() : TensorView(),
            .residual_out = sum,
            .x = x ? x->view() : ScaledView(),
            .y = y.row(),
            .y_t = y.transposed(),
            .mean = c.has_mean() ? mean.view() : TensorView(),
            .rstd = c.is_norm() ? rstd.view() : TensorView()};
  }
  void recompute(const ScaledView& out, const ScaledView& out_t) const {
    norm_recompute(device, {.kind = c.kind,
                            .x = x ? x->view() : ScaledView(sum),
                            .weight = c.has_weight() ? weight.view() : TensorView(),
                            .bias = c.has_bias() ? bias.view() : TensorView(),
                            .mean = c.has_mean() ? mean.view() : TensorView(),
                            .rstd = c.is_norm() ? rstd.view() : TensorView(),
                            .y = out,
                            .y_t = out_t});
  }
  bool guards_intact() const {
    return residual.guard_intact() && branch.guard_intact() && weight.guard_intact() && sum.guard_intact() &&
           mean.guard_intact() && rstd.guard_intact();
  }
  // Of what the norm read, in fp32.
  std::unique_ptr<TestTensor> y_fp32() const {
    auto values = std::make_unique<TestTensor>(device, DType::kF32,
                                               std::initializer_list<int64_t>{c.shape.rows, c.shape.cols});
    recompute(*values, {});
    return values;
  }

  Device& device;
  NormCase c;
  TestTensor residual, branch, weight, bias, sum;
  std::unique_ptr<TestMatrix> x;
  Output y;
  TestTensor mean, rstd;
};

std::string first_difference(const NormPass& got, const NormPass& want) {
  for (const auto& [name, a, b] : {std::tuple{"residual_out", &got.sum, &want.sum},
                                   {"mean", &got.mean, &want.mean},
                                   {"rstd", &got.rstd, &want.rstd}}) {
    const std::string difference = first_difference(name, *a, *b);
    if (!difference.empty()) return difference;
  }
  const std::string x = got.x ? first_difference("x", *got.x, *want.x) : "";
  return x.empty() ? first_difference("y", got.y, want.y) : x;
}

// The sums of 10000 numbers in fp32 in another order are some 1e-7 apart, relative to the numbers' magnitude.
void check_statistics(const NormPass& got, const NormPass& want) {
  const std::vector<float> a = got.rstd.host(), b = want.rstd.host();
  int wrong = 0;
  for (size_t t = 0; t < a.size() && got.c.is_norm(); ++t) wrong += !(std::abs(a[t] - b[t]) <= 2e-6f * b[t]);
  if (got.c.has_mean()) {
    const std::vector<float> mean = got.mean.host(), want_mean = want.mean.host();
    for (size_t t = 0; t < mean.size(); ++t) wrong += !(std::abs(mean[t] - want_mean[t]) <= 1e-6f);
  }
  CHECK(wrong == 0);
}

// norm_recompute gives the bits of norm_forward, for either copy and both.
void check_recompute(const NormPass& pass) {
  for (const Copies copies : kAllCopies) {
    if (pass.y.copies != Copies::kBoth && copies != pass.y.copies) continue;
    const Output again(pass.device, pass.y.format, pass.c.shape.rows, pass.c.shape.cols, copies);
    if (again.format.scaling == Scaling::kTensor) again.set_scale(pass.device, pass.y.tensor_scale());
    pass.recompute(again.row(), again.transposed());
    CAPTURE(copies);
    const TestMatrix &row = again.matrix, &column = again.matrix_t;
    if (copies != Copies::kTransposed) CHECK(first_difference("y again", row, pass.y.matrix) == "");
    if (copies != Copies::kRow) {
      CHECK(first_difference("y_t again", column.data, pass.y.matrix_t.data) == "");
      CHECK(column.guard_intact());
      const bool own_scale = column.scale && again.format.scaling != Scaling::kTensor;
      if (own_scale) CHECK(first_difference("scale of y_t again", *column.scale, *pass.y.matrix_t.scale) == "");
    }
  }
}

void check_norm_forward(Device& device, const NormCase& c, const Format& y_format, Copies copies) {
  const std::vector<float> residual = random_bf16(c.shape.numel(), 201);
  const NormPass want(cpu_device(), c, plain_format(DType::kF32), Copies::kRow, residual);
  const NormPass got(device, c, y_format, copies, residual), again(device, c, y_format, copies, residual);
  norm_forward(cpu_device(), want.op());
  norm_forward(device, got.op());
  norm_forward(device, again.op());
  CAPTURE(c.shape, int(c.kind), name_of(c.dtype), c.x_format != nullptr, describe(got.y.matrix.view()), copies);
  CHECK(first_difference("residual_out", got.sum, want.sum) == "");
  if (c.x_format) CHECK(first_difference("x", *got.x, *want.x) == "");
  check_statistics(got, want);
  const std::unique_ptr<TestTensor> y = got.y_fp32();
  CHECK(first_far("y", *y, want.y.matrix.data, row_slack(want.y.matrix.data.host(), c.shape.rows)) == "");
  CHECK(unlike_quantized("y", got.y, *y) == "");
  CHECK(first_difference(again, got) == "");
  check_recompute(got);
  CHECK((got.guards_intact() && again.guards_intact()));
}

const std::vector<MatrixShape> kNormShapes = {{1, 16},    {3, 7},     {37, 90},   {33, 100}, {130, 128}, {64, 384},
                                              {257, 768}, {33, 2048}, {65, 4096}, {9, 5120}, {5, 11008}};

}  // namespace

TEST_CASE("norm_forward in fp8 on another device", "[kernels][norm][devices]") {
  const MatrixShape s = GENERATE(from_range(kNormShapes));
  for (Device* device : other_devices()) {
    for (const NormKind kind :
         {NormKind::kLayerNorm, NormKind::kRmsNorm, NormKind::kNone, NormKind::kAffineLayerNorm}) {
      for (const DType dtype : {DType::kF32, DType::kBF16}) {
        for (const Format* x_format : {static_cast<const Format*>(nullptr), &kGroup16, &kGroup32, &kGroup128}) {
          const NormCase c{kind, dtype, x_format, s};
          if (x_format && !c.is_norm()) continue;
          for (const Copies copies : {Copies::kRow, Copies::kBoth}) {
            check_norm_forward(*device, c, kE4M3, copies);
            if (s.numel() > 100000 && dtype == DType::kF32) continue;
            check_norm_forward(*device, c, kGroup128, copies);
          }
          if (x_format == &kGroup32 || x_format == &kGroup128) continue;
          check_norm_forward(*device, c, kE5M2, Copies::kBoth);
          check_norm_forward(*device, c, kGroup16, Copies::kRow);
          if (x_format) check_norm_forward(*device, c, plain_format(DType::kBF16), Copies::kRow);
          if (x_format) check_norm_forward(*device, c, plain_format(DType::kF32), Copies::kRow);
        }
      }
    }
  }
}

TEST_CASE("norm_forward in fp8 on another device works in place and without a branch", "[kernels][norm][devices]") {
  for (Device* device : other_devices()) {
    for (const MatrixShape s : {MatrixShape{37, 90}, MatrixShape{130, 768}}) {
      for (const NormKind kind : {NormKind::kLayerNorm, NormKind::kRmsNorm}) {
        const NormCase c{kind, DType::kBF16, &kGroup16, s};
        const std::vector<float> residual = random_bf16(s.numel(), 201);
        for (const bool has_branch : {true, false}) {
          const NormPass apart(*device, c, kE4M3, Copies::kBoth, residual);
          const NormPass in_place(*device, c, kE4M3, Copies::kBoth, residual);
          const NormPass want(cpu_device(), c, kE4M3, Copies::kBoth, residual);
          for (const NormPass* pass : {&apart, &in_place, &want}) {
            NormForward op = pass->op();
            if (!has_branch) op.branch = {};
            if (pass == &in_place) op.residual_out = pass->residual;
            norm_forward(pass->device, op);
          }
          CAPTURE(s, int(kind), has_branch);
          CHECK(first_difference("residual_out", apart.sum, want.sum) == "");
          CHECK(first_difference("x", *apart.x, *want.x) == "");
          CHECK(first_difference("residual in place", in_place.residual, apart.sum) == "");
          CHECK(first_difference("x in place", *in_place.x, *apart.x) == "");
          CHECK(first_difference("y in place", in_place.y, apart.y) == "");
          CHECK((apart.guards_intact() && in_place.guards_intact()));
        }
      }
    }
  }
}

TEST_CASE("norm_forward on another device writes a norm behind a branch as norm_recompute does",
          "[kernels][norm][devices]") {
  for (Device* device : other_devices()) {
    for (const MatrixShape s : {MatrixShape{37, 90}, MatrixShape{130, 768}, MatrixShape{33, 2048}}) {
      for (const NormKind kind : {NormKind::kLayerNorm, NormKind::kRmsNorm, NormKind::kAffineLayerNorm}) {
        for (const Format* x_format : {static_cast<const Format*>(nullptr), &kGroup16}) {
          const NormCase c{kind, DType::kBF16, x_format, s};
          const NormPass got(*device, c, plain_format(DType::kBF16), Copies::kRow, random_bf16(s.numel(), 201));
          NormForward op = got.op();
          op.branch = {};
          op.residual_out = got.residual;
          norm_forward(*device, op);
          const TestTensor again(*device, DType::kBF16, {s.rows, s.cols});
          norm_recompute(*device, {.kind = c.kind,
                                   .x = got.x ? got.x->view() : ScaledView(got.residual),
                                   .weight = op.weight,
                                   .bias = op.bias,
                                   .mean = op.mean,
                                   .rstd = op.rstd,
                                   .y = again});
          CAPTURE(s, int(kind), x_format != nullptr);
          CHECK(got.residual.host() == random_bf16(s.numel(), 201));
          CHECK(first_difference("y", again, got.y.matrix.data) == "");
          CHECK(got.guards_intact());
        }
      }
    }
  }
}

TEST_CASE("norm_forward in fp8 on another device keeps bad values visible where the CPU does",
          "[kernels][norm][devices]") {
  for (Device* device : other_devices()) {
    const MatrixShape s{37, 96};
    for (const NormKind kind : {NormKind::kLayerNorm, NormKind::kRmsNorm}) {
      for (const Format* x_format : {static_cast<const Format*>(nullptr), &kGroup16}) {
        for (const float bad : {NAN, INFINITY}) {
          std::vector<float> residual = random_bf16(s.numel(), 201);
          residual[7 * s.cols + 20] = bad;
          std::fill_n(residual.begin() + 9 * s.cols, s.cols, 0.0f);
          const NormCase c{kind, DType::kBF16, x_format, s};
          const NormPass want(cpu_device(), c, kE4M3, Copies::kBoth, residual),
              got(*device, c, kE4M3, Copies::kBoth, residual);
          norm_forward(cpu_device(), want.op());
          norm_forward(*device, got.op());
          const std::vector<float> a = got.y.matrix.data.host(), b = want.y.matrix.data.host();
          int wrong = 0;
          for (size_t i = 0; i < b.size(); ++i) wrong += std::isnan(a[i]) != std::isnan(b[i]);
          CAPTURE(int(kind), x_format != nullptr, bad);
          CHECK(wrong == 0);
          if (x_format) CHECK(first_difference("x", *got.x, *want.x) == "");
          CHECK(unlike_quantized("y", got.y, *got.y_fp32()) == "");
        }
      }
    }
  }
}

namespace {

// The tensors of a backward pass on one device. Inputs have equal bits on all of them.
struct NormGradient {
  enum Target { kApart, kOverResidual, kOverDy };

  NormGradient(Device& device, const NormPass& forward, DType dtype, const Format& format, Copies copies,
               Target target = kApart, DType weight_dtype = DType::kF32)
      : c(forward.c),
        d_y(device, dtype, {c.shape.rows, c.shape.cols}, random_bf16(c.shape.numel(), 204, 1e-3f)),
        d_residual(device, dtype, {c.shape.rows, c.shape.cols}, random_bf16(c.shape.numel(), 205, 1e-3f)),
        d_residual_out(device, dtype, {c.shape.rows, c.shape.cols}),
        d_weight(device, weight_dtype, {c.shape.cols}, random_bf16(c.shape.cols, 206, 1e-3f)),
        d_bias(device, weight_dtype, {c.shape.cols}, random_bf16(c.shape.cols, 207, 1e-3f)),
        quantized(device, format, c.shape.rows, c.shape.cols, copies),
        out(target == kOverResidual ? d_residual
            : target == kOverDy     ? d_y
                                    : d_residual_out) {
    const std::unique_ptr<TestMatrix> x = forward.x ? copy_on(device, *forward.x) : nullptr;
    const TestTensor sum(device, c.dtype, {c.shape.rows, c.shape.cols}), weight(device, c.dtype, {c.shape.cols});
    const TestTensor mean(device, DType::kF32, {c.shape.rows}), rstd(device, DType::kF32, {c.shape.rows});
    for (const auto& [from, to] : {std::pair{&forward.sum, &sum},
                                   {&forward.weight, &weight},
                                   {&forward.mean, &mean},
                                   {&forward.rstd, &rstd}}) {
      copy_bits(*from, device, *to);
    }
    norm_backward(device, {.kind = c.kind,
                           .x = !c.is_norm() ? ScaledView()
                                : x          ? x->view()
                                             : ScaledView(sum),
                           .weight = c.has_weight() ? weight.view() : TensorView(),
                           .mean = c.has_mean() ? mean.view() : TensorView(),
                           .rstd = c.is_norm() ? rstd.view() : TensorView(),
                           .d_y = d_y,
                           .d_residual = d_residual,
                           .d_residual_out = out,
                           .d_quantized = quantized.row(),
                           .d_quantized_t = quantized.transposed(),
                           .d_weight = c.has_weight() ? d_weight.view() : TensorView(),
                           .d_bias = c.has_bias() ? d_bias.view() : TensorView()});
    intact = d_y.guard_intact() && d_residual.guard_intact() && d_residual_out.guard_intact() &&
             d_weight.guard_intact() && d_bias.guard_intact() && (!x || x->guard_intact());
  }
  // Of each row, 1e-5 of the largest terms that d_residual_out is the sum of: d_y times rstd and a weight, and the
  // residual's gradient.
  std::vector<double> slack(const NormPass& forward) const {
    const std::vector<float> rstd = forward.rstd.host(), weight = weights(c.shape.cols);
    double largest_weight = 1;
    for (const float w : weight) largest_weight = std::max(largest_weight, std::abs(double{w}));
    std::vector<double> terms = row_slack(random_bf16(c.shape.numel(), 204, 1e-3f), c.shape.rows);
    const std::vector<double> residual = row_slack(random_bf16(c.shape.numel(), 205, 1e-3f), c.shape.rows);
    for (size_t t = 0; t < terms.size(); ++t) {
      terms[t] = terms[t] * (c.is_norm() ? rstd[t] : 1.0f) * largest_weight + residual[t];
    }
    return terms;
  }

  NormCase c;
  TestTensor d_y, d_residual, d_residual_out, d_weight, d_bias;
  Output quantized;
  const TestTensor& out;
  bool intact;
};

// Of each column, 1e-5 of the magnitudes that its weight gradient is the sum of.
std::vector<double> weight_slack(const NormPass& forward) {
  const MatrixShape& s = forward.c.shape;
  const std::vector<float> x = forward.x ? forward.x->host() : forward.sum.host(), rstd = forward.rstd.host();
  const std::vector<float> d_y = random_bf16(s.numel(), 204, 1e-3f);
  std::vector<double> slack(static_cast<size_t>(s.cols), 1e-8);
  for (int64_t i = 0; i < s.numel(); ++i)
    slack[i % s.cols] += 1e-5 * std::abs(double{d_y[i]} * x[i] * rstd[i / s.cols]);
  return slack;
}

void check_norm_backward(Device& device, const NormPass& forward, DType dtype, const Format& format,
                         Copies copies) {
  const NormCase& c = forward.c;
  const NormGradient want(cpu_device(), forward, dtype, format, copies),
      got(device, forward, dtype, format, copies);
  const NormGradient over_residual(device, forward, dtype, format, copies, NormGradient::kOverResidual);
  const NormGradient over_dy(device, forward, dtype, format, copies, NormGradient::kOverDy);
  CAPTURE(c.shape, int(c.kind), name_of(c.dtype), c.x_format != nullptr, name_of(dtype));
  CAPTURE(describe(got.quantized.matrix.view()), copies);
  CHECK(first_far("d_residual_out", got.out, want.out, want.slack(forward)) == "");
  CHECK(unlike_quantized("d_quantized", got.quantized, got.out) == "");
  if (c.has_weight()) CHECK(first_far("d_weight", got.d_weight, want.d_weight, weight_slack(forward)) == "");
  const std::vector<double> bias_slack(static_cast<size_t>(c.shape.cols), 1e-8 * static_cast<double>(c.shape.rows));
  if (c.has_bias()) CHECK(first_far("d_bias", got.d_bias, want.d_bias, bias_slack) == "");
  for (const NormGradient* again : {&over_residual, &over_dy}) {
    CHECK(first_difference("d_residual_out in place", again->out, got.out) == "");
    CHECK(first_difference("d_quantized in place", again->quantized, got.quantized) == "");
    CHECK(first_difference("d_weight in place", again->d_weight, got.d_weight) == "");
    CHECK(first_difference("d_bias in place", again->d_bias, got.d_bias) == "");
    CHECK(again->intact);
  }
  CHECK(got.intact);
}

}  // namespace

TEST_CASE("norm_backward in fp8 on another device", "[kernels][norm][devices]") {
  const MatrixShape s = GENERATE(from_range(kNormShapes));
  for (Device* device : other_devices()) {
    for (const NormKind kind :
         {NormKind::kLayerNorm, NormKind::kRmsNorm, NormKind::kNone, NormKind::kAffineLayerNorm}) {
      for (const Format* x_format : {static_cast<const Format*>(nullptr), &kGroup16, &kGroup128}) {
        for (const DType dtype : {DType::kF32, DType::kBF16}) {
          if (s.numel() > 100000 && dtype == DType::kF32) continue;
          const NormCase c{kind, dtype, x_format, s};
          if (x_format && !c.is_norm()) continue;
          const NormPass forward(cpu_device(), c, plain_format(DType::kF32), Copies::kRow,
                                 random_bf16(s.numel(), 201));
          norm_forward(cpu_device(), forward.op());
          for (const Copies copies : kAllCopies) check_norm_backward(*device, forward, dtype, kE5M2, copies);
          check_norm_backward(*device, forward, dtype, kE4M3, Copies::kBoth);
          check_norm_backward(*device, forward, dtype, kGroup128, Copies::kBoth);
          check_norm_backward(*device, forward, dtype, kGroup16, Copies::kRow);
          check_norm_backward(*device, forward, dtype, kBlock128, Copies::kBoth);
        }
      }
    }
  }
}

TEST_CASE("norm_backward's scale on another device is of the columns that there are", "[kernels][norm][devices]") {
  // Rows far from 0, and gradients along them: past the last column a centred norm would yield larger numbers.
  const MatrixShape s{65, 768};
  constexpr float kMean = 30;
  const std::vector<float> xhat = random_bf16(s.numel(), 208);
  std::vector<float> values = xhat;
  for (float& x : values) x += kMean;
  const size_t rows = static_cast<size_t>(s.rows);
  for (Device* device : other_devices()) {
    for (const NormKind kind : {NormKind::kLayerNorm, NormKind::kAffineLayerNorm}) {
      CAPTURE(int(kind));
      const TestTensor x(*device, DType::kBF16, {s.rows, s.cols}, values),
          d_y(*device, DType::kBF16, {s.rows, s.cols}, xhat),
          d_residual(*device, DType::kBF16, {s.rows, s.cols}, std::vector<float>(values.size())),
          out(*device, DType::kBF16, {s.rows, s.cols});
      const TestTensor mean(*device, DType::kF32, {s.rows}, std::vector<float>(rows, kMean)),
          rstd(*device, DType::kF32, {s.rows}, std::vector<float>(rows, 1));
      const TestTensor weight(*device, DType::kBF16, {s.cols}, weights(s.cols));
      const TestTensor d_weight(*device, DType::kF32, {s.cols}, weights(s.cols)),
          d_bias(*device, DType::kF32, {s.cols}, weights(s.cols));
      const bool is_affine = kind == NormKind::kAffineLayerNorm;
      const Output quantized(*device, kE5M2, s.rows, s.cols, Copies::kBoth);
      norm_backward(*device, {.kind = kind,
                              .x = ScaledView(x),
                              .weight = is_affine ? weight.view() : TensorView(),
                              .mean = mean,
                              .rstd = rstd,
                              .d_y = d_y,
                              .d_residual = d_residual,
                              .d_residual_out = out,
                              .d_quantized = quantized.row(),
                              .d_quantized_t = quantized.transposed(),
                              .d_weight = is_affine ? d_weight.view() : TensorView(),
                              .d_bias = is_affine ? d_bias.view() : TensorView()});
      CHECK(unlike_quantized("d_quantized", quantized, out) == "");
    }
  }
}
