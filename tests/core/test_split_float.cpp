#include "core/split_float.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include "core/philox.h"
#include "tests/support/catch.h"

using namespace parka;

namespace {

uint32_t bits_of(float x) { return std::bit_cast<uint32_t>(x); }

// Every upper half with the low halves around its rounding boundary, and random ones.
std::vector<uint32_t> boundary_patterns() {
  std::vector<uint32_t> patterns;
  for (uint32_t high = 0; high < 0x10000u; ++high) {
    for (uint32_t low : {0x0000u, 0x0001u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu})
      patterns.push_back(high << 16 | low);
    patterns.push_back(high << 16 | (philox4x32(1, 2, high)[0] & 0xffffu));
  }
  return patterns;
}

}  // namespace

TEST_CASE("a split float joins to the same bits, whatever they are", "[core][split_float]") {
  int64_t wrong = 0;
  for (uint32_t bits : boundary_patterns()) {
    const SplitFloat split = split_float(std::bit_cast<float>(bits));
    wrong += bits_of(join_float(split.weight, split.remainder)) != bits;
  }
  CHECK(wrong == 0);
}

TEST_CASE("the weight of a split float is the nearest bfloat16, ties away from zero", "[core][split_float]") {
  int64_t wrong = 0;
  for (uint32_t bits : boundary_patterns()) {
    const float x = std::bit_cast<float>(bits);
    if (!std::isfinite(x)) continue;
    const float weight = decode_bf16(split_float(x).weight);
    const float below = std::bit_cast<float>(bits & 0xffff0000u);  // next bfloat16 towards zero
    const float above = std::bit_cast<float>((bits & 0xffff0000u) + 0x10000u);
    const double to_below = std::abs(double{x} - below);
    // Past the largest bfloat16 comes infinity, where 0x1p128 would be.
    const double to_above = std::abs((std::isinf(above) ? std::copysign(0x1p128, x) : double{above}) - x);
    wrong += bits_of(weight) != bits_of(to_above <= to_below ? above : below);
  }
  CHECK(wrong == 0);
}

// ---- 24 bits ----

TEST_CASE("a number of 24 bits splits into its nearest bfloat16 and 8 bits, and joins again",
          "[core][split_float]") {
  int64_t wrong = 0;
  for (uint32_t high = 0; high < 0x10000u; ++high) {
    for (uint32_t low = 0; low < 0x100u; ++low) {
      const float x = std::bit_cast<float>(high << 16 | low << 8);
      const SplitFloat24 split = split_float24(x);
      wrong += split.weight.bits != split_float(x).weight.bits;
      wrong += bits_of(join_float24(split.weight, split.remainder)) != bits_of(x);
    }
  }
  CHECK(wrong == 0);
}

TEST_CASE("every phase rounds to one of the two neighbours, and all phases together to the number itself",
          "[core][split_float]") {
  int64_t wrong = 0;
  for (uint32_t high :
       {0x00000000u, 0x00000100u, 0x3f800000u, 0xbf800000u, 0x3fffff00u, 0x80000000u, 0x7f7ffe00u}) {
    for (uint32_t low = 0; low < 0x100u; ++low) {
      const float x = std::bit_cast<float>(high | low);
      uint32_t above = 0;
      for (uint32_t phase = 0; phase < 0x100u; ++phase) {
        const uint32_t rounded = bits_of(round_to_float24(x, phase << 24 | 0xabcdefu));
        wrong += rounded != high && rounded != high + 0x100u;
        above += rounded != high;
      }
      wrong += above != low;
      wrong += bits_of(round_to_float24(x, kNearestPhase)) != (low < 0x80u ? high : high + 0x100u);
    }
  }
  CHECK(wrong == 0);
}

// Of `steps` small numbers of `unit` 256ths of fp24's last place, added to 1 one after another.
double error_of_sum(uint32_t unit, int64_t steps, const std::function<uint32_t(uint64_t step)>& phase) {
  const float small = std::ldexp(static_cast<float>(unit), -23);
  float sum = 1.0f;
  double exact = 1.0;
  for (int64_t step = 0; step < steps; ++step) {
    sum = round_to_float24(sum + small, phase(static_cast<uint64_t>(step)));
    exact += double{small};
  }
  return std::abs(sum - exact) * 0x1p15;  // in places
}

TEST_CASE("rounding_phase loses few places of a long sum, where independent draws and nearest lose more",
          "[core][split_float]") {
  double worst = 0, nearest = 0, draws = 0;
  for (uint32_t unit = 1; unit < 0x100u; unit += 2) {
    const auto element = uint64_t{unit} * 12345;
    worst =
        std::max(worst, error_of_sum(unit, 10000, [&](uint64_t step) { return rounding_phase(step, element); }));
    nearest = std::max(nearest, error_of_sum(unit, 10000, [](uint64_t) { return kNearestPhase; }));
    draws = std::max(draws, error_of_sum(unit, 10000, [&](uint64_t step) { return philox4x32(unit, 0, step)[0]; }));
  }
  CAPTURE(worst, nearest, draws);
  CHECK(worst < 5);
  CHECK(draws > 50);
  CHECK(nearest > 4000);
}

TEST_CASE("split_float of zeros, subnormals, ties and the largest finite numbers", "[core][split_float]") {
  struct Case {
    uint32_t bits;
    uint16_t weight, remainder;
  };
  const std::vector<Case> cases = {
      {0x00000000u, 0x0000, 0x0000},  // 0
      {0x80000000u, 0x8000, 0x0000},  // -0
      {0x00000001u, 0x0000, 0x0001},  // smallest subnormal: weight 0, remainder keeps it
      {0x80000001u, 0x8000, 0x0001}, {0x00008000u, 0x0001, 0x8000},  // a tie among subnormals goes away from zero
      {0x007fffffu, 0x0080, 0xffff},  // largest subnormal rounds to the smallest normal, remainder -1
      {0x3f800000u, 0x3f80, 0x0000},  // 1
      {0x3f808000u, 0x3f81, 0x8000},  // 1 + 2^-8: tie
      {0xbf808000u, 0xbf81, 0x8000}, {0x3f807fffu, 0x3f80, 0x7fff},
      {0x3fffffffu, 0x4000, 0xffff},  // carries into the exponent
      {0x7f7f7fffu, 0x7f7f, 0x7fff},  // largest that stays finite as a weight
      {0x7f7fffffu, 0x7f80, 0xffff},  // largest finite: the weight is infinite, the pair still exact
      {0xff7fffffu, 0xff80, 0xffff}, {0x7f800000u, 0x7f80, 0x0000},  // infinity
  };
  int wrong = 0;
  for (const Case& c : cases) {
    const SplitFloat split = split_float(std::bit_cast<float>(c.bits));
    wrong += split.weight.bits != c.weight || split.remainder != c.remainder;
    wrong += bits_of(join_float({c.weight}, c.remainder)) != c.bits;
  }
  CHECK(wrong == 0);
}
