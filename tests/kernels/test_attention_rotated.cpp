#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/ops/attention/attention.h"
#include "kernels/ops/attention/rope.h"
#include "tests/kernels/attention_reference.h"
#include "tests/kernels/op_bounds.h"
#include "tests/support/catch.h"

// What attention_backward does beside: d_q and d_k rotated back by their positions, and the largest gradient found.
// On every device against its own plain gradient, which test_attention*.cpp hold against references.
using namespace parka;
using namespace parka::test;

namespace {

struct Inputs {
  AttentionShape s;
  DType dtype;
  std::vector<float> qkv, d_out, cos_sin;
  FirstKeys first_keys = {};

  Inputs(const AttentionShape& shape, DType type)
      : s(shape),
        dtype(type),
        qkv(random_values(type, s.T() * s.width(), 31)),
        d_out(random_values(type, s.T() * s.out_width(), 32)),
        cos_sin(rope_table(s.S, s.D, 100.0)) {}
};

// One forward, and backward in every form.
struct Results {
  std::vector<float> plain, rotated;  // d_qkv
  float plain_amax, rotated_amax;
  bool same;    // asking for the maximum changes no bit
  bool intact;  // nothing written outside the outputs
};

Results run(Device& device, const Inputs& in) {
  const AttentionShape& s = in.s;
  const TestTensor qkv(device, in.dtype, {s.T(), s.width()}, in.qkv), out(device, in.dtype, {s.T(), s.out_width()});
  const TestTensor d_out(device, in.dtype, {s.T(), s.out_width()}, in.d_out),
      lse(device, DType::kF32, {s.B, s.H, s.S});
  const TestTensor table(device, DType::kF32, {s.S, s.D}, in.cos_sin);
  const std::vector<float> keys(in.first_keys.begin(), in.first_keys.end());
  const TestTensor first_key(device, DType::kI32, {s.T()}, keys);
  const TensorView first = in.first_keys.empty() ? TensorView() : first_key.view();
  const float scale = 1.0f / std::sqrt(static_cast<float>(s.D));
  attention_forward(device, {qkv, out, lse, s.S, s.H, s.Hkv, scale, {}, first});
  bool intact = true;
  const auto backward = [&](const TensorView& cos_sin, const TensorView& amax) {
    const TestTensor d_qkv(device, in.dtype, {s.T(), s.width()});  // poisoned: NaN
    attention_backward(device, {qkv, out, d_out, lse, d_qkv, s.S, s.H, s.Hkv, scale, first, cos_sin, amax});
    intact = intact && d_qkv.guard_intact();
    return d_qkv.host();
  };
  const TestTensor plain_amax(device, DType::kF32, {1}), rotated_amax(device, DType::kF32, {1});
  Results r{backward({}, {}), backward(table, {}), 0, 0, true, true};
  // As bits: a NaN is not equal to itself.
  const auto same_bits = [](const std::vector<float>& a, const std::vector<float>& b) {
    return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                      [](float x, float y) { return x == y || (std::isnan(x) && std::isnan(y)); });
  };
  r.same = same_bits(backward({}, plain_amax), r.plain) && same_bits(backward(table, rotated_amax), r.rotated);
  r.plain_amax = plain_amax.host()[0];
  r.rotated_amax = rotated_amax.host()[0];
  r.intact = intact && plain_amax.guard_intact() && rotated_amax.guard_intact() && table.host() == in.cos_sin;
  return r;
}

// The largest magnitude; NaN is skipped.
float largest_of(const std::vector<float>& x) {
  float largest = 0;
  for (const float v : x) largest = std::isnan(v) ? largest : std::max(largest, std::abs(v));
  return largest;
}

// Elements of `rotated` that are not the plain gradient rotated back. In fp32 the bits are equal; in bf16 the plain
// gradient has been rounded before, once an element.
int64_t count_wrong_rotations(const Inputs& in, const Results& r) {
  const AttentionShape& s = in.s;
  const int64_t half = s.D / 2;
  const double unit = in.dtype == DType::kBF16 ? unit_roundoff(DType::kBF16) : 0.0;
  int64_t wrong = 0;
  const auto check = [&](size_t at, float want, double magnitude) {
    wrong += !(std::abs(double{r.rotated[at]} - want) <= 1.01 * unit * (magnitude + std::abs(want)));
  };
  for (int64_t t = 0; t < s.T(); ++t) {
    for (int64_t c = 0; c < s.width(); ++c) {
      const int64_t at = t * s.width() + c, i = c % s.D;
      if (c >= (s.H + s.Hkv) * s.D) {
        wrong += r.rotated[at] != r.plain[at];
      } else if (i < half) {
        const float low = r.plain[at], high = r.plain[at + half];
        const float cos = in.cos_sin[t % s.S * s.D + i], sin = -in.cos_sin[t % s.S * s.D + half + i];
        const float low_cos = low * cos, high_sin = high * sin, high_cos = high * cos, low_sin = low * sin;
        check(at, low_cos - high_sin, std::abs(low_cos) + std::abs(high_sin));
        check(at + half, high_cos + low_sin, std::abs(high_cos) + std::abs(low_sin));
      }
    }
  }
  return wrong;
}

// Documents that begin every `length` rows.
FirstKeys documents_of(const AttentionShape& s, int64_t length) {
  FirstKeys keys;
  for (int64_t row = 0; row < s.T(); ++row) keys.push_back(static_cast<int32_t>(row % s.S / length * length));
  return keys;
}

TEST_CASE("attention_backward rotates the gradients of queries and keys back", "[kernels][attention][rope]") {
  // Heads narrow and wide, of which halves are whole warps or not; lengths beside those of tiles.
  const AttentionShape s = GENERATE(
      AttentionShape{2, 1, 1, 1, 2}, AttentionShape{3, 7, 4, 2, 6}, AttentionShape{1, 50, 5, 1, 34},
      AttentionShape{2, 33, 2, 2, 48}, AttentionShape{3, 17, 4, 4, 64}, AttentionShape{1, 129, 4, 2, 64},
      AttentionShape{2, 200, 3, 1, 64}, AttentionShape{2, 65, 2, 2, 128}, AttentionShape{1, 333, 4, 2, 128},
      AttentionShape{2, 65, 4, 2, 256}, AttentionShape{1, 200, 3, 1, 256}, AttentionShape{1, 9, 2, 1, 130},
      AttentionShape{1, 20, 1, 1, 512});
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  const bool documents = GENERATE(false, true), scaled = GENERATE(false, true);
  CAPTURE(s.B, s.S, s.H, s.Hkv, s.D, name_of(dtype), documents, scaled);
  Inputs in(s, dtype);
  // Where queries and keys were made larger on the way, their gradients are, too.
  if (scaled) {
    in.cos_sin = rope_table(s.S, s.D, 100.0, {.kind = RopeScalingKind::kYarn, .attention_factor = 1.7});
  }
  if (documents) in.first_keys = documents_of(s, 30);
  for (Device* device : devices()) {
    CAPTURE(device->name());
    const Results r = run(*device, in);
    CHECK(count_wrong_rotations(in, r) == 0);
    CHECK(r.plain_amax == largest_of(r.plain));
    CHECK(r.rotated_amax == largest_of(r.rotated));
    CHECK((r.same && r.intact));
  }
}

TEST_CASE("attention_backward finds the largest gradient wherever it is", "[kernels][attention][slow]") {
  const int64_t D = GENERATE(int64_t{48}, int64_t{64}, int64_t{128}, int64_t{256});
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  const AttentionShape s{2, 150, 4, 2, D};
  const Inputs same(s, dtype);
  for (Device* device : devices()) {
    // A large d_out makes d_v large at its row and before, a large key or query d_q or d_k.
    for (const int64_t row : {int64_t{0}, s.S - 1, s.S + 70, s.T() - 1}) {
      for (const int64_t head : {int64_t{-1}, int64_t{3}, s.H + 1}) {
        CAPTURE(device->name(), D, name_of(dtype), row, head);
        Inputs in = same;
        (head < 0 ? in.d_out[row * s.out_width() + D - 3] : in.qkv[row * s.width() + head * D + 5]) = -50.0f;
        const Results r = run(*device, in);
        CHECK(r.plain_amax == largest_of(r.plain));
        CHECK(r.rotated_amax == largest_of(r.rotated));
      }
    }
  }
}

TEST_CASE("the largest gradient of attention passes over a NaN and not over infinity", "[kernels][attention]") {
  const int64_t D = GENERATE(int64_t{8}, int64_t{64}, int64_t{128}, int64_t{256});
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  const AttentionShape s{2, 70, 2, 1, D};
  const Inputs same(s, dtype);
  for (Device* device : devices()) {
    for (const float value : {std::nanf(""), std::numeric_limits<float>::infinity()}) {
      CAPTURE(device->name(), D, name_of(dtype), value);
      Inputs in = same;
      in.d_out[3 * s.out_width() + 2] = value;  // in the first sequence: the second has gradients of its own
      const Results r = run(*device, in);
      CHECK(r.plain_amax == largest_of(r.plain));
      CHECK(r.rotated_amax == largest_of(r.rotated));
      CHECK((r.same && r.intact));
    }
  }
}

}  // namespace
