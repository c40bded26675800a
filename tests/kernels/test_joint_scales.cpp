#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "kernels/ops/attention/rope.h"
#include "kernels/ops/attention/rope_projection.h"
#include "kernels/ops/gemm/fused_product.h"
#include "tests/kernels/exact_products.h"
#include "tests/kernels/float8_devices.h"
#include "tests/kernels/joint_scales.h"
#include "tests/kernels/op_bounds.h"
#include "tests/kernels/rope_case.h"

// Joint scales of queries and keys: what rope_forward saves with them against plain loops, the other device and
// the one kernel of rope_projection against that.
using namespace parka;
using namespace parka::test;

namespace {

// ---- Rotation ----

std::string describe(const JointShape& s) {
  return fmt::format("T {} S {} H {} Hkv {} D {}, groups of {}, scales {}", s.T, s.S, s.H, s.Hkv, s.D, s.group,
                     name_of(s.scales));
}

// Random values of which those of each head in each tile of rows have another size.
std::vector<float> values_of_many_sizes(const JointShape& s, DType dtype, uint64_t seed) {
  constexpr int kExponents[] = {0, -9, 4, -20, 11, -2, 30};
  std::vector<float> x = random_values(dtype, s.T * s.width(), seed);
  for (int64_t i = 0; i < s.T * s.width(); ++i) {
    const int64_t tile = i / s.width() / kJointRows, head = i % s.width() / s.D;
    x[i] = std::ldexp(x[i], kExponents[(tile * 5 + head) % 7]);
  }
  return x;
}

bool same_value(float a, float b) { return a == b || (std::isnan(a) && std::isnan(b)); }

// ---- The definition, in plain loops ----

// [tiles, heads of queries and keys]: of the magnitudes before rotation, NaN skipped.
std::vector<float> defined_scales(const JointShape& s, const std::vector<float>& x) {
  std::vector<float> amax(static_cast<size_t>(s.tiles() * s.joint_heads())), scales;
  for (int64_t t = 0; t < s.T; ++t) {
    for (int64_t c = 0; c < s.joint_columns(); ++c) {
      float& largest = amax[t / kJointRows * s.joint_heads() + c / s.D];
      if (std::fabs(x[t * s.width() + c]) > largest) largest = std::fabs(x[t * s.width() + c]);
    }
  }
  for (const float a : amax) {
    scales.push_back(std::isinf(a) ? a : a < 0x1p-34f ? 0x1p-40f : std::ldexp(1.0f, std::ilogb(a) - 6));
  }
  return scales;
}

// Queries and keys rotated in fp32, operation by operation; [T, columns of queries and keys].
std::vector<float> defined_rotation(const JointShape& s, const std::vector<float>& x,
                                    const std::vector<float>& cos_sin) {
  std::vector<float> y;
  const int64_t half = s.D / 2;
  for (int64_t t = 0; t < s.T; ++t) {
    for (int64_t c = 0; c < s.joint_columns(); ++c) {
      const int64_t at = t * s.width() + c, angle = t % s.S * s.D + c % half;
      const float own = x[at] * cos_sin[angle];
      const bool is_low = c % s.D < half;
      const float other = x[is_low ? at + half : at - half] * cos_sin[angle + half];
      y.push_back(is_low ? own - other : own + other);
    }
  }
  return y;
}

// How many scales, codes and elements of qkv are not as defined, of queries and keys.
struct JointErrors {
  int64_t scales = 0, codes = 0, decoded = 0, inexact = 0;
  bool none() const { return scales + codes + decoded + inexact == 0; }
};

JointErrors errors_of(const JointShape& s, const JointRotation& r, const std::vector<float>& x,
                      const std::vector<float>& cos_sin) {
  const std::vector<float> want = defined_scales(s, x), rotated = defined_rotation(s, x, cos_sin);
  const std::vector<float> scales = r.saved.scale->host(), qkv = r.qkv.host();
  const std::vector<std::byte> codes = r.saved.data.bytes();
  JointErrors e;
  for (int64_t t = 0; t < s.T; ++t) {
    for (int64_t c = 0; c < s.joint_columns(); ++c) {
      const int64_t at = t * s.width() + c;
      const float scale = want[t / kJointRows * s.joint_heads() + c / s.D];
      e.scales += scales[(t * s.width() + c) / s.group] != scale;
      const Float8E4M3 code = encode_e4m3(rotated[t * s.joint_columns() + c] / scale);
      e.codes += codes[at] != std::byte{code.bits};
      const float decoded = decode_e4m3(code) * scale;
      e.decoded += !same_value(qkv[at], decoded);
      e.inexact += !same_value(decode_bf16(encode_bf16(decoded)), decoded);
    }
  }
  return e;
}

// Whether value heads are as they are without joint scales: codes, scales and qkv.
bool same_values(const JointShape& s, const JointRotation& r, const JointRotation& without) {
  const std::vector<float> x = r.qkv.host(), y = without.qkv.host(), x_scales = r.saved.scale->host(),
                           y_scales = without.saved.scale->host();
  const std::vector<std::byte> x_codes = r.saved.data.bytes(), y_codes = without.saved.data.bytes();
  bool same = true;
  for (int64_t i = 0; i < s.T * s.width(); ++i) {
    if (i % s.width() < s.joint_columns()) continue;
    same = same && same_value(x[i], y[i]) && x_codes[i] == y_codes[i];
    same = same && same_value(x_scales[i / s.group], y_scales[i / s.group]);
  }
  return same;
}

void check_definition(const JointShape& s, DType dtype, const std::vector<float>& x,
                      const std::vector<float>& cos_sin) {
  CAPTURE(describe(s), name_of(dtype));
  const JointRotation r(cpu_device(), s, dtype, x, cos_sin);
  const JointErrors errors = errors_of(s, r, x, cos_sin);
  CAPTURE(errors.scales, errors.codes, errors.decoded, errors.inexact);
  CHECK(errors.none());
  CHECK(same_values(s, r, JointRotation(cpu_device(), s, dtype, x, cos_sin, false)));
  CHECK((r.guards_intact() && r.table.host() == cos_sin));
}

TEST_CASE("a joint scale is the power of 2 that makes the largest magnitude 64 to 128", "[kernels][rope]") {
  int wrong = 0;
  for (uint64_t i = 0; i < 20000; ++i) {
    const double power = -34 + 161 * uniform_open(philox4x32(5, 1, i)[0]);  // up to 2^127
    const auto amax = static_cast<float>(std::max(0x1p-34, std::exp2(power)));
    const float scale = joint_scale(amax);
    int exponent;
    wrong += std::frexp(scale, &exponent) != 0.5f;
    wrong += !(amax / scale >= 64 && amax / scale < 128);
    wrong +=
        inverse_of_joint_scale(scale) * scale != 1 || std::frexp(inverse_of_joint_scale(scale), &exponent) != 0.5f;
  }
  CHECK(wrong == 0);
  // A power of 2 is 64 times its scale, what lies just below it almost 128 times.
  for (int power = -33; power <= 127; ++power) {
    const float amax = std::ldexp(1.0f, power);
    wrong += joint_scale(amax) != std::ldexp(1.0f, power - 6);
    wrong += joint_scale(std::nextafter(amax, 0.0f)) != std::ldexp(1.0f, power - 7);
  }
  CHECK(wrong == 0);
  CHECK(joint_scale(std::numeric_limits<float>::max()) == 0x1p121f);
}

TEST_CASE("a joint scale is at least 2^-40, and infinity of infinity", "[kernels][rope]") {
  const std::vector<float> tiny = {0.0f,     std::numeric_limits<float>::denorm_min(), 0x1p-126f, 0x1p-100f,
                                   0x1p-40f, std::nextafter(0x1p-34f, 0.0f),           0x1p-34f};
  for (const float amax : tiny) CHECK(joint_scale(amax) == 0x1p-40f);
  CHECK(joint_scale(0x1p-33f) == 0x1p-39f);
  CHECK(joint_scale(INFINITY) == INFINITY);
  CHECK(inverse_of_joint_scale(joint_scale(INFINITY)) == 0);
}

TEST_CASE("rope_forward with joint scales saves what its definition says", "[kernels][rope]") {
  // Fewer rows than a tile has, whole tiles, a last one that is short; sequences that end within tiles.
  const JointShape s = GENERATE(JointShape{1, 1, 1, 1, 32, 32}, JointShape{37, 13, 4, 2, 64, 16},
                                JointShape{64, 64, 2, 2, 32, 16}, JointShape{65, 65, 3, 1, 64, 32, DType::kF32},
                                JointShape{128, 50, 2, 1, 128, 32}, JointShape{130, 65, 5, 1, 32, 32, DType::kF32},
                                JointShape{200, 100, 4, 2, 128, 16}, JointShape{333, 111, 3, 3, 64, 64},
                                JointShape{150, 150, 2, 1, 128, 128}, JointShape{70, 35, 6, 2, 48, 16});
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  check_definition(s, dtype, values_of_many_sizes(s, dtype, 41), rope_table(s.S, s.D, 1e4));
}

TEST_CASE("rope_forward with joint scales saves zeros and tiny values with a scale of 2^-40", "[kernels][rope]") {
  const JointShape s{130, 65, 2, 1, 64, 16};
  std::vector<float> x = random_bf16(s.T * s.width(), 42);
  for (int64_t t = 0; t < s.T; ++t) {
    for (int64_t d = 0; d < s.D; ++d) {
      if (t < 64) x[s.at(t, 0, d)] = d % 2 == 0 ? -0.0f : 0.0f;
      if (t >= 64) x[s.at(t, 1, d)] = std::ldexp(x[s.at(t, 1, d)], d % 2 == 0 ? -60 : -42);
    }
  }
  const std::vector<float> cos_sin = rope_table(s.S, s.D, 1e4);
  check_definition(s, DType::kBF16, x, cos_sin);
  const JointRotation r(cpu_device(), s, DType::kBF16, x, cos_sin);
  const std::vector<float> scales = r.saved.scale->host();
  const auto scale_of = [&](int64_t t, int64_t head) { return scales[s.at(t, head, 0) / s.group]; };
  CHECK((scale_of(0, 0) == 0x1p-40f && scale_of(63, 0) == 0x1p-40f && scale_of(64, 0) > 0x1p-10f));
  CHECK((scale_of(63, 1) > 0x1p-10f && scale_of(64, 1) == 0x1p-40f && scale_of(129, 1) == 0x1p-40f));
  const std::vector<float> zeros(static_cast<size_t>(s.T * s.width()));
  check_definition(s, DType::kBF16, zeros, cos_sin);
  CHECK(JointRotation(cpu_device(), s, DType::kBF16, zeros, cos_sin).qkv.host() == zeros);
}

TEST_CASE("rope_forward with joint scales keeps a NaN to its pair", "[kernels][rope]") {
  const JointShape s{130, 130, 2, 1, 64, 32};
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  const std::vector<float> x = random_bf16(s.T * s.width(), 43), cos_sin = rope_table(s.S, s.D, 1e4);
  std::vector<float> poisoned = x;
  for (const int64_t head : {0, 2}) poisoned[s.at(70, head, 40)] = head == 0 ? NAN : -NAN;
  check_definition(s, dtype, poisoned, cos_sin);
  const JointRotation clean(cpu_device(), s, dtype, x, cos_sin), r(cpu_device(), s, dtype, poisoned, cos_sin);
  const std::vector<std::byte> codes = r.saved.data.bytes(), clean_codes = clean.saved.data.bytes();
  const std::vector<float> qkv = r.qkv.host();
  int64_t wrong = 0;
  for (int64_t i = 0; i < s.T * s.width(); ++i) {
    const int64_t head = i % s.width() / s.D;
    const bool hit = i / s.width() == 70 && head % 2 == 0 && i % 32 == 8;
    wrong += hit ? codes[i] != std::byte{0x7f} : codes[i] != clean_codes[i];
    wrong += hit != std::isnan(qkv[i]);
  }
  CHECK(wrong == 0);
}

TEST_CASE("an infinite value makes its head NaN in its 64 rows under joint scales", "[kernels][rope]") {
  const JointShape s{200, 100, 2, 1, 64, 32};
  const float bad = GENERATE(INFINITY, -INFINITY);
  const std::vector<float> x = random_bf16(s.T * s.width(), 44), cos_sin = rope_table(s.S, s.D, 1e4);
  std::vector<float> poisoned = x;
  poisoned[s.at(127, 1, 3)] = bad;
  check_definition(s, DType::kBF16, poisoned, cos_sin);
  const JointRotation clean(cpu_device(), s, DType::kBF16, x, cos_sin),
      r(cpu_device(), s, DType::kBF16, poisoned, cos_sin);
  const std::vector<float> qkv = r.qkv.host(), want = clean.qkv.host(), scales = r.saved.scale->host();
  int64_t wrong = 0;
  for (int64_t i = 0; i < s.T * s.width(); ++i) {
    const bool hit = i / s.width() / kJointRows == 1 && i % s.width() / s.D == 1;
    wrong += hit ? !std::isnan(qkv[i]) || scales[i / s.group] != INFINITY : qkv[i] != want[i];
  }
  CHECK(wrong == 0);
}

TEST_CASE("E4M3 with joint scales has room for what a rotation and YaRN's factor add", "[kernels][rope]") {
  // Both elements of many pairs are almost 128 times the scale, and their angle is 45 degrees: 128 * sqrt 2 *
  // 1.5.
  const JointShape s{70, 35, 2, 1, 64, 32};
  std::vector<float> cos_sin = rope_table(s.S, s.D, 1e4), x = random_bf16(s.T * s.width(), 45, 0.2f);
  for (int64_t i = 0; i < s.D; ++i) cos_sin[5 * s.D + i] = std::sqrt(0.5f);
  for (float& v : cos_sin) v *= 1.5f;
  for (int64_t t = 0; t < s.T; ++t) {
    for (int64_t d = 0; d < s.D; ++d) {
      if (t % s.S == 5) x[s.at(t, 1, d)] = 1.9921875f;  // 255 / 128
    }
  }
  check_definition(s, DType::kBF16, x, cos_sin);
  const JointRotation r(cpu_device(), s, DType::kBF16, x, cos_sin);
  const std::vector<float> rotated = defined_rotation(s, x, cos_sin), codes = r.saved.data.host(),
                           qkv = r.qkv.host(), scales = defined_scales(s, x);
  float largest = 0;
  int64_t wrong = 0;
  for (int64_t t = 0; t < s.T; ++t) {
    for (int64_t c = 0; c < s.joint_columns(); ++c) {
      const float want = rotated[t * s.joint_columns() + c], got = qkv[t * s.width() + c];
      largest = std::max(largest, std::fabs(codes[t * s.width() + c]));
      // Half a place of E4M3: 2^-4 of a value, and of subnormal codes, which are multiples of 2^-9, 2^-10.
      const float scale = scales[t / kJointRows * s.joint_heads() + c / s.D];
      wrong += !(std::fabs(got - want) <= 0x1p-4f * std::fabs(want) + 0x1p-10f * scale);
    }
  }
  CHECK(wrong == 0);
  CHECK((largest >= 256 && largest < 448));
}

TEST_CASE("rope_forward with joint scales gives the same bits on any number of threads", "[kernels][rope]") {
  const JointShape s{333, 111, 4, 2, 64, 16};
  CHECK(same_on_one_thread([&] {
    const JointRotation r(cpu_device(), s, DType::kBF16, values_of_many_sizes(s, DType::kBF16, 46),
                          rope_table(s.S, s.D, 1e4));
    std::vector<std::byte> bytes = r.saved.data.bytes();
    for (const TestTensor* t : {&r.qkv, static_cast<const TestTensor*>(r.saved.scale.get())}) {
      const std::vector<std::byte> more = t->bytes();
      bytes.insert(bytes.end(), more.begin(), more.end());
    }
    return bytes;
  }));
}

TEST_CASE("rope_forward takes no rows with joint scales and refuses what cannot have them", "[kernels][rope]") {
  constexpr int64_t kRows = 6, kD = 48;
  for (Device* device : devices()) {
    const TestTensor qkv(*device, DType::kBF16, {kRows, 4 * kD}), table(*device, DType::kF32, {kRows, kD});
    const auto forward = [&](const ScaledView& saved) {
      return internal_error([&] {
        rope_forward(*device, {.qkv = qkv,
                               .cos_sin = table,
                               .num_heads = 2,
                               .num_kv_heads = 1,
                               .saved = saved,
                               .joint_scales = true});
      });
    };
    const auto make = [&](DType format, int64_t group) {
      return TestMatrix(*device, format, kRows, 4 * kD, Scaling::kGroup, group, DType::kBF16);
    };
    CHECK(contains(forward({}), "rope_forward: saved"));
    CHECK(contains(forward(make(DType::kE5M2, 16)), "rope_forward: saved"));
    CHECK(contains(forward(make(DType::kE4M3, 32)), "rope_forward: saved"));
    CHECK(contains(forward(make(DType::kE4M3, 64)), "rope_forward: saved"));
    CHECK(forward(make(DType::kE4M3, 16)) == "");
    const JointRotation none(*device, {0, kRows, 2, 1, kD, 16}, DType::kBF16, {},
                             std::vector<float>(static_cast<size_t>(kRows * kD)));
    CHECK(none.guards_intact());
  }
}

// ---- Other devices ----

// NaNs, an infinity, or a tile of zeros in some heads; 0 changes nothing.
void spoil(const JointShape& s, int kind, std::vector<float>& x) {
  for (int64_t i = 0; i < s.T * s.width(); ++i) {
    if (kind == 1 && i % 391 == 17) x[i] = i % 2 == 0 ? NAN : -NAN;
    if (kind == 2 && i % s.width() / s.D % 2 == 0 && i / s.width() / kJointRows % 2 == 0) x[i] = 0;
  }
  if (kind == 3) x[s.at(s.T / 2, s.H, s.D - 1)] = -INFINITY;  // in the first head of keys
}

TEST_CASE("joint scales are one more reading of queries and keys", "[kernels][rope]") {
  Device& device = cpu_device();
  const TestTensor qkv(device, DType::kBF16, {64, 128}), table(device, DType::kF32, {64, 32});
  const TestMatrix saved(device, DType::kE4M3, 64, 128, Scaling::kGroup, 16);
  RopeForward call = {.qkv = qkv, .cos_sin = table, .num_heads = 2, .num_kv_heads = 1, .saved = saved};
  const double by_groups = cost_of(call).bytes;
  call.joint_scales = true;
  CHECK(cost_of(call).bytes == by_groups + 2 * 64 * 96);
}

TEST_CASE("rope_forward with joint scales on another device gives the CPU's bits", "[kernels][rope][devices]") {
  // Heads of which not all fit one thread block, and rows in many.
  const auto [T, S, H, Hkv] = GENERATE(table<int, int, int, int>({{1, 1, 1, 1},
                                                                  {37, 13, 4, 2},
                                                                  {64, 64, 3, 3},
                                                                  {65, 40, 5, 1},
                                                                  {128, 128, 8, 8},
                                                                  {130, 65, 3, 1},
                                                                  {333, 111, 30, 10},
                                                                  {1000, 500, 16, 4}}));
  const auto [D, group] = GENERATE(table<int, int>({{64, 16}, {64, 32}, {128, 16}, {128, 32}, {128, 64}}));
  const DType scales = GENERATE(DType::kBF16, DType::kF32);
  const int kind = GENERATE(0, 1, 2, 3);
  for (Device* device : other_devices()) {
    const JointShape s{T, S, H, Hkv, D, group, scales};
    CAPTURE(describe(s), kind);
    std::vector<float> x = values_of_many_sizes(s, DType::kBF16, 51);
    spoil(s, kind, x);
    const std::vector<float> cos_sin = rope_table(S, D, 1e4);
    const JointRotation got(*device, s, DType::kBF16, x, cos_sin);
    const JointRotation want(cpu_device(), s, DType::kBF16, x, cos_sin);
    CHECK(first_difference("saved", got.saved, want.saved) == "");
    CHECK(first_difference("qkv", got.qkv, want.qkv) == "");
    CHECK(got.guards_intact());
  }
}

// ---- The projection and the rotation in one kernel ----

// exact_values() of which every `piece` rows have a power of 2 as another factor, some 0. The rows with the
// value that the scale comes from keep theirs, so all terms of a product's sum have one factor, and it stays
// exact.
std::vector<float> exact_values_of_many_sizes(int64_t rows, int64_t cols, int64_t piece, uint64_t seed) {
  constexpr float kFactors[] = {1.0f, 0x1p-6f, 0x1p-1f, 0.0f, 0x1p-8f, 0x1p-3f};
  std::vector<float> x = exact_values(rows * cols, seed);
  const int64_t kept = rows * cols / 3 / cols / piece;
  for (int64_t i = 0; i < rows * cols; ++i) {
    const int64_t at = i / cols / piece;
    if (at != kept) x[i] *= kFactors[at % 6];
  }
  return x;
}

// What the op leaves on a device.
struct JointProjected {
  enum class Way { kOne, kTwo };

  JointProjected(Device& device, const RopeCase& c, Way way, const std::vector<float>& x_values)
      : x(device, DType::kE4M3, c.rows, c.depth, Scaling::kTensor),
        weight(device, DType::kE4M3, c.width(), c.depth, Scaling::kTensor),
        qkv(device, DType::kBF16, {c.rows, c.width()}),
        cos_sin(device, DType::kF32, {c.positions, c.head_dim}, rope_table(c.positions, c.head_dim, 10000)),
        saved(device, DType::kE4M3, c.rows, c.width(), Scaling::kGroup, c.group, DType::kBF16) {
    const TestTensor bf16_x(device, DType::kBF16, {c.rows, c.depth}, x_values);
    const TestTensor bf16_weight(device, DType::kBF16, {c.width(), c.depth},
                                 exact_values_of_many_sizes(c.width(), c.depth, c.head_dim, 312));
    quantize(device, {.x = bf16_x, .out = x});
    quantize(device, {.x = bf16_weight, .out = weight});
    way == Way::kOne ? rope_projection(device, op(c)) : run_as_two(device, op(c));
  }
  RopeProjection op(const RopeCase& c) const {
    return {.projection = {.a = x, .b = weight, .out = qkv, .fast_accumulation = c.fast},
            .rope = {.qkv = qkv,
                     .cos_sin = cos_sin,
                     .num_heads = c.heads,
                     .num_kv_heads = c.kv_heads,
                     .saved = saved,
                     .joint_scales = true}};
  }

  TestMatrix x, weight;
  TestTensor qkv, cos_sin;
  TestMatrix saved;
};
using Way = JointProjected::Way;

void check_projection(Device& device, const RopeCase& c, const std::vector<float>& x) {
  const JointProjected got(device, c, Way::kOne, x), want(device, c, Way::kTwo, x);
  CHECK(first_difference("saved", got.saved, want.saved) == "");
  CHECK(first_difference("qkv", got.qkv, want.qkv) == "");
  CHECK(got.qkv.guard_intact());
}

TEST_CASE("rope_projection with joint scales leaves what gemm and rope_forward leave", "[kernels][rope][devices]") {
  // Rows that are multiples of 128, of 64, of neither; widths of heads and groups that suit one kernel and not.
  const RopeCase c = GENERATE(
      RopeCase{128, 64, 128, 2, 1, 128}, RopeCase{256, 256, 256, 4, 2, 128}, RopeCase{192, 64, 272, 4, 4, 128},
      RopeCase{300, 100, 400, 6, 1, 128, 64}, RopeCase{257, 300, 144, 8, 4, 64},
      RopeCase{200, 50, 384, 2, 1, 64, 16}, RopeCase{448, 448, 208, 12, 4, 64},
      RopeCase{130, 130, 768, 12, 2, 32, 16}, RopeCase{513, 171, 80, 4, 4, 128, 16},
      RopeCase{1000, 500, 400, 8, 4, 128}, RopeCase{1, 1, 16, 1, 1, 16, 16, true, false},
      RopeCase{90, 90, 96, 3, 1, 128, 32, true, false}, RopeCase{70, 35, 112, 2, 1, 256, 32, true, false},
      RopeCase{64, 64, 64, 4, 2, 128, 128, true, false}, RopeCase{140, 70, 112, 4, 2, 64, 32, false, false});
  CAPTURE(describe(c));
  const std::vector<float> x = exact_values_of_many_sizes(c.rows, c.depth, kJointRows, 311);
  for (Device* device : devices()) {
    const JointProjected got(*device, c, Way::kOne, x), here(cpu_device(), c, Way::kTwo, x);
    CHECK(first_difference("saved", got.saved, here.saved) == "");
    CHECK(first_difference("qkv", got.qkv, here.qkv) == "");
    if (is_hopper(*device) && c.head_dim >= 64) CHECK(has_one_kernel(*device, got.op(c)) == c.one_kernel);
    check_projection(*device, c, x);
  }
}

TEST_CASE("rope_projection with joint scales of many tiles leaves the same each time", "[kernels][rope][devices]") {
  const int64_t depth = GENERATE(80, 272, 1040), head_dim = GENERATE(64, 128);
  const RopeCase c{4000, 1000, depth, 24, 12, head_dim};
  CAPTURE(describe(c));
  for (Device* device : other_devices()) {
    const std::vector<float> x = exact_values_of_many_sizes(c.rows, c.depth, kJointRows, 311);
    check_projection(*device, c, x);
    const JointProjected got(*device, c, Way::kOne, x), again(*device, c, Way::kOne, x);
    CHECK(first_difference("saved again", again.saved, got.saved) == "");
    CHECK(first_difference("qkv again", again.qkv, got.qkv) == "");
  }
}

TEST_CASE("rope_projection with joint scales keeps bad values visible", "[kernels][rope][devices]") {
  const RopeCase c = GENERATE(RopeCase{300, 100, 128, 2, 1, 128}, RopeCase{200, 100, 128, 4, 2, 64});
  CAPTURE(describe(c));
  for (Device* device : devices()) {
    std::vector<float> x = exact_values(c.rows * c.depth, 311);
    x[static_cast<size_t>(100 * c.depth + 7)] = NAN;  // a row of NaN, which leaves the others of its tile
    check_projection(*device, c, x);
    const JointProjected p(*device, c, Way::kOne, x);
    const std::vector<float> left = p.qkv.host();
    int64_t wrong = 0;
    for (int64_t i = 0; i < c.rows * c.width(); ++i) wrong += std::isnan(left[i]) != (i / c.width() == 100);
    CHECK(wrong == 0);
    const TestTensor infinite(*device, DType::kF32, {1, 1}, {INFINITY});
    device->copy(p.x.scale->view().data, infinite.view().data, 4);
    rope_projection(*device, p.op(c));
    int64_t bad = 0;
    for (const float v : p.saved.host()) bad += std::isnan(v);
    CHECK(bad > 0);
  }
}

}  // namespace
