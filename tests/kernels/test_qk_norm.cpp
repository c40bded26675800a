#include <algorithm>
#include <cmath>
#include <ostream>
#include <string>
#include <vector>

#include "kernels/ops/attention/rope.h"
#include "kernels/ops/norm/qk_norm.h"
#include "kernels/ops/quantize/quantize.h"
#include "tests/kernels/op_bounds.h"
#include "tests/support/catch.h"

using namespace parka;
using namespace parka::test;

namespace {

constexpr int64_t kPositions = 7;
constexpr QkNormKind kKinds[] = {QkNormKind::kPerHead, QkNormKind::kFull};

struct Shape {
  int64_t T, H, Hkv, D;
  int64_t width() const { return (H + 2 * Hkv) * D; }
  int64_t normalized() const { return (H + Hkv) * D; }  // columns of queries and keys
  int64_t numel() const { return T * width(); }
};

std::ostream& operator<<(std::ostream& out, const Shape& s) {
  return out << "T " << s.T << " H " << s.H << " Hkv " << s.Hkv << " D " << s.D;
}

// Heads of widths that are no multiple of a pack, of those of models, and of more columns than a warp holds; more
// rows than a sum of the weights' gradients has parts; and with kFull more columns than a block of a GPU holds in
// registers.
const std::vector<Shape> kShapes = {{1, 1, 1, 2},    {3, 2, 1, 4},    {33, 4, 2, 8},   {5, 3, 1, 34},
                                    {17, 4, 4, 16},  {70, 8, 2, 64},  {9, 6, 2, 128},  {300, 5, 1, 128},
                                    {4, 5, 1, 256},  {2, 2, 1, 512},  {19, 16, 4, 96}, {2, 40, 8, 256},
                                    {2, 3, 3, 1024}, {1100, 2, 2, 16}};

// Where a group lies in a row, and its weight among those of queries and keys.
struct Group {
  int64_t first_col, width;
  bool is_key;
};

std::vector<Group> groups_of(QkNormKind kind, const Shape& s) {
  if (kind == QkNormKind::kFull) return {{0, s.H * s.D, false}, {s.H * s.D, s.Hkv * s.D, true}};
  std::vector<Group> groups;
  for (int64_t h = 0; h < s.H + s.Hkv; ++h) groups.push_back({h * s.D, s.D, h >= s.H});
  return groups;
}

int64_t weight_cols(QkNormKind kind, int64_t heads, int64_t D) { return kind == QkNormKind::kFull ? heads * D : D; }

// The definition in ops/norm/qk_norm.h, in double.
double rstd_of(const float* x, int64_t width, double eps) {
  double sum = 0;
  for (int64_t c = 0; c < width; ++c) sum += double{x[c]} * x[c];
  return 1 / std::sqrt(sum / static_cast<double>(width) + eps);
}

// The tensors of forward and backward on one device. The rstd that backward reads is that of the definition.
struct Pass {
  Pass(Device& on, QkNormKind kind_, const Shape& s_, DType dtype, DType weight_dtype, float eps_)
      : device(on),
        kind(kind_),
        s(s_),
        eps(eps_),
        x(on, dtype, {s.T, s.width()}, random_values(dtype, s.numel(), 1)),
        q_weight(on, weight_dtype, {weight_cols(kind, s.H, s.D)}, random_bf16(weight_cols(kind, s.H, s.D), 2)),
        k_weight(on, weight_dtype, {weight_cols(kind, s.Hkv, s.D)}, random_bf16(weight_cols(kind, s.Hkv, s.D), 3)),
        out(on, dtype, {s.T, s.width()}),
        rstd(on, DType::kF32, {s.T, qk_norm_groups(kind, s.H, s.Hkv)}),
        given_rstd(on, DType::kF32, {s.T, qk_norm_groups(kind, s.H, s.Hkv)}, rstds()),
        d_qkv(on, dtype, {s.T, s.width()}, random_values(dtype, s.numel(), 4)),
        d_q_weight(on, DType::kF32, {weight_cols(kind, s.H, s.D)}, random_bf16(weight_cols(kind, s.H, s.D), 5)),
        d_k_weight(on, DType::kF32, {weight_cols(kind, s.Hkv, s.D)}, random_bf16(weight_cols(kind, s.Hkv, s.D), 6)),
        amax(on, DType::kF32, {1}),
        cos_sin(on, DType::kF32, {kPositions, s.D}, rope_table(kPositions, s.D, 100.0)) {}

  QkNormRopeForward forward() const {
    return {.kind = kind,
            .x = x,
            .q_weight = q_weight,
            .k_weight = k_weight,
            .cos_sin = cos_sin,
            .num_heads = s.H,
            .num_kv_heads = s.Hkv,
            .eps = eps,
            .saved = {},
            .out = out,
            .rstd = rstd};
  }
  QkNormBackward backward() const {
    return {.kind = kind,
            .x = x,
            .rstd = given_rstd,
            .q_weight = q_weight,
            .k_weight = k_weight,
            .d_qkv = d_qkv,
            .d_q_weight = d_q_weight,
            .d_k_weight = d_k_weight,
            .num_heads = s.H,
            .num_kv_heads = s.Hkv,
            .d_qkv_amax = amax};
  }
  std::vector<float> rstds() const { return rstds_of(x.host()); }
  std::vector<float> rstds_of(const std::vector<float>& values) const {
    std::vector<float> all;
    for (int64_t t = 0; t < s.T; ++t) {
      for (const Group& g : groups_of(kind, s)) {
        all.push_back(static_cast<float>(rstd_of(&values[t * s.width() + g.first_col], g.width, eps)));
      }
    }
    return all;
  }
  bool guards_intact() const {
    return x.guard_intact() && out.guard_intact() && rstd.guard_intact() && d_qkv.guard_intact() &&
           d_q_weight.guard_intact() && d_k_weight.guard_intact() && amax.guard_intact();
  }

  Device& device;
  QkNormKind kind;
  Shape s;
  float eps;
  TestTensor x, q_weight, k_weight, out, rstd, given_rstd, d_qkv, d_q_weight, d_k_weight, amax, cos_sin;
};

// fp32 sums of a group have no more additions in a row on any device: a thread's columns, then the threads.
constexpr double kSumError = 64 * 0x1p-24;

// Where element c of a row is rotated to: with its partner in the pair.
struct Angle {
  int64_t partner, cosine, sine;  // the latter two in a row of cos_sin
  double sign;                    // of the sine
};
Angle angle_of(int64_t c, int64_t D) {
  const int64_t i = c % D, half = D / 2;
  return i < half ? Angle{c + half, i, i + half, -1.0} : Angle{c - half, i - half, i, 1.0};
}

// Elements and statistics of forward that are not the definition's of `x`, in double, within rounding; values have
// been rounded to `dtype` once.
struct Wrong {
  int normalized = 0, rstd = 0, values = 0;
};

Wrong wrong_forward(const Pass& pass, DType dtype, const std::vector<float>& x) {
  const Shape& s = pass.s;
  const std::vector<float> got = pass.out.host(), got_rstd = pass.rstd.host(), cos_sin = pass.cos_sin.host();
  const std::vector<float> q_weight = pass.q_weight.host(), k_weight = pass.k_weight.host();
  const std::vector<Group> groups = groups_of(pass.kind, s);
  Wrong wrong;
  std::vector<double> y(static_cast<size_t>(s.width()));
  for (int64_t t = 0; t < s.T; ++t) {
    for (size_t g = 0; g < groups.size(); ++g) {
      const float* const group = &x[t * s.width() + groups[g].first_col];
      const double rstd = rstd_of(group, groups[g].width, pass.eps);
      wrong.rstd += !(std::abs(got_rstd[t * groups.size() + g] - rstd) <= kSumError * rstd);
      for (int64_t c = 0; c < groups[g].width; ++c) {
        y[groups[g].first_col + c] = group[c] * rstd * (groups[g].is_key ? k_weight : q_weight)[c];
      }
    }
    for (int64_t c = 0; c < s.width(); ++c) {
      const float value = got[t * s.width() + c], before = x[t * s.width() + c];
      if (c >= s.normalized()) {
        wrong.values += value != (dtype == DType::kBF16 ? decode_bf16(encode_bf16(before)) : before);
        continue;
      }
      const Angle angle = angle_of(c, s.D);
      const float* const row = &cos_sin[t % kPositions * s.D];
      const double own = y[c] * row[angle.cosine], other = angle.sign * y[angle.partner] * row[angle.sine];
      const double bound =
          kSumError * (std::abs(own) + std::abs(other)) + 1.01 * unit_roundoff(dtype) * std::abs(own + other);
      wrong.normalized += !(std::abs(value - (own + other)) <= bound);
    }
  }
  return wrong;
}

void check_none(const Wrong& wrong) {
  CHECK(wrong.normalized == 0);
  CHECK(wrong.rstd == 0);
  CHECK(wrong.values == 0);
}

TEST_CASE("qk_norm_rope_forward normalizes and rotates queries and keys, and copies values", "[kernels][qk_norm]") {
  const Shape s = GENERATE(from_range(kShapes));
  const QkNormKind kind = GENERATE(from_range(std::begin(kKinds), std::end(kKinds)));
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  const float eps = GENERATE(1e-6f, 0.5f);  // 0.5, so that an eps that is not used shows
  CAPTURE(s, int(kind), name_of(dtype), eps);
  for (Device* device : devices()) {
    CAPTURE(device->name());
    const Pass pass(*device, kind, s, dtype, dtype, eps), in_place(*device, kind, s, dtype, dtype, eps);
    qk_norm_rope_forward(*device, pass.forward());
    check_none(wrong_forward(pass, dtype, pass.x.host()));
    CHECK(pass.guards_intact());

    QkNormRopeForward op = in_place.forward();
    op.out = in_place.x;
    qk_norm_rope_forward(*device, op);
    CHECK((in_place.x.bytes() == pass.out.bytes() && in_place.rstd.bytes() == pass.rstd.bytes()));
    CHECK(in_place.guards_intact());
  }
}

// FP8 with a scale per group, as q, k and v are saved.
struct SavedFormat {
  DType codes;
  int64_t group;
  DType scale;
};

const std::vector<SavedFormat> kSavedFormats = {{DType::kE4M3, 16, DType::kBF16},
                                                {DType::kE4M3, 32, DType::kBF16},
                                                {DType::kE5M2, 32, DType::kBF16},
                                                {DType::kE4M3, 128, DType::kBF16},
                                                {DType::kE4M3, 16, DType::kF32}};

TEST_CASE("qk_norm_rope_forward saves its input and computes with what was saved", "[kernels][qk_norm]") {
  const Shape s = GENERATE(from_range(kShapes));
  const QkNormKind kind = GENERATE(from_range(std::begin(kKinds), std::end(kKinds)));
  const SavedFormat format = GENERATE(from_range(kSavedFormats));
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  CAPTURE(s, int(kind), name_of(dtype), name_of(format.codes), format.group, name_of(format.scale));
  for (Device* device : devices()) {
    if (!has_scaling(*device, Scaling::kGroup, format.group)) continue;
    CAPTURE(device->name());
    const auto matrix = [&] {
      return TestMatrix(*device, format.codes, s.T, s.width(), Scaling::kGroup, format.group, format.scale);
    };
    const Pass pass(*device, kind, s, dtype, dtype, 1e-6f), again(*device, kind, s, dtype, dtype, 1e-6f);
    const TestMatrix saved = matrix(), wanted = matrix();
    quantize(*device, {.x = pass.x, .out = wanted, .out_t = {}});
    QkNormRopeForward op = pass.forward();
    op.saved = saved;
    qk_norm_rope_forward(*device, op);
    CHECK(saved.data.bytes() == wanted.data.bytes());
    CHECK(saved.scale->bytes() == wanted.scale->bytes());
    check_none(wrong_forward(pass, dtype, saved.host()));
    CHECK((pass.guards_intact() && saved.guard_intact()));

    // From what was saved: the same bits.
    op = again.forward();
    op.x = saved;
    qk_norm_rope_forward(*device, op);
    CHECK((again.out.bytes() == pass.out.bytes() && again.rstd.bytes() == pass.rstd.bytes()));
    CHECK(again.guards_intact());
  }
}

// The gradients in double, with bounds of their errors.
struct Gradients {
  std::vector<double> d_qkv, d_qkv_bound, d_weight[2], d_weight_bound[2];  // of queries, of keys
};

Gradients gradients_of(const Pass& pass, const std::vector<float>& x) {
  const Shape& s = pass.s;
  const std::vector<float> d_y = pass.d_qkv.host(), rstd = pass.given_rstd.host();
  const std::vector<float> weights[2] = {pass.q_weight.host(), pass.k_weight.host()};
  const std::vector<float> before[2] = {pass.d_q_weight.host(), pass.d_k_weight.host()};
  Gradients want;
  want.d_qkv.assign(d_y.begin(), d_y.end());
  want.d_qkv_bound.assign(d_y.size(), 0.0);
  for (int i = 0; i < 2; ++i) {
    want.d_weight[i].assign(before[i].begin(), before[i].end());
    want.d_weight_bound[i].assign(before[i].size(), 0.0);
    for (size_t c = 0; c < before[i].size(); ++c) want.d_weight_bound[i][c] = 0x1p-24 * std::abs(before[i][c]);
  }
  const std::vector<Group> groups = groups_of(pass.kind, s);
  // Of a weight: a sum of as many terms, in any order.
  const double weight_error = static_cast<double>(s.T * static_cast<int64_t>(groups.size()) + 8) * 0x1p-24;
  for (int64_t t = 0; t < s.T; ++t) {
    for (size_t g = 0; g < groups.size(); ++g) {
      const auto [first_col, width, is_key] = groups[g];
      const int64_t begin = t * s.width() + first_col;
      const double r = rstd[t * groups.size() + g];
      double mean = 0, mean_magnitude = 0;
      for (int64_t c = 0; c < width; ++c) {
        const double term = double{d_y[begin + c]} * weights[is_key][c] * x[begin + c] * r;
        mean += term / static_cast<double>(width);
        mean_magnitude += std::abs(term) / static_cast<double>(width);
      }
      for (int64_t c = 0; c < width; ++c) {
        const double xhat = x[begin + c] * r, gradient = double{d_y[begin + c]} * weights[is_key][c];
        want.d_qkv[begin + c] = r * (gradient - xhat * mean);
        want.d_qkv_bound[begin + c] = kSumError * r * (std::abs(gradient) + std::abs(xhat) * mean_magnitude);
        want.d_weight[is_key][c] += d_y[begin + c] * xhat;
        want.d_weight_bound[is_key][c] += weight_error * std::abs(d_y[begin + c] * xhat);
      }
    }
  }
  return want;
}

int outside(const std::vector<float>& got, const std::vector<double>& want, const std::vector<double>& bound,
            double rounding) {
  int wrong = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    wrong += !(std::abs(got[i] - want[i]) <= bound[i] + rounding * std::abs(want[i]));
  }
  return wrong;
}

TEST_CASE("qk_norm_backward gives the gradients of the definition in float64", "[kernels][qk_norm]") {
  const Shape s = GENERATE(from_range(kShapes));
  const QkNormKind kind = GENERATE(from_range(std::begin(kKinds), std::end(kKinds)));
  const auto [dtype, weight_dtype] = GENERATE(
      table<DType, DType>({{DType::kF32, DType::kF32}, {DType::kBF16, DType::kBF16}, {DType::kBF16, DType::kF32}}));
  CAPTURE(s, int(kind), name_of(dtype), name_of(weight_dtype));
  for (Device* device : devices()) {
    CAPTURE(device->name());
    const Pass pass(*device, kind, s, dtype, weight_dtype, 1e-3f),
        same(*device, kind, s, dtype, weight_dtype, 1e-3f);
    const Pass no_amax(*device, kind, s, dtype, weight_dtype, 1e-3f);
    const Gradients want = gradients_of(pass, pass.x.host());
    const std::vector<float> before = pass.d_qkv.host();
    qk_norm_backward(*device, pass.backward());
    const std::vector<float> got = pass.d_qkv.host();
    CHECK(outside(got, want.d_qkv, want.d_qkv_bound, 1.01 * unit_roundoff(dtype)) == 0);
    CHECK(outside(pass.d_q_weight.host(), want.d_weight[0], want.d_weight_bound[0], 0x1p-24) == 0);
    CHECK(outside(pass.d_k_weight.host(), want.d_weight[1], want.d_weight_bound[1], 0x1p-24) == 0);
    int changed_values = 0;
    float largest = 0;
    for (int64_t i = 0; i < s.numel(); ++i) {
      changed_values += i % s.width() >= s.normalized() && got[i] != before[i];
      largest = std::max(largest, std::abs(got[i]));
    }
    CHECK(changed_values == 0);
    CHECK(pass.amax.host()[0] == largest);
    CHECK(pass.guards_intact());

    // Once more: the same bits. Without the maximum: the same d_qkv; sums over rows may have another order.
    qk_norm_backward(*device, same.backward());
    CHECK((same.d_qkv.bytes() == pass.d_qkv.bytes() && same.d_q_weight.bytes() == pass.d_q_weight.bytes() &&
           same.d_k_weight.bytes() == pass.d_k_weight.bytes() && same.amax.bytes() == pass.amax.bytes()));
    QkNormBackward op = no_amax.backward();
    op.d_qkv_amax = {};
    qk_norm_backward(*device, op);
    CHECK(no_amax.d_qkv.bytes() == pass.d_qkv.bytes());
    CHECK(outside(no_amax.d_q_weight.host(), want.d_weight[0], want.d_weight_bound[0], 0x1p-24) == 0);
    CHECK(outside(no_amax.d_k_weight.host(), want.d_weight[1], want.d_weight_bound[1], 0x1p-24) == 0);
    CHECK((no_amax.guards_intact() && std::isnan(no_amax.amax.host()[0])));
  }
}

TEST_CASE("qk_norm_backward reads what forward saved", "[kernels][qk_norm]") {
  const Shape s = GENERATE(from_range(kShapes));
  const QkNormKind kind = GENERATE(from_range(std::begin(kKinds), std::end(kKinds)));
  const SavedFormat format = GENERATE(from_range(kSavedFormats));
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  CAPTURE(s, int(kind), name_of(dtype), name_of(format.codes), format.group, name_of(format.scale));
  for (Device* device : devices()) {
    if (!has_scaling(*device, Scaling::kGroup, format.group)) continue;
    CAPTURE(device->name());
    const Pass pass(*device, kind, s, dtype, dtype, 1e-3f);
    const TestMatrix saved(*device, format.codes, s.T, s.width(), Scaling::kGroup, format.group, format.scale);
    quantize(*device, {.x = pass.x, .out = saved, .out_t = {}});
    const Gradients want = gradients_of(pass, saved.host());
    QkNormBackward op = pass.backward();
    op.x = saved;
    qk_norm_backward(*device, op);
    CHECK(outside(pass.d_qkv.host(), want.d_qkv, want.d_qkv_bound, 1.01 * unit_roundoff(dtype)) == 0);
    CHECK(outside(pass.d_q_weight.host(), want.d_weight[0], want.d_weight_bound[0], 0x1p-24) == 0);
    CHECK(outside(pass.d_k_weight.host(), want.d_weight[1], want.d_weight_bound[1], 0x1p-24) == 0);
    CHECK((pass.guards_intact() && saved.guard_intact()));
  }
}

TEST_CASE("qk_norm_backward is the derivative of the norm", "[kernels][qk_norm]") {
  const Shape s = GENERATE(Shape{2, 2, 1, 6}, Shape{1, 3, 3, 8});
  const QkNormKind kind = GENERATE(from_range(std::begin(kKinds), std::end(kKinds)));
  const float eps = GENERATE(1e-3f, 0.5f);
  CAPTURE(s, int(kind), eps);
  for (Device* device : devices()) {
    const Pass pass(*device, kind, s, DType::kF32, DType::kF32, eps);
    const std::vector<float> x = pass.x.host(), d_y = pass.d_qkv.host();
    const std::vector<float> weights[2] = {pass.q_weight.host(), pass.k_weight.host()};
    qk_norm_backward(*device, pass.backward());
    const std::vector<float> got = pass.d_qkv.host();
    int wrong = 0;
    for (int64_t t = 0; t < s.T; ++t) {
      for (const auto& [first_col, width, is_key] : groups_of(kind, s)) {
        const int64_t begin = t * s.width() + first_col;
        const auto loss = [&](int64_t changed, double by) {
          double sum = 0, squares = 0;
          const auto value = [&](int64_t c) { return double{x[begin + c]} + (c == changed ? by : 0.0); };
          for (int64_t c = 0; c < width; ++c) squares += value(c) * value(c);
          const double rstd = 1 / std::sqrt(squares / static_cast<double>(width) + eps);
          for (int64_t c = 0; c < width; ++c) sum += d_y[begin + c] * value(c) * rstd * weights[is_key][c];
          return sum;
        };
        constexpr double kStep = 1e-5;
        for (int64_t c = 0; c < width; ++c) {
          const double want = (loss(c, kStep) - loss(c, -kStep)) / (2 * kStep);
          wrong += !(std::abs(got[begin + c] - want) <= 1e-5 * (1 + std::abs(want)));
        }
      }
    }
    CHECK(wrong == 0);
  }
}

TEST_CASE("qk_norm_backward adds to gradients in bf16", "[kernels][qk_norm]") {
  const QkNormKind kind = GENERATE(from_range(std::begin(kKinds), std::end(kKinds)));
  const Shape s{40, 4, 2, 32};
  for (Device* device : devices()) {
    const Pass pass(*device, kind, s, DType::kBF16, DType::kBF16, 1e-6f);
    const Gradients want = gradients_of(pass, pass.x.host());
    const TestTensor d_q(*device, DType::kBF16, {weight_cols(kind, s.H, s.D)}, pass.d_q_weight.host());
    const TestTensor d_k(*device, DType::kBF16, {weight_cols(kind, s.Hkv, s.D)}, pass.d_k_weight.host());
    QkNormBackward op = pass.backward();
    op.d_q_weight = d_q;
    op.d_k_weight = d_k;
    qk_norm_backward(*device, op);
    CHECK(outside(d_q.host(), want.d_weight[0], want.d_weight_bound[0], 1.01 * 0x1p-8) == 0);
    CHECK(outside(d_k.host(), want.d_weight[1], want.d_weight_bound[1], 1.01 * 0x1p-8) == 0);
    CHECK((d_q.guard_intact() && d_k.guard_intact()));
  }
}

TEST_CASE("qk_norm_backward of weights that are not trained leaves their gradients alone", "[kernels][qk_norm]") {
  const QkNormKind kind = GENERATE(from_range(std::begin(kKinds), std::end(kKinds)));
  const Shape s{70, 8, 2, 64};
  for (Device* device : devices()) {
    for (const bool trains_q : {false, true}) {
      for (const bool trains_k : {false, true}) {
        CAPTURE(trains_q, trains_k);
        const Pass whole(*device, kind, s, DType::kBF16, DType::kBF16, 1e-6f);
        const Pass part(*device, kind, s, DType::kBF16, DType::kBF16, 1e-6f);
        const auto d_q = part.d_q_weight.bytes(), d_k = part.d_k_weight.bytes();
        qk_norm_backward(*device, whole.backward());
        QkNormBackward op = part.backward();
        if (!trains_q) op.d_q_weight = {};
        if (!trains_k) op.d_k_weight = {};
        qk_norm_backward(*device, op);
        CHECK((part.d_qkv.bytes() == whole.d_qkv.bytes()));
        CHECK((part.d_q_weight.bytes() == (trains_q ? whole.d_q_weight.bytes() : d_q)));
        CHECK((part.d_k_weight.bytes() == (trains_k ? whole.d_k_weight.bytes() : d_k)));
      }
    }
  }
}

TEST_CASE("qk_norm keeps a NaN to its group", "[kernels][qk_norm]") {
  const QkNormKind kind = GENERATE(from_range(std::begin(kKinds), std::end(kKinds)));
  const Shape s{4, 3, 1, 64};
  for (Device* device : devices()) {
    const Pass clean(*device, kind, s, DType::kF32, DType::kF32, 1e-6f);
    const Pass bad(*device, kind, s, DType::kF32, DType::kF32, 1e-6f);
    std::vector<float> x = clean.x.host();
    const int64_t at = 2 * s.width() + s.D + 5;  // the second query head of the third row
    x[at] = std::nanf("");
    upload(*device, bad.x.view(), x);
    for (const Pass* pass : {&clean, &bad}) {
      qk_norm_rope_forward(*device, pass->forward());
      qk_norm_backward(*device, pass->backward());
    }
    const int64_t begin = 2 * s.width() + (kind == QkNormKind::kFull ? 0 : s.D);
    const int64_t end = begin + (kind == QkNormKind::kFull ? s.H * s.D : s.D);
    int wrong = 0;
    for (const auto& [got, want] :
         {std::pair{bad.out.host(), clean.out.host()}, {bad.d_qkv.host(), clean.d_qkv.host()}}) {
      for (int64_t i = 0; i < s.numel(); ++i) {
        wrong += i >= begin && i < end ? !std::isnan(got[i]) : got[i] != want[i];
      }
    }
    CHECK(wrong == 0);
    CHECK(std::isfinite(bad.amax.host()[0]));
  }
}

TEST_CASE("qk_norm gives the same bits on any number of threads", "[kernels][qk_norm]") {
  const QkNormKind kind = GENERATE(from_range(std::begin(kKinds), std::end(kKinds)));
  CHECK(same_on_one_thread([&] {
    const Pass pass(cpu_device(), kind, {201, 4, 2, 8}, DType::kBF16, DType::kBF16, 1e-6f);
    qk_norm_rope_forward(cpu_device(), pass.forward());
    qk_norm_backward(cpu_device(), pass.backward());
    std::vector<std::byte> all = pass.out.bytes();
    for (const TestTensor* t : {&pass.d_qkv, &pass.d_q_weight, &pass.d_k_weight}) {
      const std::vector<std::byte> more = t->bytes();
      all.insert(all.end(), more.begin(), more.end());
    }
    return all;
  }));
}

TEST_CASE("qk_norm accepts no rows and refuses wrong arguments", "[kernels][qk_norm]") {
  Device& device = cpu_device();
  const Pass none(device, QkNormKind::kPerHead, {0, 2, 1, 4}, DType::kF32, DType::kF32, 1e-6f);
  qk_norm_rope_forward(device, none.forward());
  qk_norm_backward(device, none.backward());
  CHECK(none.guards_intact());

  const Pass pass(device, QkNormKind::kPerHead, {3, 2, 1, 4}, DType::kF32, DType::kF32, 1e-6f);
  const auto forward_error = [&](auto change) {
    QkNormRopeForward op = pass.forward();
    change(op);
    return internal_error([&] { qk_norm_rope_forward(device, op); });
  };
  const auto backward_error = [&](auto change) {
    QkNormBackward op = pass.backward();
    change(op);
    return internal_error([&] { qk_norm_backward(device, op); });
  };
  CHECK(contains(forward_error([](auto& op) { op.kind = QkNormKind::kNone; }), "kind is none"));
  CHECK(contains(forward_error([](auto& op) { op.num_heads = 0; }), "qk_norm_rope_forward: 0 query heads"));
  CHECK(contains(forward_error([](auto& op) { op.num_heads = op.num_kv_heads = 3; }), "qk_norm_rope_forward: x"));
  CHECK(contains(forward_error([](auto& op) { op.kind = QkNormKind::kFull; }), "qk_norm_rope_forward: rstd"));
  CHECK(contains(forward_error([](auto& op) { op.q_weight = op.rstd; }), "qk_norm_rope_forward: q_weight"));
  CHECK(contains(forward_error([](auto& op) { op.k_weight = {}; }), "qk_norm_rope_forward: k_weight"));
  CHECK(contains(forward_error([](auto& op) { op.out = op.out.rows(0, 2); }), "qk_norm_rope_forward: out"));
  CHECK(contains(forward_error([](auto& op) { op.cos_sin = {}; }), "qk_norm_rope_forward: cos_sin"));
  CHECK(contains(forward_error([](auto& op) { op.saved = op.out; }), "wanted x plain and saved in fp8"));
  CHECK(contains(backward_error([](auto& op) { op.rstd = {}; }), "qk_norm_backward: rstd"));
  CHECK(contains(backward_error([](auto& op) { op.d_qkv = op.d_qkv.rows(0, 1); }), "qk_norm_backward: d_qkv"));
  CHECK(contains(backward_error([](auto& op) { op.d_q_weight = op.rstd; }), "qk_norm_backward: d_q_weight"));
  CHECK(contains(backward_error([](auto& op) { op.d_k_weight = op.rstd; }), "qk_norm_backward: d_k_weight"));
  CHECK(contains(backward_error([](auto& op) { op.d_qkv_amax = op.q_weight; }), "qk_norm_backward: d_qkv_amax"));
}

}  // namespace
