#include "kernels/ops/moe/grouped_gemm.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "kernels/ops/moe/routing.h"
#include "tests/kernels/op_checks.h"
#include "tests/support/catch.h"

using namespace parka;
using namespace parka::test;

namespace {

// Rows sorted by expert, as SortByExpert leaves them.
struct Routing {
  explicit Routing(std::vector<int64_t> counts_) : counts(std::move(counts_)) {
    int64_t slots = 0, begin = 0;
    for (const int64_t count : counts) {
      offsets.push_back(begin);
      begin += ceil_div(count, kExpertRows) * kExpertRows;
      slots += count;
    }
    offsets.push_back(begin);
    rows = expert_rows(slots, experts());
    expert_of.assign(static_cast<size_t>(rows), -1);
    for (int64_t e = 0; e < experts(); ++e) std::fill_n(expert_of.begin() + offsets[e], counts[e], e);
  }
  int64_t experts() const { return static_cast<int64_t>(counts.size()); }

  std::vector<int64_t> counts, offsets, expert_of;  // of a row; -1: none
  int64_t rows;
};

const std::vector<std::vector<int64_t>> kCounts = {
    {0, 1, 15, 16, 17, 127, 128, 129}, {0, 0, 300, 0}, {5}, {0, 0, 0}, {128, 256, 0, 1, 384, 0}};

std::vector<float> as_floats(const std::vector<int64_t>& x) { return {x.begin(), x.end()}; }

struct RoutingOn {
  RoutingOn(Device& device, const Routing& r)
      : offsets(device, DType::kI32, {r.experts() + 1}, as_floats(r.offsets)),
        counts(device, DType::kI32, {r.experts()}, as_floats(r.counts)) {}
  TestTensor offsets, counts;
};

// A matrix of numbers or codes, with as many scales.
struct Operand {
  Operand(Device& device, DType dtype, int64_t rows, int64_t cols, const std::vector<float>& values,
          const std::vector<float>& scales)
      : data(device, dtype, {rows, cols}, values),
        scale(device, DType::kF32, {static_cast<int64_t>(scales.size())}, scales),
        is_coded(dtype == DType::kE4M3 || dtype == DType::kE5M2) {}
  ScaledView view() const { return is_coded ? ScaledView(data, scale, Scaling::kTensor) : ScaledView(data.view()); }

  TestTensor data, scale;
  bool is_coded;
};

std::vector<float> transposed(const std::vector<float>& x, int64_t cols) {
  const int64_t rows = static_cast<int64_t>(x.size()) / cols;
  std::vector<float> t(x.size());
  for (int64_t i = 0; i < rows * cols; ++i) t[i % cols * rows + i / cols] = x[i];
  return t;
}

struct Formats {
  DType a, b;
};
constexpr Formats kFormats[] = {{DType::kF32, DType::kF32},
                                {DType::kBF16, DType::kBF16},
                                {DType::kE4M3, DType::kE4M3},
                                {DType::kE5M2, DType::kE4M3}};

struct Case {
  std::vector<int64_t> counts = {};
  int64_t cols = 1, depth = 1;  // N, K
  Formats formats = {};
  DType out = DType::kF32;
  bool b_transposed = false, accumulate = false, fast = false, whole = false;
};

std::string describe(const Case& c) {
  std::string text = std::string(name_of(c.formats.a)) + " " + std::string(name_of(c.formats.b)) + " to " +
                     std::string(name_of(c.out)) + ", " + std::to_string(c.cols) + " x " + std::to_string(c.depth);
  for (const int64_t count : c.counts) text += " " + std::to_string(count);
  return text + (c.b_transposed ? ", transposed" : "") + (c.accumulate ? ", accumulating" : "");
}

// Numbers that the format holds; with `whole`, of -1, 0 and 1, of which no order of a sum changes any bit.
std::vector<float> values_of(DType dtype, int64_t count, uint64_t seed, bool whole) {
  std::vector<float> x = random_bf16(count, seed);
  for (float& value : x) {
    if (whole) value = std::abs(value) < 0.6f ? 0.0f : std::copysign(1.0f, value);
    if (dtype == DType::kE4M3) value = decode_e4m3(encode_e4m3(value));
    if (dtype == DType::kE5M2) value = decode_e5m2(encode_e5m2(value));
  }
  return x;
}

std::vector<float> scales_of(DType dtype, int64_t count, bool whole) {
  std::vector<float> scales(static_cast<size_t>(count), 1.0f);
  if (dtype == DType::kF32 || dtype == DType::kBF16) return scales;
  for (int64_t i = 0; i < count; ++i) {
    scales[i] = whole ? std::ldexp(1.0f, static_cast<int>(i % 5) - 2) : 0.5f + 0.3f * static_cast<float>(i % 7);
  }
  return scales;
}

// What is wanted of a number of a result: a sum of terms, and the sum of their magnitudes.
struct Sum {
  double sum = 0, magnitude = 0;
  void add(double term) {
    sum += term;
    magnitude += std::abs(term);
  }
};

double rounded(double x, DType dtype) {
  const auto value = static_cast<float>(x);
  return dtype == DType::kBF16 ? decode_bf16(encode_bf16(value)) : value;
}

// Whether `got` is further from `want` than a sum of `terms` in fp32 and one rounding allow; tests/kernels/
// test_gemm.cpp derives the same bounds of tensor cores.
bool is_wrong(float got, const Sum& want, int64_t terms, float before, const Case& c, const Device& device) {
  const double total = want.sum + before;
  if (c.whole) return got != rounded(total, c.out);
  const bool on_gpu = device.kind() == DeviceKind::kCuda,
             coded = c.formats.a != c.formats.b || c.formats.a == DType::kE4M3;
  const double unit = on_gpu && c.formats.a != DType::kF32 ? 0x1p-22 : 0x1p-24;
  const double of_codes = !on_gpu || !coded ? 0.0 : c.fast ? 0x1p-9 : 0x1p-10;
  const double rounding = c.out == DType::kBF16 ? 0x1p-8 : 0x1p-24;
  const double bound = (static_cast<double>(terms + 4) * unit + of_codes) * (want.magnitude + std::abs(total)) +
                       rounding * std::abs(total);
  return !(std::abs(got - total) <= 1.01 * bound);
}

// ---- Rows times matrices ----

struct Forward {
  Forward(Device& device, const Case& c)
      : routing(c.counts),
        on(device, routing),
        a_values(values_of(c.formats.a, routing.rows * c.depth, 1, c.whole)),
        b_values(values_of(c.formats.b, routing.experts() * c.cols * c.depth, 2, c.whole)),
        a(device, c.formats.a, routing.rows, c.depth, poisoned(c), scales_of(c.formats.a, 1, c.whole)),
        b(device, c.formats.b, routing.experts() * (c.b_transposed ? c.depth : c.cols),
          c.b_transposed ? c.cols : c.depth, c.b_transposed ? each_transposed(c) : b_values,
          scales_of(c.formats.b, routing.experts(), c.whole)),
        out(device, c.out, {routing.rows, c.cols}) {
    grouped_gemm(device, {.a = a.view(),
                          .b = b.view(),
                          .b_transposed = c.b_transposed,
                          .offsets = on.offsets,
                          .counts = on.counts,
                          .out = out,
                          .fast_accumulation = c.fast});
  }
  // NaN in rows of no expert, which must not show.
  std::vector<float> poisoned(const Case& c) const {
    std::vector<float> x = a_values;
    for (int64_t r = 0; r < routing.rows; ++r) {
      if (routing.expert_of[r] < 0) std::fill_n(x.begin() + r * c.depth, c.depth, NAN);
    }
    return x;
  }
  std::vector<float> each_transposed(const Case& c) const {
    std::vector<float> all;
    for (int64_t e = 0; e < routing.experts(); ++e) {
      const auto begin = b_values.begin() + e * c.cols * c.depth;
      const std::vector<float> t = transposed({begin, begin + c.cols * c.depth}, c.depth);
      all.insert(all.end(), t.begin(), t.end());
    }
    return all;
  }

  Routing routing;
  RoutingOn on;
  std::vector<float> a_values, b_values;
  Operand a, b;
  TestTensor out;
};

void check_forward(Device& device, const Case& c) {
  const Forward got(device, c), again(device, c);
  const std::vector<float> out = got.out.host(), b_scales = got.b.scale.host();
  const double a_scale = got.a.scale.host()[0];
  int wrong = 0, not_zero = 0;
  for (int64_t i = 0; i < got.routing.rows * c.cols; ++i) {
    const int64_t row = i / c.cols, expert = got.routing.expert_of[row];
    if (expert < 0) {
      not_zero += out[i] != 0;
      continue;
    }
    Sum want;
    const int64_t b_at = (expert * c.cols + i % c.cols) * c.depth;
    for (int64_t k = 0; k < c.depth; ++k) {
      want.add(a_scale * b_scales[expert] * got.a_values[row * c.depth + k] * got.b_values[b_at + k]);
    }
    wrong += is_wrong(out[i], want, c.depth, 0, c, device);
  }
  CAPTURE(describe(c), device.name());
  CHECK(wrong == 0);
  CHECK(not_zero == 0);
  CHECK((again.out.bytes() == got.out.bytes()));
  CHECK((got.out.guard_intact() && got.a.data.guard_intact() && got.b.data.guard_intact()));
}

// ---- Weight gradients ----

struct Gradient {
  Gradient(Device& device, const Case& c)
      : routing(c.counts),
        on(device, routing),
        d_y_values(in_use(values_of(c.formats.a, routing.rows * c.cols, 3, c.whole), c.cols)),
        x_values(in_use(values_of(c.formats.b, routing.rows * c.depth, 4, c.whole), c.depth)),
        before(values_of(DType::kBF16, routing.experts() * c.cols * c.depth, 5, c.whole)),
        d_y(make(device, c.formats.a, d_y_values, c.cols, c.whole)),
        x(make(device, c.formats.b, x_values, c.depth, c.whole)),
        out(device, c.out, {routing.experts() * c.cols, c.depth}, c.accumulate ? before : std::vector<float>()) {
    grouped_weight_gradient(device, {.d_y = d_y->view(),
                                     .x = x->view(),
                                     .offsets = on.offsets,
                                     .counts = on.counts,
                                     .out = out,
                                     .accumulate = c.accumulate});
  }
  // Padding rows are zeros.
  std::vector<float> in_use(std::vector<float> values, int64_t cols) const {
    for (int64_t r = 0; r < routing.rows; ++r) {
      if (routing.expert_of[r] < 0) std::fill_n(values.begin() + r * cols, cols, 0.0f);
    }
    return values;
  }
  std::unique_ptr<Operand> make(Device& device, DType dtype, const std::vector<float>& values, int64_t cols,
                                bool whole) const {
    const bool plain = dtype == DType::kF32 || dtype == DType::kBF16;
    return std::make_unique<Operand>(device, dtype, plain ? routing.rows : cols, plain ? cols : routing.rows,
                                     plain ? values : transposed(values, cols), scales_of(dtype, 1, whole));
  }

  Routing routing;
  RoutingOn on;
  std::vector<float> d_y_values, x_values, before;
  std::unique_ptr<Operand> d_y, x;
  TestTensor out;
};

void check_gradient(Device& device, const Case& c) {
  const Gradient got(device, c), again(device, c);
  const std::vector<float> out = got.out.host();
  const double scale = double{got.d_y->scale.host()[0]} * got.x->scale.host()[0];
  int wrong = 0, wrong_idle = 0;
  for (int64_t e = 0; e < got.routing.experts(); ++e) {
    std::vector<Sum> want(static_cast<size_t>(c.cols * c.depth));
    for (int64_t r = got.routing.offsets[e]; r < got.routing.offsets[e] + got.routing.counts[e]; ++r) {
      for (int64_t i = 0; i < c.cols * c.depth; ++i) {
        want[i].add(scale * got.d_y_values[r * c.cols + i / c.depth] * got.x_values[r * c.depth + i % c.depth]);
      }
    }
    for (int64_t i = 0; i < c.cols * c.depth; ++i) {
      const int64_t at = e * c.cols * c.depth + i;
      const float before = c.accumulate ? got.before[at] : 0.0f;
      wrong += is_wrong(out[at], want[i], got.routing.counts[e], before, c, device);
      if (got.routing.counts[e] == 0) wrong_idle += out[at] != before;
    }
  }
  CAPTURE(describe(c), device.name());
  CHECK(wrong == 0);
  CHECK(wrong_idle == 0);
  CHECK((again.out.bytes() == got.out.bytes()));
  CHECK((got.out.guard_intact() && got.d_y->data.guard_intact() && got.x->data.guard_intact()));
}

bool is_coded(const Formats& formats) { return formats.b == DType::kE4M3; }

}  // namespace

TEST_CASE("grouped_gemm rounds the fp64 sum of each expert's product", "[kernels][moe][slow]") {
  const auto [cols, depth] = GENERATE(table<int64_t, int64_t>({{1, 1}, {33, 37}, {48, 80}, {272, 48}}));
  const DType out = GENERATE(DType::kF32, DType::kBF16);
  for (Device* device : devices()) {
    for (const std::vector<int64_t>& counts : kCounts) {
      for (const Formats& formats : kFormats) {
        Case c{counts, cols, depth, formats, out};
        check_forward(*device, c);
        (is_coded(formats) ? c.fast : c.b_transposed) = true;
        check_forward(*device, c);
      }
    }
  }
}

TEST_CASE("grouped_gemm of whole numbers is exact", "[kernels][moe][slow]") {
  const auto [cols, depth] = GENERATE(table<int64_t, int64_t>({{16, 16}, {128, 384}, {528, 272}}));
  for (Device* device : devices()) {
    for (const Formats& formats : kFormats) {
      Case c{{3, 0, 200, 129}, cols, depth, formats, DType::kBF16};
      c.whole = true;
      check_forward(*device, c);
      c.b_transposed = !is_coded(formats);
      c.out = DType::kF32;
      check_forward(*device, c);
    }
  }
}

TEST_CASE("grouped_weight_gradient rounds the fp64 sum over each expert's rows", "[kernels][moe][slow]") {
  const auto [cols, depth] = GENERATE(table<int64_t, int64_t>({{1, 1}, {33, 37}, {48, 80}, {144, 16}}));
  const DType out = GENERATE(DType::kF32, DType::kBF16);
  const bool accumulate = GENERATE(false, true);
  for (Device* device : devices()) {
    for (const std::vector<int64_t>& counts : kCounts) {
      for (const Formats& formats : kFormats) {
        check_gradient(*device, {counts, cols, depth, formats, out, /*b_transposed=*/false, accumulate});
      }
    }
  }
}

TEST_CASE("grouped_weight_gradient of whole numbers is exact", "[kernels][moe][slow]") {
  const auto [cols, depth] = GENERATE(table<int64_t, int64_t>({{16, 16}, {128, 256}, {144, 272}}));
  const bool accumulate = GENERATE(false, true);
  for (Device* device : devices()) {
    for (const Formats& formats : kFormats) {
      for (const DType out : {DType::kF32, DType::kBF16}) {
        Case c{{3, 0, 200, 129, 640}, cols, depth, formats, out, /*b_transposed=*/false, accumulate};
        c.whole = true;
        check_gradient(*device, c);
      }
    }
  }
}

TEST_CASE("grouped products of the most experts there may be", "[kernels][moe][slow]") {
  std::vector<int64_t> counts(kMostExperts, 0);
  counts[0] = 2, counts[255] = 130, counts[256] = 1, counts.back() = 17;
  for (Device* device : devices()) {
    for (const Formats& formats : kFormats) {
      check_forward(*device, {counts, 16, 32, formats, DType::kBF16});
      check_gradient(*device, {counts, 16, 32, formats, DType::kBF16});
    }
  }
}

// So many that each multiprocessor takes several tiles one after another.
TEST_CASE("grouped products of many tiles on a GPU give the CPU's bits of whole numbers",
          "[kernels][moe][devices]") {
  if (gpu() == nullptr) return;
  std::vector<int64_t> counts;
  for (int64_t e = 0; e < 40; ++e) counts.push_back(e % 7 == 3 ? 0 : e * 37 % 260);
  const auto [cols, depth] = GENERATE(table<int64_t, int64_t>({{1040, 128}, {512, 640}, {144, 1088}}));
  for (const Formats& formats : kFormats) {
    Case c{counts, cols, depth, formats, DType::kBF16};
    c.whole = c.fast = true;
    CAPTURE(describe(c));
    const Forward got(*gpu(), c), want(cpu_device(), c);
    CHECK((got.out.bytes() == want.out.bytes()));
    c.accumulate = true;
    const Gradient gradient(*gpu(), c), want_gradient(cpu_device(), c);
    CHECK((gradient.out.bytes() == want_gradient.out.bytes()));
  }
}

TEST_CASE("grouped products give the same bits on any number of threads", "[kernels][moe]") {
  for (const Formats& formats : kFormats) {
    const Case c{{300, 0, 40}, 140, 70, formats, DType::kF32};
    set_num_threads(3);
    const Forward forward(cpu_device(), c);
    const Gradient gradient(cpu_device(), c);
    set_num_threads(1);
    const Forward serial(cpu_device(), c);
    const Gradient serial_gradient(cpu_device(), c);
    set_num_threads(0);
    CHECK((forward.out.bytes() == serial.out.bytes()));
    CHECK((gradient.out.bytes() == serial_gradient.out.bytes()));
  }
}

TEST_CASE("grouped products refuse what does not fit, by name", "[kernels][moe]") {
  Device& device = cpu_device();
  const RoutingOn on(device, Routing({3, 0}));
  const TestTensor a(device, DType::kF32, {256, 6}), b(device, DType::kF32, {10, 6}),
      out(device, DType::kF32, {256, 5});
  const TestTensor a16(device, DType::kBF16, {256, 6}), few(device, DType::kF32, {130, 6}),
      few_out(device, DType::kF32, {130, 5});
  const TestTensor codes(device, DType::kE4M3, {256, 6}), b_codes(device, DType::kE4M3, {10, 6});
  const TestTensor one(device, DType::kF32, {1}, {1}), two(device, DType::kF32, {2}, {1, 1});
  const TestTensor none(device, DType::kI32, {0}), first(device, DType::kI32, {1});
  const ScaledView a8(codes, one, Scaling::kTensor), b8(b_codes, two, Scaling::kTensor);
  const GroupedGemm good{.a = a, .b = b, .offsets = on.offsets, .counts = on.counts, .out = out};
  const auto refused = [&](const std::function<void(GroupedGemm&)>& change, const std::string& part) {
    GroupedGemm op = good;
    change(op);
    const std::string text = internal_error([&] { grouped_gemm(device, op); });
    CAPTURE(text, part);
    CHECK((contains(text, "grouped_gemm: ") && contains(text, part)));
  };
  CHECK(internal_error([&] { grouped_gemm(device, good); }).empty());
  refused([&](GroupedGemm& op) { op.a = few; }, "a is fp32 [130, 6]");
  refused([&](GroupedGemm& op) { op.a = a16; }, "a is bf16 [256, 6] and b is fp32");
  refused([&](GroupedGemm& op) { op.b = a; }, "b is fp32 [256, 6]");
  refused([&](GroupedGemm& op) { op.b_transposed = true; }, "b is fp32 [10, 6]");
  refused([&](GroupedGemm& op) { op.out = few; }, "130 rows");
  refused([&](GroupedGemm& op) { op.offsets = on.counts; }, "offsets is int32 [2]");
  refused([&](GroupedGemm& op) { op.counts = one; }, "counts is fp32");
  refused([&](GroupedGemm& op) { op.counts = none, op.offsets = first; }, "counts is int32 [0]");
  refused([&](GroupedGemm& op) { op.a = a8; }, "a is e4m3");
  refused([&](GroupedGemm& op) { op.a = a8, op.b = ScaledView(b_codes, one, Scaling::kTensor); }, "scale of b");
  refused([&](GroupedGemm& op) { op.a = ScaledView(codes, two, Scaling::kTensor), op.b = b8; }, "scale of a");
  refused([&](GroupedGemm& op) { op.a = ScaledView(codes, two, Scaling::kGroup, 2), op.b = b8; }, "a is e4m3");
  refused([&](GroupedGemm& op) { op.a = a8, op.b = b8, op.b_transposed = true; }, "b is e4m3");

  const TestTensor d_y(device, DType::kF32, {256, 5}), gradient(device, DType::kF32, {10, 6});
  const GroupedWeightGradient also_good{
      .d_y = d_y, .x = a, .offsets = on.offsets, .counts = on.counts, .out = gradient};
  const auto refused_gradient = [&](const std::function<void(GroupedWeightGradient&)>& change,
                                    const std::string& part) {
    GroupedWeightGradient op = also_good;
    change(op);
    const std::string text = internal_error([&] { grouped_weight_gradient(device, op); });
    CAPTURE(text, part);
    CHECK((contains(text, "grouped_weight_gradient: ") && contains(text, part)));
  };
  CHECK(internal_error([&] { grouped_weight_gradient(device, also_good); }).empty());
  refused_gradient([&](GroupedWeightGradient& op) { op.d_y = a; }, "d_y is fp32 [256, 6]");
  refused_gradient([&](GroupedWeightGradient& op) { op.x = few; }, "130 rows");
  refused_gradient([&](GroupedWeightGradient& op) { op.x = a16; }, "x is bf16");
  refused_gradient([&](GroupedWeightGradient& op) { op.x = a8; }, "x is e4m3");
  refused_gradient([&](GroupedWeightGradient& op) { op.out = b_codes; }, "out is e4m3");
  refused_gradient([&](GroupedWeightGradient& op) { op.out = few; }, "d_y is fp32 [256, 5]");
  refused_gradient([&](GroupedWeightGradient& op) { op.counts = on.offsets; }, "offsets is int32 [3]");
}
