#include "core/philox.h"

#include <array>
#include <cmath>
#include <cstdint>

#include "tests/support/catch.h"

using namespace parka;

TEST_CASE("philox4x32 gives the known answers of Random123", "[philox]") {
  using Draw = std::array<uint32_t, 4>;
  // Random123's kat_vectors, "philox4x32 10". Counter words are index (low, high), stream (low, high); the key is
  // the seed (low, high). The last one is digits of pi.
  CHECK(philox4x32(0, 0, 0) == Draw{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8});
  CHECK(philox4x32(~uint64_t{0}, ~uint64_t{0}, ~uint64_t{0}) ==
        Draw{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd});
  CHECK(philox4x32(0x299f31d0a4093822, 0x0370734413198a2e, 0x85a308d3243f6a88) ==
        Draw{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1});
}

TEST_CASE("philox4x32: every bit of seed, stream and index matters", "[philox]") {
  const auto base = philox4x32(5, 6, 7);
  int same = 0;
  for (int bit = 0; bit < 64; ++bit) {
    const uint64_t flip = uint64_t{1} << bit;
    same += philox4x32(5 ^ flip, 6, 7) == base;
    same += philox4x32(5, 6 ^ flip, 7) == base;
    same += philox4x32(5, 6, 7 ^ flip) == base;
  }
  CHECK(same == 0);
}

TEST_CASE("uniform_open stays inside (0, 1)", "[philox]") {
  CHECK(uniform_open(0) == 0x1p-33);
  CHECK(uniform_open(0x7fffffff) < 0.5);
  CHECK(uniform_open(0x80000000) > 0.5);
  CHECK(uniform_open(0xffffffff) == 1 - 0x1p-33);
}

TEST_CASE("philox_normal2 draws two independent standard normals", "[philox]") {
  constexpr int kDraws = 100000;
  double sum[2] = {}, square[2] = {}, fourth[2] = {}, product = 0;
  for (int i = 0; i < kDraws; ++i) {
    const auto x = philox_normal2(11, 12, static_cast<uint64_t>(i));
    for (int k = 0; k < 2; ++k) {
      sum[k] += x[k];
      square[k] += x[k] * x[k];
      fourth[k] += x[k] * x[k] * x[k] * x[k];
    }
    product += x[0] * x[1];
  }
  // Five standard errors of each mean: x has variance 1, x^2 variance 2, x^4 variance 96, x*y variance 1.
  const double error = 5 / std::sqrt(kDraws);
  for (int k = 0; k < 2; ++k) {
    CHECK(std::abs(sum[k] / kDraws) < error);
    CHECK(std::abs(square[k] / kDraws - 1) < error * std::sqrt(2.0));
    CHECK(std::abs(fourth[k] / kDraws - 3) < error * std::sqrt(96.0));
  }
  CHECK(std::abs(product / kDraws) < error);
}
