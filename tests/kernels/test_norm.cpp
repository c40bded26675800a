#include "kernels/ops/norm/norm.h"

#include "kernels/ops/quantize/quantize.h"
#include "tests/kernels/op_checks.h"
#include "tests/support/catch.h"

using namespace parka;
using namespace parka::test;

namespace {

constexpr NormKind kKinds[] = {NormKind::kLayerNorm, NormKind::kRmsNorm, NormKind::kNone,
                               NormKind::kAffineLayerNorm};
const Format kGroup16{DType::kE4M3, Scaling::kGroup, 16, DType::kBF16};

double relative_rounding(DType dtype) { return dtype == DType::kBF16 ? 0x1p-8 : 0x1p-24; }

float round_to(DType dtype, float x) { return dtype == DType::kBF16 ? decode_bf16(encode_bf16(x)) : x; }

struct RowStatistics {
  double mean = 0, rstd = 0;
};

// Only norms have statistics, and read a quantized copy of the sum.
bool is_norm(NormKind kind) { return kind != NormKind::kNone; }
std::vector<const Format*> x_formats_of(NormKind kind) {
  if (is_norm(kind)) return {nullptr, &kGroup16};
  return {nullptr};
}

// The definition in ops/norm/norm.h, in double.
template <typename T>
RowStatistics statistics_of(NormKind kind, double eps, const T* x, int64_t cols) {
  RowStatistics s;
  if (kind == NormKind::kNone) return {0, 1};
  if (has_mean(kind)) {
    for (int64_t c = 0; c < cols; ++c) s.mean += double{x[c]} / static_cast<double>(cols);
  }
  double variance = 0;
  for (int64_t c = 0; c < cols; ++c) variance += (x[c] - s.mean) * (x[c] - s.mean) / static_cast<double>(cols);
  s.rstd = 1 / std::sqrt(variance + eps);
  return s;
}

std::vector<float> weights(NormKind kind, int64_t cols) {
  return has_weight(kind) ? random_bf16(cols, 90) : std::vector<float>(static_cast<size_t>(cols), 1.0f);
}

std::vector<float> biases(NormKind kind, int64_t cols) {
  const bool has_bias = kind == NormKind::kAffineLayerNorm;
  return has_bias ? random_bf16(cols, 97) : std::vector<float>(static_cast<size_t>(cols), 0.0f);
}

// A matrix and, if its format is fp8, its transpose in the same format.
struct WithTranspose {
  WithTranspose(const Format& format_, int64_t rows, int64_t cols)
      : format(format_),
        matrix(format.make(cpu_device(), rows, cols)),
        transposed(format.make(cpu_device(), cols, rows)) {}

  ScaledView transposed_view() const {
    if (format.scaling == Scaling::kNone) return {};
    ScaledView view = transposed;
    if (format.scaling == Scaling::kTensor) view.scale = matrix.scale->view();
    return view;
  }
  bool equals(const WithTranspose& other) const {
    if (!same_bits(matrix, other.matrix)) return false;
    if (format.scaling == Scaling::kNone) return true;
    const bool own_scale = format.scaling != Scaling::kTensor;
    return transposed.data.bytes() == other.transposed.data.bytes() &&
           (!own_scale || transposed.scale->bytes() == other.transposed.scale->bytes());
  }
  // Both hold x, quantized.
  bool hold(const ScaledView& x) const {
    const WithTranspose want(format, x.num_rows(), x.num_cols());
    quantize(cpu_device(), {.x = x, .out = want.matrix, .out_t = want.transposed_view()});
    return equals(want);
  }
  bool guards_intact() const { return matrix.guard_intact() && transposed.guard_intact(); }

  Format format;
  TestMatrix matrix, transposed;
};

// All tensors of a forward pass. `x` is there when the norm is to read a quantized copy.
struct Forward {
  Forward(NormKind kind_, DType dtype, int64_t rows, int64_t cols, float eps_, const Format* x_format = nullptr,
          const Format& y_format = {DType::kF32})
      : kind(kind_),
        eps(eps_),
        residual(cpu_device(), dtype, {rows, cols}, random_bf16(rows * cols, 91)),
        branch(cpu_device(), dtype, {rows, cols}, random_bf16(rows * cols, 92, 0.5f)),
        weight(cpu_device(), dtype, {cols}, weights(kind_, cols)),
        bias(cpu_device(), dtype, {cols}, biases(kind_, cols)),
        residual_out(cpu_device(), dtype, {rows, cols}),
        y(y_format, rows, cols),
        mean(cpu_device(), DType::kF32, {rows}),
        rstd(cpu_device(), DType::kF32, {rows}) {
    if (x_format) x.reset(new TestMatrix(x_format->make(cpu_device(), rows, cols)));
  }
  NormForward op() const {
    return {.kind = kind,
            .eps = eps,
            .residual = residual,
            .branch = branch,
            .weight = weight_view(),
            .bias = bias_view(),
            .residual_out = residual_out,
            .x = x ? x->view() : ScaledView(),
            .y = y.matrix,
            .y_t = y.transposed_view(),
            .mean = mean_view(),
            .rstd = rstd_view()};
  }
  TensorView weight_view() const { return has_weight(kind) ? weight.view() : TensorView(); }
  TensorView bias_view() const { return kind == NormKind::kAffineLayerNorm ? bias.view() : TensorView(); }
  TensorView mean_view() const { return has_mean(kind) ? mean.view() : TensorView(); }
  TensorView rstd_view() const { return is_norm(kind) ? rstd.view() : TensorView(); }
  ScaledView norm_input() const { return x ? x->view() : ScaledView(residual_out); }
  std::vector<float> norm_input_values() const { return x ? x->host() : residual_out.host(); }
  bool guards_intact() const {
    return residual.guard_intact() && branch.guard_intact() && residual_out.guard_intact() && y.guards_intact() &&
           mean.guard_intact() && rstd.guard_intact() && (!x || x->guard_intact());
  }

  NormKind kind;
  float eps;
  TestTensor residual, branch, weight, bias, residual_out;
  std::unique_ptr<TestMatrix> x;
  WithTranspose y;
  TestTensor mean, rstd;
};

}  // namespace

TEST_CASE("norm_forward rounds the fp64 result", "[kernels][norm]") {
  const auto [rows, cols] =
      GENERATE(table<int64_t, int64_t>({{1, 1}, {3, 7}, {5, 16}, {33, 100}, {2, 1000}, {2, 5120}, {1, 6656}}));
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  const float eps = GENERATE(1e-5f, 0.5f);  // 0.5, so that an eps that is not used shows
  for (const NormKind kind : kKinds) {
    for (const Format* x_format : x_formats_of(kind)) {
      const Forward f(kind, dtype, rows, cols, eps, x_format, {dtype});
      norm_forward(cpu_device(), f.op());

      const auto residual = f.residual.host(), branch = f.branch.host(), sum = f.residual_out.host();
      const auto x = f.norm_input_values(), y = f.y.matrix.host(), mean = f.mean.host(), rstd = f.rstd.host();
      const auto weight = weights(kind, cols), bias = biases(kind, cols);
      int wrong_sum = 0, wrong_statistics = 0, wrong_y = 0;
      for (int64_t r = 0; r < rows; ++r) {
        const RowStatistics s = statistics_of(kind, eps, &x[r * cols], cols);
        if (has_mean(kind)) wrong_statistics += !(std::abs(mean[r] - s.mean) <= 1e-6);
        if (is_norm(kind)) wrong_statistics += !(std::abs(rstd[r] - s.rstd) <= 1e-6 * s.rstd);
        for (int64_t i = r * cols; i < (r + 1) * cols; ++i) {
          wrong_sum += sum[i] != round_to(dtype, residual[i] + branch[i]);
          const double w = weight[i - r * cols], b = bias[i - r * cols];
          const double want = (x[i] - s.mean) * s.rstd * w + b;
          const double arithmetic = 2e-6 * (std::abs(want) + s.rstd * std::abs(w) + std::abs(b));
          wrong_y += !(std::abs(y[i] - want) <= 1.01 * relative_rounding(dtype) * std::abs(want) + arithmetic);
        }
      }
      CAPTURE(rows, cols, eps, int(kind), x_format != nullptr);
      CHECK(wrong_sum == 0);
      CHECK(wrong_statistics == 0);
      CHECK(wrong_y == 0);
      CHECK(f.guards_intact());
    }
  }
}

TEST_CASE("norm_forward without a branch normalizes the residual", "[kernels][norm]") {
  const Forward f(NormKind::kRmsNorm, DType::kBF16, 5, 24, 1e-5f),
      same(NormKind::kRmsNorm, DType::kBF16, 5, 24, 1e-5f);
  NormForward op = f.op();
  op.branch = {};
  norm_forward(cpu_device(), op);
  CHECK((f.residual_out.host() == f.residual.host()));

  const TestTensor zeros(cpu_device(), DType::kBF16, {5, 24}, std::vector<float>(5 * 24, 0.0f));
  op = same.op();
  op.branch = zeros;
  norm_forward(cpu_device(), op);
  CHECK(same_bits(f.y.matrix, same.y.matrix));
}

TEST_CASE("norm_forward quantizes the rounded sum, and its own result", "[kernels][norm]") {
  const NormKind kind = GENERATE(from_range(std::begin(kKinds), std::end(kKinds)));
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  constexpr int64_t kRows = 37, kCols = 90;
  const Format* x_format = is_norm(kind) ? &kGroup16 : nullptr;
  const Forward plain(kind, dtype, kRows, kCols, 1e-5f, x_format);
  norm_forward(cpu_device(), plain.op());
  for (const Format& format : kFloat8Formats) {
    const Forward f(kind, dtype, kRows, kCols, 1e-5f, x_format, format);
    norm_forward(cpu_device(), f.op());
    const TestMatrix x = kGroup16.make(cpu_device(), kRows, kCols);
    quantize(cpu_device(), {.x = f.residual_out, .out = x});
    CAPTURE(int(kind), describe(f.y.matrix.view()));
    CHECK((f.x == nullptr || same_bits(*f.x, x)));
    CHECK(f.y.hold(plain.y.matrix));
    CHECK(f.guards_intact());
  }
}

TEST_CASE("norm statistics are exact where mean and deviation differ widely", "[kernels][norm]") {
  // Mean 4096.5, deviation 0.5: mean(x^2) - mean^2 would lose the variance in fp32. Lengths that are no powers of
  // two, so that padding that is counted shows.
  const int64_t cols = GENERATE(6, 100, 5120, 6656);
  const int64_t rows = 3;
  std::vector<float> x(static_cast<size_t>(rows * cols));
  for (size_t i = 0; i < x.size(); ++i) x[i] = 4096.0f + static_cast<float>(i % 2);
  const TestTensor residual(cpu_device(), DType::kF32, {rows, cols}, x),
      out(cpu_device(), DType::kF32, {rows, cols});
  const TestTensor y(cpu_device(), DType::kF32, {rows, cols}), mean(cpu_device(), DType::kF32, {rows}),
      rstd(cpu_device(), DType::kF32, {rows});
  norm_forward(cpu_device(), {.kind = NormKind::kLayerNorm,
                              .eps = 0.0f,
                              .residual = residual,
                              .residual_out = out,
                              .y = y,
                              .mean = mean,
                              .rstd = rstd});
  int wrong = 0;
  const auto got = y.host();
  for (size_t i = 0; i < got.size(); ++i) wrong += got[i] != (i % 2 ? 1.0f : -1.0f);
  CHECK(mean.host() == std::vector<float>(3, 4096.5f));
  CHECK(rstd.host() == std::vector<float>(3, 2.0f));
  CHECK(wrong == 0);
}

TEST_CASE("norm_forward may write over the residual", "[kernels][norm]") {
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  const Forward apart(NormKind::kLayerNorm, dtype, 19, 50, 1e-5f, &kGroup16);
  const Forward in_place(NormKind::kLayerNorm, dtype, 19, 50, 1e-5f, &kGroup16);
  norm_forward(cpu_device(), apart.op());
  NormForward op = in_place.op();
  op.residual_out = in_place.residual;
  norm_forward(cpu_device(), op);
  CHECK((in_place.residual.bytes() == apart.residual_out.bytes()));
  CHECK((in_place.y.equals(apart.y) && same_bits(*in_place.x, *apart.x)));
  CHECK(in_place.guards_intact());
}

TEST_CASE("norm_forward without a norm may leave the sum alone", "[kernels][norm]") {
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  const Forward apart(NormKind::kNone, dtype, 19, 50, 1e-5f, nullptr, {dtype});
  const Forward alone(NormKind::kNone, dtype, 19, 50, 1e-5f, nullptr, {dtype});
  norm_forward(cpu_device(), apart.op());
  NormForward op = alone.op();
  op.y = alone.residual_out;
  norm_forward(cpu_device(), op);
  CHECK((alone.residual_out.bytes() == apart.residual_out.bytes()));
  CHECK((apart.y.matrix.data.bytes() == apart.residual_out.bytes()));
  CHECK(alone.guards_intact());
}

TEST_CASE("norm_recompute repeats norm_forward bit for bit", "[kernels][norm]") {
  const NormKind kind = GENERATE(from_range(std::begin(kKinds), std::end(kKinds)));
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  const auto [rows, cols] = GENERATE(table<int64_t, int64_t>({{1, 1}, {37, 90}}));
  std::vector<Format> y_formats(std::begin(kFloat8Formats), std::end(kFloat8Formats));
  y_formats.push_back({DType::kF32});
  y_formats.push_back({DType::kBF16});
  for (const Format* x_format : x_formats_of(kind)) {
    for (const Format& format : y_formats) {
      const Forward f(kind, dtype, rows, cols, 1e-5f, x_format, format);
      norm_forward(cpu_device(), f.op());
      const WithTranspose again(format, rows, cols), only_t(format, rows, cols);
      NormRecompute op{.kind = kind,
                       .x = f.norm_input(),
                       .weight = f.weight_view(),
                       .bias = f.bias_view(),
                       .mean = f.mean_view(),
                       .rstd = f.rstd_view(),
                       .y = again.matrix,
                       .y_t = again.transposed_view()};
      if (format.scaling == Scaling::kTensor) op.y.scale = op.y_t.scale = f.y.matrix.scale->view();
      norm_recompute(cpu_device(), op);
      CAPTURE(rows, cols, int(kind), describe(op.x), describe(op.y));
      CHECK((again.matrix.data.bytes() == f.y.matrix.data.bytes()));
      CHECK((format.scaling == Scaling::kNone || again.transposed.data.bytes() == f.y.transposed.data.bytes()));
      CHECK((again.guards_intact() && f.guards_intact()));

      // Either copy alone is the same.
      op.y = {};
      if (format.scaling == Scaling::kNone) continue;
      op.y_t.data = only_t.transposed.data.view();
      norm_recompute(cpu_device(), op);
      CHECK((only_t.transposed.data.bytes() == f.y.transposed.data.bytes()));
    }
  }
}

TEST_CASE("norm_recompute reads the scale of a tensor and does not compute it", "[kernels][norm]") {
  const NormKind kind = GENERATE(NormKind::kLayerNorm, NormKind::kRmsNorm);
  const Format format{DType::kE4M3, Scaling::kTensor};
  const Forward f(kind, DType::kBF16, 9, 40, 1e-5f, &kGroup16);  // y in fp32
  norm_forward(cpu_device(), f.op());
  const WithTranspose got(format, 9, 40), want(format, 9, 40);
  upload(cpu_device(), got.matrix.scale->view(), std::vector<float>{0.03f});
  upload(cpu_device(), want.matrix.scale->view(), std::vector<float>{0.03f});
  quantize(cpu_device(),
           {.x = f.y.matrix, .out = want.matrix, .out_t = want.transposed_view(), .scale_given = true});
  norm_recompute(cpu_device(), {.kind = kind,
                                .x = f.norm_input(),
                                .weight = f.weight_view(),
                                .bias = f.bias_view(),
                                .mean = f.mean_view(),
                                .rstd = f.rstd,
                                .y = got.matrix,
                                .y_t = got.transposed_view()});
  CHECK(got.equals(want));
}

namespace {

// Inputs of a backward pass over x, with the statistics of x and a loss sum(d_y * y) in double.
struct Backward {
  Backward(NormKind kind_, DType dtype, int64_t rows_, int64_t cols_, float eps_, const Format* x_format = nullptr)
      : kind(kind_),
        rows(rows_),
        cols(cols_),
        eps(eps_),
        x(x_format ? x_format->make(cpu_device(), rows, cols) : TestMatrix(cpu_device(), dtype, rows, cols)),
        weight(cpu_device(), dtype, {cols}, weights(kind, cols)),
        mean(cpu_device(), DType::kF32, {rows}),
        rstd(cpu_device(), DType::kF32, {rows}),
        d_y(cpu_device(), dtype, {rows, cols}, random_bf16(rows * cols, 93)),
        d_residual(cpu_device(), dtype, {rows, cols}, random_bf16(rows * cols, 94)),
        d_residual_out(cpu_device(), dtype, {rows, cols}),
        d_weight(cpu_device(), dtype, {cols}, random_bf16(cols, 95)),
        d_bias(cpu_device(), dtype, {cols}, random_bf16(cols, 98)) {
    const TestTensor values(cpu_device(), DType::kF32, {rows, cols}, random_bf16(rows * cols, 96));
    quantize(cpu_device(), {.x = values, .out = x});
    std::vector<float> means, rstds;
    const auto read = x.host();
    for (int64_t r = 0; r < rows; ++r) {
      const RowStatistics s = statistics_of(kind, eps, &read[r * cols], cols);
      means.push_back(static_cast<float>(s.mean));
      rstds.push_back(static_cast<float>(s.rstd));
    }
    upload(cpu_device(), mean.view(), means);
    upload(cpu_device(), rstd.view(), rstds);
  }
  NormBackward op() const {
    const bool weighted = has_weight(kind);
    return {.kind = kind,
            .x = is_norm(kind) ? x.view() : ScaledView(),
            .weight = weighted ? weight.view() : TensorView(),
            .mean = has_mean(kind) ? mean.view() : TensorView(),
            .rstd = is_norm(kind) ? rstd.view() : TensorView(),
            .d_y = d_y,
            .d_residual = d_residual,
            .d_residual_out = d_residual_out,
            .d_weight = weighted ? d_weight.view() : TensorView(),
            .d_bias = kind == NormKind::kAffineLayerNorm ? d_bias.view() : TensorView()};
  }
  // d loss / d x by central differences, in double.
  std::vector<double> d_x() const {
    const auto values = x.host(), w = weights(kind, cols), gradient = d_y.host();
    std::vector<double> result(values.size());
    std::vector<double> row(static_cast<size_t>(cols));
    for (int64_t i = 0; i < rows * cols; ++i) {
      const int64_t begin = i / cols * cols;
      double loss[2];
      constexpr double kStep = 1e-5;
      for (int side = 0; side < 2; ++side) {
        for (int64_t c = 0; c < cols; ++c) row[c] = values[begin + c];
        row[i - begin] += side ? kStep : -kStep;
        const RowStatistics s = statistics_of(kind, eps, row.data(), cols);
        loss[side] = 0;
        for (int64_t c = 0; c < cols; ++c) loss[side] += gradient[begin + c] * (row[c] - s.mean) * s.rstd * w[c];
      }
      result[i] = (loss[1] - loss[0]) / (2 * kStep);
    }
    return result;
  }
  // d loss / d weight; the loss is linear in it.
  std::vector<double> d_w() const {
    const auto values = x.host(), gradient = d_y.host();
    std::vector<double> result(static_cast<size_t>(cols));
    for (int64_t i = 0; i < rows * cols; ++i) {
      const RowStatistics s = statistics_of(kind, eps, &values[i / cols * cols], cols);
      result[i % cols] += gradient[i] * (values[i] - s.mean) * s.rstd;
    }
    return result;
  }
  // d loss / d bias: the sum of d_y over the rows.
  std::vector<double> d_b() const {
    const auto gradient = d_y.host();
    std::vector<double> result(static_cast<size_t>(cols));
    for (int64_t i = 0; i < rows * cols; ++i) result[i % cols] += gradient[i];
    return result;
  }
  bool guards_intact() const {
    return x.guard_intact() && d_y.guard_intact() && d_residual.guard_intact() && d_residual_out.guard_intact() &&
           d_weight.guard_intact() && d_bias.guard_intact();
  }

  NormKind kind;
  int64_t rows, cols;
  float eps;
  TestMatrix x;
  TestTensor weight, mean, rstd, d_y, d_residual, d_residual_out, d_weight, d_bias;
};

}  // namespace

TEST_CASE("norm_backward is the derivative of norm_forward", "[kernels][norm]") {
  const auto [rows, cols] =
      GENERATE(table<int64_t, int64_t>({{1, 1}, {4, 2}, {5, 16}, {3, 33}, {131, 7}, {2, 100}}));
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  const float eps = GENERATE(1e-3f, 0.5f);
  for (const NormKind kind : kKinds) {
    for (const Format* x_format : x_formats_of(kind)) {
      const Backward b(kind, dtype, rows, cols, eps, x_format);
      const auto d_weight_before = b.d_weight.host(), d_bias_before = b.d_bias.host();
      norm_backward(cpu_device(), b.op());

      const auto d_x = b.d_x(), d_w = b.d_w(), d_b = b.d_b();
      const auto d_bias = b.d_bias.host();
      const auto d_residual = b.d_residual.host(), out = b.d_residual_out.host(), d_weight = b.d_weight.host();
      const auto rstd = b.rstd.host();
      int wrong = 0, wrong_weight = 0;
      for (int64_t i = 0; i < rows * cols; ++i) {
        const double want = d_residual[i] + d_x[i];
        const double bound = 1.01 * relative_rounding(dtype) * std::abs(want) + 5e-6 * (2 + rstd[i / cols]);
        wrong += !(std::abs(out[i] - want) <= bound);
      }
      const auto is_near = [&](float got, double want) {
        return std::abs(got - want) <= 1.01 * relative_rounding(dtype) * std::abs(want) + 1e-4;
      };
      for (int64_t c = 0; c < cols && has_weight(kind); ++c) {
        wrong_weight += !is_near(d_weight[c], d_weight_before[c] + d_w[c]);
      }
      for (int64_t c = 0; c < cols && kind == NormKind::kAffineLayerNorm; ++c) {
        wrong_weight += !is_near(d_bias[c], d_bias_before[c] + d_b[c]);
      }
      CAPTURE(rows, cols, eps, int(kind), int(dtype), describe(b.x.view()));
      CHECK(wrong == 0);
      CHECK(wrong_weight == 0);
      CHECK(b.guards_intact());
    }
  }
}

TEST_CASE("norm_backward without a residual gradient takes it as zero", "[kernels][norm]") {
  const NormKind kind = GENERATE(from_range(std::begin(kKinds), std::end(kKinds)));
  const Backward b(kind, DType::kF32, 7, 20, 1e-5f), same(kind, DType::kF32, 7, 20, 1e-5f);
  NormBackward op = b.op();
  op.d_residual = {};
  norm_backward(cpu_device(), op);
  const TestTensor zeros(cpu_device(), DType::kF32, {7, 20}, std::vector<float>(140, 0.0f));
  op = same.op();
  op.d_residual = zeros;
  norm_backward(cpu_device(), op);
  CHECK((b.d_residual_out.bytes() == same.d_residual_out.bytes()));
}

TEST_CASE("norm_backward of a weight that is not trained leaves its gradient alone", "[kernels][norm]") {
  const Backward with(NormKind::kRmsNorm, DType::kF32, 70, 33, 1e-5f),
      without(NormKind::kRmsNorm, DType::kF32, 70, 33, 1e-5f);
  const auto before = without.d_weight.bytes();
  norm_backward(cpu_device(), with.op());
  NormBackward op = without.op();
  op.d_weight = {};
  norm_backward(cpu_device(), op);
  CHECK((without.d_residual_out.bytes() == with.d_residual_out.bytes()));
  CHECK((without.d_weight.bytes() == before));
}

TEST_CASE("an affine LayerNorm without a bias has a bias of zeros", "[kernels][norm]") {
  const NormKind kind = NormKind::kAffineLayerNorm;
  const Forward f(kind, DType::kF32, 7, 20, 1e-5f), same(kind, DType::kF32, 7, 20, 1e-5f);
  upload(cpu_device(), f.bias.view(), std::vector<float>(20, 0.0f));
  norm_forward(cpu_device(), f.op());
  NormForward op = same.op();
  op.bias = {};
  norm_forward(cpu_device(), op);
  CHECK((f.y.matrix.host() == same.y.matrix.host()));

  const Backward b(kind, DType::kF32, 7, 20, 1e-5f), alone(kind, DType::kF32, 7, 20, 1e-5f);
  norm_backward(cpu_device(), b.op());
  NormBackward backward = alone.op();
  backward.d_bias = {};
  const auto d_bias = alone.d_bias.bytes();
  norm_backward(cpu_device(), backward);
  CHECK((alone.d_residual_out.bytes() == b.d_residual_out.bytes()));
  CHECK((alone.d_weight.bytes() == b.d_weight.bytes()));
  CHECK((alone.d_bias.bytes() == d_bias));
}

TEST_CASE("norm_backward may write over either gradient it reads", "[kernels][norm]") {
  const NormKind kind = GENERATE(from_range(std::begin(kKinds), std::end(kKinds)));
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  const Backward apart(kind, dtype, 70, 33, 1e-5f), over_residual(kind, dtype, 70, 33, 1e-5f);
  const Backward over_y(kind, dtype, 70, 33, 1e-5f);
  norm_backward(cpu_device(), apart.op());
  NormBackward op = over_residual.op();
  op.d_residual_out = over_residual.d_residual;
  norm_backward(cpu_device(), op);
  op = over_y.op();
  op.d_residual_out = over_y.d_y;
  norm_backward(cpu_device(), op);
  CHECK((over_residual.d_residual.bytes() == apart.d_residual_out.bytes()));
  CHECK((over_y.d_y.bytes() == apart.d_residual_out.bytes()));
  CHECK((over_y.d_weight.bytes() == apart.d_weight.bytes()));
  CHECK((over_residual.guards_intact() && over_y.guards_intact()));
}

TEST_CASE("norm_backward quantizes the gradient as it rounded it", "[kernels][norm]") {
  const NormKind kind = GENERATE(NormKind::kLayerNorm, NormKind::kNone);
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  for (const Format& format : kFloat8Formats) {
    const Backward b(kind, dtype, 37, 90, 1e-5f, &kGroup16);
    const WithTranspose quantized(format, 37, 90), only_t(format, 37, 90);
    NormBackward op = b.op();
    op.d_quantized = quantized.matrix;
    op.d_quantized_t = quantized.transposed_view();
    norm_backward(cpu_device(), op);
    CAPTURE(describe(op.d_quantized));
    CHECK(quantized.hold(b.d_residual_out));

    op.d_quantized = {};
    op.d_quantized_t = only_t.transposed_view();
    norm_backward(cpu_device(), op);
    CHECK((only_t.transposed.data.bytes() == quantized.transposed.data.bytes()));
    CHECK((quantized.guards_intact() && only_t.guards_intact()));
  }
}

TEST_CASE("norm ops give the same bits on any number of threads", "[kernels][norm]") {
  const NormKind kind = GENERATE(NormKind::kLayerNorm, NormKind::kRmsNorm, NormKind::kAffineLayerNorm);
  const Forward parallel(kind, DType::kBF16, 201, 40, 1e-5f, &kGroup16);
  const Forward serial(kind, DType::kBF16, 201, 40, 1e-5f, &kGroup16);
  const Backward parallel_b(kind, DType::kF32, 201, 40, 1e-5f), serial_b(kind, DType::kF32, 201, 40, 1e-5f);
  set_num_threads(3);
  norm_forward(cpu_device(), parallel.op());
  norm_backward(cpu_device(), parallel_b.op());
  set_num_threads(1);
  norm_forward(cpu_device(), serial.op());
  norm_backward(cpu_device(), serial_b.op());
  set_num_threads(0);
  CHECK((parallel.y.equals(serial.y) && parallel.rstd.bytes() == serial.rstd.bytes()));
  CHECK((parallel_b.d_residual_out.bytes() == serial_b.d_residual_out.bytes()));
  CHECK((parallel_b.d_weight.bytes() == serial_b.d_weight.bytes()));
  CHECK((parallel_b.d_bias.bytes() == serial_b.d_bias.bytes()));
}

TEST_CASE("norm ops keep bad values visible, in their own row", "[kernels][norm]") {
  const NormKind kind = GENERATE(NormKind::kLayerNorm, NormKind::kRmsNorm);
  const float bad = GENERATE(NAN, INFINITY);
  const Format* x_format = GENERATE(static_cast<const Format*>(nullptr), &kGroup16);
  const Forward f(kind, DType::kF32, 5, 32, 1e-5f, x_format);
  auto values = f.residual.host();
  values[2 * 32 + 9] = bad;
  upload(cpu_device(), f.residual.view(), values);
  norm_forward(cpu_device(), f.op());
  const auto y = f.y.matrix.host();
  int bad_elements = 0, bad_elsewhere = 0;
  for (int64_t i = 0; i < 5 * 32; ++i) {
    if (!std::isfinite(y[i])) ++(i / 32 == 2 ? bad_elements : bad_elsewhere);
  }
  CHECK(bad_elements > 0);
  CHECK(bad_elsewhere == 0);
}

TEST_CASE("norm ops of nothing do nothing", "[kernels][norm]") {
  const Forward f(NormKind::kRmsNorm, DType::kF32, 0, 8, 1e-5f);
  const Backward b(NormKind::kRmsNorm, DType::kF32, 0, 8, 1e-5f);
  const auto before = b.d_weight.host();
  norm_forward(cpu_device(), f.op());
  norm_recompute(cpu_device(),
                 {.kind = f.kind, .x = f.norm_input(), .weight = f.weight_view(), .rstd = f.rstd, .y = f.y.matrix});
  norm_backward(cpu_device(), b.op());
  CHECK((f.guards_intact() && b.guards_intact()));
  CHECK((b.d_weight.host() == before));
}

TEST_CASE("norm ops refuse tensors that do not fit, by name", "[kernels][norm]") {
  const Forward rms(NormKind::kRmsNorm, DType::kF32, 4, 6, 1e-5f, &kGroup16);
  const Forward layer(NormKind::kLayerNorm, DType::kF32, 4, 6, 1e-5f);
  const Forward affine(NormKind::kAffineLayerNorm, DType::kF32, 4, 6, 1e-5f);
  const Backward b(NormKind::kRmsNorm, DType::kF32, 4, 6, 1e-5f);
  const TestTensor small(cpu_device(), DType::kF32, {4, 5}), bf16(cpu_device(), DType::kBF16, {4, 6});
  const WithTranspose fp8({DType::kE5M2, Scaling::kTensor}, 4, 6);
  const auto forward = [](NormForward op, auto change) {
    change(op);
    return internal_error([&] { norm_forward(cpu_device(), op); });
  };
  const auto backward = [](NormBackward op, auto change) {
    change(op);
    return internal_error([&] { norm_backward(cpu_device(), op); });
  };
  using F = NormForward&;
  using B = NormBackward&;
  CHECK(contains(forward(rms.op(), [&](F a) { a.residual = {}; }), "norm_forward: residual is no tensor"));
  CHECK(contains(forward(rms.op(), [&](F a) { a.branch = small; }), "norm_forward: branch is fp32 [4, 5]"));
  CHECK(contains(forward(rms.op(), [&](F a) { a.branch = bf16; }), "norm_forward: branch is bf16"));
  CHECK(contains(forward(rms.op(), [&](F a) { a.weight = {}; }), "norm_forward: weight is no tensor"));
  CHECK(
      contains(forward(layer.op(), [&](F a) { a.weight = rms.weight; }), "norm_forward: weight is fp32 [6], but"));
  CHECK(contains(forward(rms.op(), [&](F a) { a.bias = rms.weight; }), "norm_forward: bias is fp32 [6], but"));
  CHECK(contains(forward(affine.op(), [&](F a) { a.bias = small; }), "norm_forward: bias is fp32 [4, 5]"));
  CHECK(contains(forward(affine.op(), [&](F a) { a.weight = {}; }), "norm_forward: weight is no tensor"));
  CHECK(contains(forward(affine.op(), [&](F a) { a.mean = {}; }), "norm_forward: mean is no tensor"));
  CHECK(contains(forward(rms.op(), [&](F a) { a.residual_out = bf16; }), "norm_forward: residual_out is bf16"));
  CHECK(contains(forward(rms.op(), [&](F a) { a.x = bf16; }), "norm_forward: x is bf16 [4, 6], wanted fp8"));
  CHECK(contains(forward(rms.op(), [&](F a) { a.x = fp8.matrix; }), "norm_forward: x is e5m2 [4, 6], one scale"));
  CHECK(contains(forward(rms.op(), [&](F a) { a.y = small; }), "norm_forward: y is fp32 [4, 5]"));
  CHECK(contains(forward(rms.op(), [&](F a) { a.y_t = fp8.matrix; }), "norm_forward: y_t is e5m2 [4, 6]"));
  CHECK(contains(forward(rms.op(), [&](F a) { a.y = fp8.matrix, a.y_t = fp8.transposed; }), "share one scale"));
  CHECK(contains(forward(layer.op(), [&](F a) { a.mean = {}; }), "norm_forward: mean is no tensor"));
  CHECK(contains(forward(rms.op(), [&](F a) { a.mean = rms.mean; }), "norm_forward: mean is fp32 [4], but"));
  CHECK(contains(forward(rms.op(), [&](F a) { a.rstd = small; }), "norm_forward: rstd is fp32 [4, 5]"));
  const Forward none(NormKind::kNone, DType::kF32, 4, 6, 1e-5f);
  CHECK(contains(forward(none.op(), [&](F a) { a.x = rms.op().x; }), "this kind of norm reads the sum"));
  CHECK(contains(forward(none.op(), [&](F a) { a.rstd = rms.rstd; }), "norm_forward: rstd is fp32 [4], but"));
  CHECK(contains(forward(none.op(), [&](F a) { a.weight = rms.weight; }), "norm_forward: weight is fp32 [6], but"));

  CHECK(contains(backward(b.op(), [&](B a) { a.x = ScaledView(); }), "norm_backward: x is no tensor"));
  CHECK(contains(backward(b.op(), [&](B a) { a.d_y = small; }), "norm_backward: d_y is fp32 [4, 5]"));
  CHECK(contains(backward(b.op(), [&](B a) { a.d_residual = bf16; }), "norm_backward: d_residual is bf16"));
  CHECK(contains(backward(b.op(), [&](B a) { a.d_residual_out = {}; }), "norm_backward: d_residual_out is no"));
  CHECK(contains(backward(b.op(), [&](B a) { a.d_quantized = bf16; }), "norm_backward: d_quantized is bf16"));
  CHECK(contains(backward(b.op(), [&](B a) { a.d_quantized_t = fp8.matrix; }), "norm_backward: d_quantized_t is"));
  CHECK(contains(backward(b.op(), [&](B a) { a.d_weight = small; }), "norm_backward: d_weight is fp32 [4, 5]"));
  CHECK(contains(backward(b.op(), [&](B a) { a.d_bias = b.d_weight; }), "norm_backward: d_bias is fp32 [6], but"));
  CHECK(contains(backward(b.op(), [&](B a) { a.kind = NormKind::kLayerNorm; }), "norm_backward: weight is fp32"));
  CHECK(contains(backward(b.op(), [&](B a) { a.kind = NormKind::kNone; }), "this kind of norm has no use for it"));

  NormRecompute op{.kind = rms.kind, .x = rms.norm_input(), .weight = rms.weight, .rstd = rms.rstd, .y = small};
  CHECK(contains(internal_error([&] { norm_recompute(cpu_device(), op); }), "norm_recompute: y is fp32 [4, 5]"));
  op.y = ScaledView();
  op.y_t = small;
  CHECK(contains(internal_error([&] { norm_recompute(cpu_device(), op); }), "norm_recompute: y_t is fp32 [4, 5]"));
}
