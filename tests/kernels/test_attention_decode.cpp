#include "kernels/ops/attention/attention.h"

#include <algorithm>
#include <cmath>
#include <ostream>
#include <vector>

#include "tests/kernels/attention_reference.h"
#include "tests/kernels/op_bounds.h"
#include "tests/support/catch.h"

using namespace parka;
using namespace parka::test;

namespace {

// B sequences of up to L tokens in the cache; T new rows.
struct DecodeShape {
  int64_t T, B, L, H, Hkv, D;

  int64_t width() const { return (H + 2 * Hkv) * D; }
  int64_t kv_width() const { return 2 * Hkv * D; }
  int64_t cached(int64_t slot, int64_t position, int64_t head) const {
    return (slot * L + position) * kv_width() + head * D;
  }
};

std::ostream& operator<<(std::ostream& out, const DecodeShape& s) {
  return out << "T " << s.T << " B " << s.B << " L " << s.L << " H " << s.H << " Hkv " << s.Hkv << " D " << s.D;
}

// One key; one head; keys shared by some heads and by all; widths and lengths that are no powers of two; several of
// the pieces into which a GPU divides the keys.
const std::vector<DecodeShape> kShapes = {{1, 1, 1, 1, 1, 1},    {2, 2, 9, 2, 2, 4},    {3, 5, 33, 6, 2, 16},
                                          {4, 4, 67, 4, 1, 48},  {5, 3, 256, 4, 4, 64}, {7, 4, 600, 4, 2, 128},
                                          {2, 2, 1100, 2, 1, 7}, {1, 2, 520, 3, 3, 200}};

// Tensors of one call. The cache is poison wherever no row may look: beyond each row's position, before its window
// and in other slots.
struct Decode {
  DecodeShape s;
  DType dtype;
  int64_t window;
  std::vector<int32_t> slots, positions;
  std::vector<float> x, before;  // qkv, and the cache without the rows' own keys and values
  TestTensor qkv, cache, slot, position, out, amax;
  Device& device;
  float scale;

  Decode(Device& device_, const DecodeShape& s_, DType dtype_, float magnitude = 1.0f, int64_t window_ = 0)
      : s(s_),
        dtype(dtype_),
        window(window_),
        slots(static_cast<size_t>(s.T)),
        positions(static_cast<size_t>(s.T)),
        x(random_values(dtype, s.T * s.width(), 1, magnitude)),
        before(static_cast<size_t>(s.B * s.L * s.kv_width()), NAN),
        qkv(device_, dtype, {s.T, s.width()}, x),
        cache(device_, dtype, {s.B, s.L, s.kv_width()}, fill_before(magnitude)),
        slot(device_, DType::kI32, {s.T}, {slots.begin(), slots.end()}),
        position(device_, DType::kI32, {s.T}, {positions.begin(), positions.end()}),
        out(device_, dtype, {s.T, s.H * s.D}),
        amax(device_, DType::kF32, {1}),
        device(device_),
        scale(1.0f / std::sqrt(static_cast<float>(s.D))) {}

  int64_t first_key(int64_t t) const {
    return window > 0 ? std::max<int64_t>(positions[t] + 1 - window, 0) : int64_t{0};
  }

  // Slots in turn from the last one on; the first row is as far into its sequence as fits, and where two rows have
  // a slot in common the later row is the next token.
  const std::vector<float>& fill_before(float magnitude) {
    const std::vector<float> old = random_values(dtype, static_cast<int64_t>(before.size()), 2, magnitude);
    for (int64_t t = 0; t < s.T; ++t) {
      slots[t] = static_cast<int32_t>(s.B - 1 - t % s.B);
      const auto random = static_cast<int64_t>(philox4x32(3, 0, static_cast<uint64_t>(t))[0]);
      positions[t] =
          static_cast<int32_t>(t == 0 ? s.L - 1 - (s.T - 1) / s.B : random % std::max<int64_t>(s.L - s.T, 1));
      if (t >= s.B) positions[t] = positions[t - s.B] + 1;
      if (t >= s.B) continue;
      for (int64_t i = s.cached(slots[t], first_key(t), 0); i < s.cached(slots[t], positions[t], 0); ++i)
        before[i] = old[i];
    }
    return before;
  }

  void run(int64_t max_keys) {
    cache_append(device, {qkv, cache, slot, position, s.H, s.Hkv});
    attention_decode(device, {qkv, cache, slot, position, out, max_keys, s.H, s.Hkv, scale, amax, window});
  }

  // The cache as it has to be after the rows were appended.
  std::vector<float> appended() const {
    std::vector<float> want = before;
    for (int64_t t = 0; t < s.T; ++t) {
      const float* from = &x[t * s.width() + s.H * s.D];
      std::copy(from, from + s.kv_width(), &want[s.cached(slots[t], positions[t], 0)]);
    }
    return want;
  }

  void check() {
    run(s.L);
    const std::vector<float> kv = appended(), kv_got = cache.host(), got = out.host();
    int64_t different = 0, wrong = 0;
    for (size_t i = 0; i < kv.size(); ++i) {
      different += !(kv[i] == kv_got[i] || (std::isnan(kv[i]) && std::isnan(kv_got[i])));
    }
    CHECK(different == 0);
    float largest = 0;
    for (int64_t t = 0; t < s.T; ++t) {
      // The same as the last row of a sequence of its own.
      const int64_t first = first_key(t), S = positions[t] + 1 - first;
      const AttentionShape one{1, S, s.H, s.Hkv, s.D};
      Doubles sequence(static_cast<size_t>(S * one.width()));
      for (int64_t j = 0; j < S; ++j) {
        const float* from = &kv[s.cached(slots[t], first + j, 0)];
        std::copy(from, from + s.kv_width(), &sequence[one.k(0, j, 0)]);
      }
      std::copy(&x[t * s.width()], &x[t * s.width()] + s.H * s.D, &sequence[one.q(0, S - 1, 0)]);
      const ForwardReference want = forward_reference(one, sequence, scale);
      for (int64_t i = 0; i < s.H * s.D; ++i) {
        const int64_t at = one.out(0, S - 1, 0) + i;
        const double bound = 2 * want.out_bound[at];  // pieces are rounded once more
        const double allowed = bound + 1.01 * unit_roundoff(dtype) * (std::abs(want.out[at]) + bound) + 1e-37;
        const float value = got[t * s.H * s.D + i];
        wrong += !(std::abs(value - want.out[at]) <= allowed);
        largest = std::max(largest, std::abs(value));
      }
    }
    CHECK(wrong == 0);
    CHECK(amax.host()[0] == largest);
    CHECK((out.guard_intact() && cache.guard_intact() && amax.guard_intact() && qkv.host() == x));
  }
};

TEST_CASE("attention to a cache agrees with the double reference", "[kernels][attention][devices][slow]") {
  const DecodeShape s = GENERATE(from_range(kShapes));
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  CAPTURE(s, name_of(dtype));
  for (Device* device : devices()) Decode(*device, s, dtype).check();
}

TEST_CASE("attention to a cache agrees with the double reference on random shapes",
          "[kernels][attention][devices][slow]") {
  for (uint64_t i = 0; i < 30; ++i) {
    const auto r = philox4x32(9, 0, i), q = philox4x32(9, 1, i);
    const int64_t Hkv = 1 + r[0] % 4, T = 1 + r[1] % 9, B = 1 + r[2] % 9;
    // A slot has room for all rows that come to it.
    const DecodeShape s{T, B, T + 1 + r[3] % 400, Hkv * (1 + q[0] % 4), Hkv, 1 + q[1] % 140};
    const DType dtype = i % 2 == 0 ? DType::kF32 : DType::kBF16;
    CAPTURE(s, name_of(dtype));
    for (Device* device : devices()) Decode(*device, s, dtype).check();
  }
}

TEST_CASE("attention to a cache reads no further back than its window", "[kernels][attention][devices]") {
  const int64_t window =
      GENERATE(int64_t{1}, int64_t{7}, int64_t{255}, int64_t{256}, int64_t{257}, int64_t{590}, int64_t{5000});
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  CAPTURE(window, name_of(dtype));
  for (Device* device : devices()) {
    Decode(*device, {7, 4, 600, 4, 2, 16}, dtype, 1.0f, window).check();
    Decode(*device, {2, 2, 9, 2, 2, 4}, dtype, 1.0f, window).check();
  }
}

TEST_CASE("attention to a cache takes large scores", "[kernels][attention][devices]") {
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  // Scores of a few hundred: nearly all probability is on one key, in one piece.
  for (Device* device : devices()) Decode(*device, {3, 3, 600, 4, 2, 16}, dtype, 12.0f).check();
}

TEST_CASE("attention to a cache gives a row the same bits in any batch", "[kernels][attention][devices]") {
  const DType dtype = GENERATE(DType::kF32, DType::kBF16);
  const int64_t window = GENERATE(int64_t{0}, int64_t{300});
  for (Device* device : devices()) {
    Decode all(*device, {4, 4, 700, 4, 2, 64}, dtype, 1.0f, window);
    all.run(700);
    const std::vector<float> together = all.out.host();
    const int64_t row = all.s.H * all.s.D;
    for (int64_t t = 0; t < all.s.T; ++t) {
      const TestTensor out(*device, dtype, {1, row});
      const int64_t keys = all.positions[t] + 1;
      attention_decode(*device, {all.qkv.view().rows(t, 1),
                                 all.cache,
                                 all.slot.view().rows(t, 1),
                                 all.position.view().rows(t, 1),
                                 out,
                                 keys,
                                 all.s.H,
                                 all.s.Hkv,
                                 all.scale,
                                 {},
                                 window});
      CHECK(out.host() == std::vector<float>(&together[t * row], &together[t * row] + row));
    }
  }
}

TEST_CASE("attention to a cache does not depend on the number of threads", "[kernels][attention]") {
  CHECK(same_on_one_thread([] {
    Decode decode(cpu_device(), {5, 3, 80, 6, 3, 16}, DType::kBF16);
    decode.run(80);
    return decode.out.bytes();
  }));
}

TEST_CASE("attention to a cache refuses what does not fit", "[kernels][attention]") {
  const DecodeShape s{2, 2, 9, 4, 2, 4};
  const Decode d(cpu_device(), s, DType::kF32);
  const auto decode_error = [&](const AttentionDecode& a) {
    return internal_error([&] { attention_decode(cpu_device(), a); });
  };
  const AttentionDecode good{d.qkv, d.cache, d.slot, d.position, d.out, s.L, s.H, s.Hkv, d.scale};
  CHECK(decode_error(good).empty());
  AttentionDecode bad = good;
  bad.max_keys = s.L + 1;
  CHECK(contains(decode_error(bad), "max_keys is 10"));
  bad = good;
  bad.max_keys = 3;  // a row is further than that
  CHECK(contains(decode_error(bad), "position < a.max_keys"));
  bad = good;
  bad.window = -1;
  CHECK(contains(decode_error(bad), "a window of -1 keys"));
  bad = good;
  bad.num_kv_heads = 3;
  CHECK(contains(decode_error(bad), "do not share 3"));
  const TestTensor narrow(cpu_device(), DType::kF32, {2, 9, 8}), one(cpu_device(), DType::kI32, {1});
  bad = good;
  bad.cache = narrow;
  CHECK(contains(decode_error(bad), "cache is fp32 [2, 9, 8], wanted shape [2, 9, 16]"));
  bad = good;
  bad.slot = one;
  CHECK(contains(decode_error(bad), "slot is"));
  const TestTensor far(cpu_device(), DType::kI32, {2}, {0, 9});
  CHECK(contains(internal_error([&] {
                   cache_append(cpu_device(), {d.qkv, d.cache, d.slot, far, s.H, s.Hkv});
                 }),
                 "position < dims.L"));
}

}  // namespace
