#include <cmath>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "kernels/ops/attention/rope.h"
#include "kernels/ops/quantize/quantize.h"
#include "tests/kernels/op_bounds.h"
#include "tests/support/catch.h"

using namespace parka;
using namespace parka::test;

namespace {

struct Shape {
  int64_t T, S, H, Hkv, D;
  int64_t width() const { return (H + 2 * Hkv) * D; }
  int64_t rotated() const { return (H + Hkv) * D; }  // columns of queries and keys
};

std::ostream& operator<<(std::ostream& out, const Shape& s) {
  return out << "T " << s.T << " S " << s.S << " H " << s.H << " Hkv " << s.Hkv << " D " << s.D;
}

const std::vector<Shape> kShapes = {{1, 1, 1, 1, 2},  {3, 1, 2, 2, 4},    {6, 3, 4, 4, 8},
                                    {21, 7, 4, 2, 6}, {26, 13, 5, 1, 34}, {34, 17, 3, 3, 64}};

// Where element c of a row is rotated: its partner in the pair, and the sign its sine gets.
struct Pair {
  int64_t partner, angle;
  double sine_sign;
};
Pair pair_of(int64_t c, int64_t D) {
  const int64_t i = c % D, half = D / 2;
  return i < half ? Pair{c + half, i, -1.0} : Pair{c - half, i - half, 1.0};
}

TEST_CASE("rope_table holds cosines and sines of the exact angles, rounded once", "[kernels][rope]") {
  const auto [S, D, theta] = GENERATE(table<int, int, double>({{1, 2, 1e4}, {3, 6, 1e4}, {513, 128, 5e5}}));
  CAPTURE(S, D, theta);
  const std::vector<float> cos_sin = rope_table(S, D, theta);
  REQUIRE(cos_sin.size() == static_cast<size_t>(S * D));
  int wrong = 0;
  for (int s = 0; s < S; ++s) {
    for (int i = 0; i < D / 2; ++i) {
      const long double angle = s * std::exp(-2.0L * i / D * std::log(static_cast<long double>(theta)));
      const long double want_cos = std::cos(angle), want_sin = std::sin(angle);
      const float got_cos = cos_sin[s * D + i], got_sin = cos_sin[s * D + D / 2 + i];
      // 1e-12: the angle in double, at most 512 radians.
      wrong += !(std::abs(got_cos - want_cos) <= 0x1p-24 * std::abs(want_cos) + 1e-12);
      wrong += !(std::abs(got_sin - want_sin) <= 0x1p-24 * std::abs(want_sin) + 1e-12);
    }
  }
  CHECK(wrong == 0);
}

TEST_CASE("rope_table stretches low frequencies as Llama 3.1 does", "[kernels][rope]") {
  const auto [S, D, theta, length] =
      GENERATE(table<int, int, double, int>({{40, 12, 1e4, 64}, {300, 128, 5e5, 8192}, {64, 64, 5e5, 100}}));
  CAPTURE(S, D, theta, length);
  const RopeScaling scaling = {RopeScalingKind::kLlama3, 8.0, 1.5, 4.0, length};
  const std::vector<float> cos_sin = rope_table(S, D, theta, scaling);
  int wrong = 0, same = 0, divided = 0, between = 0;
  for (int i = 0; i < D / 2; ++i) {
    // By the cases of the definition.
    const long double pi = std::acos(-1.0L), plain = std::pow(static_cast<long double>(theta), -2.0L * i / D);
    const long double wavelength = 2 * pi / plain;
    long double frequency = plain;
    if (wavelength > length / 1.5L) {
      frequency = plain / 8.0L;
      ++divided;
    } else if (wavelength >= length / 4.0L) {
      const long double smooth = (length / wavelength - 1.5L) / (4.0L - 1.5L);
      frequency = (1 - smooth) * plain / 8.0L + smooth * plain;
      ++between;
    } else {
      ++same;
    }
    for (int s = 0; s < S; ++s) {
      const float got_cos = cos_sin[s * D + i], got_sin = cos_sin[s * D + D / 2 + i];
      wrong += !(std::abs(got_cos - std::cos(s * frequency)) <= 0x1p-24 + 1e-12);
      wrong += !(std::abs(got_sin - std::sin(s * frequency)) <= 0x1p-24 + 1e-12);
    }
  }
  CHECK(wrong == 0);
  CHECK(same > 0);
  CHECK(divided > 0);
  CHECK(between > 0);
}

TEST_CASE("rope_table divides all frequencies where scaling is linear", "[kernels][rope]") {
  RopeScaling scaling = {.kind = RopeScalingKind::kLinear, .factor = 8.0};
  const std::vector<float> scaled = rope_table(80, 12, 1e4, scaling), plain = rope_table(10, 12, 1e4);
  int wrong = 0;
  for (int s = 0; s < 10; ++s) {
    for (int i = 0; i < 12; ++i) wrong += !(std::abs(scaled[8 * s * 12 + i] - plain[s * 12 + i]) <= 0x1p-23);
  }
  CHECK(wrong == 0);
}

// Of some pairs the frequencies and of all the factor that transformers 5.23 has.
TEST_CASE("rope_table scales frequencies and sizes as transformers' YaRN", "[kernels][rope]") {
  struct Case {
    int D;
    double theta;
    RopeScaling scaling;
    double amplitude;
    std::vector<std::pair<int, double>> frequencies;
  };
  const auto yarn = [](double factor, int64_t length) {
    return RopeScaling{.kind = RopeScalingKind::kYarn, .factor = factor, .original_length = length};
  };
  const double of_8 = 1.2079441541679836, of_4 = 1.138629436111989;
  std::vector<Case> cases = {
      // OLMo 3; the same in fractions of pairs.
      {128,
       5e5,
       yarn(8, 8192),
       of_8,
       {{0, 1.0},
        {16, 0.03760603070259094},
        {32, 0.00039514785748906434},
        {38, 5.165906986803748e-05},
        {63, 3.068925877869333e-07}}},
      {128, 5e5, yarn(8, 8192), of_8, {{16, 0.03760603070259094}, {32, 0.0003952386323362589}}},
      // Most pairs make less than a turn; none makes one; all make more than 32.
      {64, 1e4, yarn(4, 16), of_4, {{0, 1.0}, {8, 0.02500000037252903}, {31, 3.333803761051968e-05}}},
      {64, 1e4, yarn(4, 4), of_4, {{8, 0.10000000149011612}, {31, 0.0001333521504420787}}},
      {16, 100, yarn(4, 1000000), 1.5, {{2, 0.3162277638912201}, {7, 0.017782794311642647}}},
  };
  cases[1].scaling.truncate = false;
  cases[2].scaling.beta_fast = 1.0;
  cases[4].scaling.attention_factor = 1.5;
  for (const Case& c : cases) {
    const std::vector<float> table = rope_table(2, c.D, c.theta, c.scaling);
    CAPTURE(c.D, c.scaling.original_length, c.scaling.truncate);
    for (int i = 0; i < c.D / 2; ++i) {
      CHECK(std::abs(table[i] - c.amplitude) <= 2e-7);  // position 0
      CHECK(table[c.D / 2 + i] == 0);
      CHECK(std::abs(std::hypot(table[c.D + i], table[c.D + c.D / 2 + i]) - c.amplitude) <= 3e-7);
    }
    for (const auto& [i, want] : c.frequencies) {
      const double got = std::atan2(double{table[c.D + c.D / 2 + i]}, double{table[c.D + i]});
      CHECK(std::abs(got - want) <= 1e-6 * want);
    }
  }
}

TEST_CASE("rope_forward rotates queries and keys and leaves values alone", "[kernels][rope]") {
  const Shape s = GENERATE(from_range(kShapes));
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  CAPTURE(s, name_of(dtype));
  const std::vector<float> x = random_values(dtype, s.T * s.width(), 1), cos_sin = rope_table(s.S, s.D, 100.0);
  for (Device* device : devices()) {
    TestTensor qkv(*device, dtype, {s.T, s.width()}, x), table(*device, DType::kF32, {s.S, s.D}, cos_sin);
    rope_forward(*device, {.qkv = qkv, .cos_sin = table, .num_heads = s.H, .num_kv_heads = s.Hkv, .saved = {}});
    const std::vector<float> y = qkv.host();
    int wrong = 0;
    for (int64_t t = 0; t < s.T; ++t) {
      for (int64_t c = 0; c < s.width(); ++c) {
        const int64_t at = t * s.width() + c;
        if (c >= s.rotated()) {
          wrong += y[at] != x[at];
          continue;
        }
        const Pair pair = pair_of(c, s.D);
        const double cosine = cos_sin[t % s.S * s.D + pair.angle];
        const double sine = pair.sine_sign * cos_sin[t % s.S * s.D + s.D / 2 + pair.angle];
        const double a = x[at] * cosine, b = x[t * s.width() + pair.partner] * sine;
        const double bound =
            2 * 0x1p-24 * (std::abs(a) + std::abs(b)) + 1.01 * unit_roundoff(dtype) * std::abs(a + b);
        wrong += !(std::abs(y[at] - (a + b)) <= bound);
      }
    }
    CHECK(wrong == 0);
    CHECK((qkv.guard_intact() && table.host() == cos_sin));
  }
}

TEST_CASE("rope_forward leaves in qkv what the saved copy decodes to", "[kernels][rope]") {
  const Shape s = GENERATE(from_range(kShapes));
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  const auto [format, group, scale_dtype] = GENERATE(table<DType, int, DType>({{DType::kE4M3, 16, DType::kBF16},
                                                                               {DType::kE5M2, 16, DType::kF32},
                                                                               {DType::kE4M3, 32, DType::kF32},
                                                                               {DType::kE4M3, 5, DType::kBF16}}));
  CAPTURE(s, name_of(dtype), name_of(format), group, name_of(scale_dtype));
  const std::vector<float> x = random_values(dtype, s.T * s.width(), 2);
  for (Device* device : devices()) {
    if (!has_scaling(*device, Scaling::kGroup, group)) continue;
    CAPTURE(device->name());
    TestTensor table(*device, DType::kF32, {s.S, s.D}, rope_table(s.S, s.D, 100.0));
    TestTensor qkv(*device, dtype, {s.T, s.width()}, x), exact(*device, DType::kF32, {s.T, s.width()}, x);
    TestMatrix saved(*device, format, s.T, s.width(), Scaling::kGroup, group, scale_dtype);
    TestMatrix wanted(*device, format, s.T, s.width(), Scaling::kGroup, group, scale_dtype);
    const RopeForward call{qkv, table, s.H, s.Hkv, saved};
    rope_forward(*device, call);
    std::vector<float> decoded = saved.host();
    if (dtype == DType::kBF16) {
      for (float& v : decoded) v = decode_bf16(encode_bf16(v));
    }
    CHECK(qkv.host() == decoded);
    CHECK((qkv.guard_intact() && saved.guard_intact()));

    // Rounded once: the codes are those of the fp32 rotation, whatever qkv's dtype.
    rope_forward(*device, {.qkv = exact, .cos_sin = table, .num_heads = s.H, .num_kv_heads = s.Hkv, .saved = {}});
    quantize(*device, {.x = exact, .out = wanted, .out_t = {}});
    CHECK(saved.data.bytes() == wanted.data.bytes());
    CHECK(saved.scale->bytes() == wanted.scale->bytes());
  }
}

TEST_CASE("rope keeps a NaN to its pair", "[kernels][rope]") {
  const Shape s{6, 3, 2, 2, 4};
  std::vector<float> x = random_normal(s.T * s.width(), 5);
  const auto rotated = [&](Device& device) {
    TestTensor table(device, DType::kF32, {s.S, s.D}, rope_table(s.S, s.D, 100.0));
    TestTensor qkv(device, DType::kF32, {s.T, s.width()}, x);
    rope_forward(device, {.qkv = qkv, .cos_sin = table, .num_heads = s.H, .num_kv_heads = s.Hkv, .saved = {}});
    return qkv.host();
  };
  for (Device* device : devices()) {
    const std::vector<float> clean = rotated(*device);
    const int64_t poisoned = 4 * s.width() + 5;
    const float kept = std::exchange(x[poisoned], std::nanf(""));
    const std::vector<float> y = rotated(*device);
    x[poisoned] = kept;
    int wrong = 0;
    for (int64_t at = 0; at < s.T * s.width(); ++at) {
      const bool hit = at == poisoned || at == poisoned + s.D / 2;
      wrong += hit ? !std::isnan(y[at]) : y[at] != clean[at];
    }
    CHECK(wrong == 0);
  }
}

TEST_CASE("rope gives the same bits on any number of threads", "[kernels][rope]") {
  const Shape s{129, 43, 4, 2, 8};
  Device& device = *devices()[0];
  TestTensor table(device, DType::kF32, {s.S, s.D}, rope_table(s.S, s.D, 1e4));
  CHECK(same_on_one_thread([&] {
    TestTensor qkv(device, DType::kBF16, {s.T, s.width()}, random_bf16(s.T * s.width(), 6));
    TestMatrix saved(device, DType::kE4M3, s.T, s.width(), Scaling::kGroup, 16);
    rope_forward(device, {qkv, table, s.H, s.Hkv, saved});
    return qkv.bytes();
  }));
}

TEST_CASE("rope accepts no rows and refuses wrong arguments", "[kernels][rope]") {
  Device& device = *devices()[0];
  TestTensor table(device, DType::kF32, {3, 4}, rope_table(3, 4, 1e4)), none(device, DType::kF32, {0, 16});
  TestTensor qkv(device, DType::kF32, {6, 16}), codes(device, DType::kI32, {6, 16});
  TestMatrix saved(device, DType::kE4M3, 6, 16, Scaling::kGroup, 16);
  TestMatrix per_tensor(device, DType::kE4M3, 6, 16, Scaling::kTensor);
  const auto forward = [&](const TensorView& x, const TensorView& cos_sin, int64_t heads, const ScaledView& out) {
    return internal_error([&] { rope_forward(device, {x, cos_sin, heads, 1, out}); });
  };
  rope_forward(device, {none, table, 2, 1, {}});
  CHECK(none.guard_intact());
  CHECK(contains(forward(qkv, table, 3, {}), "rope_forward: qkv"));
  CHECK(contains(forward(codes, table, 2, {}), "rope_forward: qkv is int32"));
  CHECK(contains(forward(qkv, qkv.view().rows(0, 0).reshaped({0, 4}), 2, {}), "rope_forward: cos_sin"));
  CHECK(
      contains(forward(qkv, TensorView(table.view().data, DType::kBF16, {3, 4}), 2, {}), "rope_forward: cos_sin"));
  CHECK(contains(forward(qkv, table.view().reshaped({4, 3}), 2, {}), "rope_forward: cos_sin"));
  CHECK(contains(forward(qkv, table, 0, {}), "rope_forward: 0 query heads"));
  CHECK(contains(forward(qkv, table, 2, per_tensor), "rope_forward: saved"));
  CHECK(contains(forward(qkv.view().rows(0, 3), table, 2, saved), "rope_forward: saved"));
}

}  // namespace
