#include "kernels/cpu/math/log2_exp2.h"

#include <cmath>

#include "core/philox.h"
#include "tests/support/catch.h"

using namespace parka;
using namespace parka::cpu;

namespace {

constexpr uint64_t kNumSamples = 1 << 19;

}  // namespace

TEST_CASE("log2_of_fraction is within 2^-21 of the double logarithm", "[kernels][log2_exp2]") {
  int64_t wrong = 0;
  const auto check = [&](float x) {
    const double want = std::log2(double{x});
    wrong += !(std::abs(log2_of_fraction(x) - want) <= 0x1p-21 * std::abs(want));
  };
  for (uint64_t i = 0; i < kNumSamples; ++i) {
    // Bit patterns from 2^-126 up to 1: every exponent equally often.
    const uint32_t bits = 0x00800000u + philox4x32(1, 0, i)[0] % (0x3f800000u - 0x00800000u);
    check(std::bit_cast<float>(bits));
    check(
        std::bit_cast<float>(0x3f800000u - static_cast<uint32_t>(i)));  // next to 1, where the result is next to 0
  }
  CHECK(wrong == 0);
  CHECK(log2_of_fraction(1.0f) == 0.0f);
  CHECK(log2_of_fraction(0.125f) == -3.0f);
  CHECK(log2_of_fraction(0.0f) == -127.0f);
}

TEST_CASE("exp2_of_negative is within 2^-22 of the double power and stops at 2^-126", "[kernels][log2_exp2]") {
  int64_t wrong = 0;
  for (uint64_t i = 0; i < kNumSamples; ++i) {
    const float y = static_cast<float>(-126.0 * uniform_open(philox4x32(2, 0, i)[0]));
    const float small = static_cast<float>(-uniform_open(philox4x32(2, 1, i)[0]));
    for (float v : {y, small}) {
      const double want = std::exp2(double{v});
      wrong += !(std::abs(exp2_of_negative(v) - want) <= 0x1p-22 * want);
    }
  }
  CHECK(wrong == 0);
  CHECK(exp2_of_negative(0.0f) == 1.0f);
  CHECK(exp2_of_negative(-0.0f) == 1.0f);
  CHECK(exp2_of_negative(-17.0f) == 0x1p-17f);
  CHECK(exp2_of_negative(-126.0f) == 0x1p-126f);
  CHECK(exp2_of_negative(-2024.0f) == 0x1p-126f);
}
