#include "core/float16.h"

#include <cmath>
#include <limits>

#include "tests/support/catch.h"

using namespace parka;

namespace {

// The definition of binary16.
double value_of(uint32_t code) {
  const double sign = code & 0x8000u ? -1.0 : 1.0;
  const int exponent = static_cast<int>(code >> 10 & 0x1fu), mantissa = static_cast<int>(code & 0x3ffu);
  if (exponent == 0) return sign * std::ldexp(mantissa, -24);
  if (exponent == 31) return mantissa == 0 ? sign * HUGE_VAL : std::numeric_limits<double>::quiet_NaN();
  return sign * std::ldexp(1024 + mantissa, exponent - 25);
}

uint16_t code(uint32_t bits) { return static_cast<uint16_t>(bits); }

}  // namespace

TEST_CASE("every fp16 code has the value that its format defines, and is made of it again", "[core][formats]") {
  int wrong = 0;
  for (uint32_t bits = 0; bits < 0x10000u; ++bits) {
    const float value = decode_fp16({code(bits)});
    if (std::isnan(value_of(bits))) {
      wrong += !std::isnan(value) || !std::isnan(decode_fp16(encode_fp16(value)));
    } else {
      wrong += double{value} != value_of(bits) || std::signbit(value) != ((bits & 0x8000u) != 0);
      wrong += encode_fp16(value).bits != bits;
    }
  }
  CHECK(wrong == 0);
}

TEST_CASE("fp16 rounds to nearest, ties to even, and to infinity where it ends", "[core][formats]") {
  int wrong = 0;
  for (uint32_t bits = 0; bits < 0x7c00u; ++bits) {
    // Of the largest, the next one is what would follow if the format went on: 65536.
    const double low = value_of(bits), high = bits == 0x7bffu ? 65536.0 : value_of(bits + 1);
    const auto middle = static_cast<float>((low + high) / 2);  // exact in fp32
    const uint32_t even = bits % 2 == 0 ? bits : bits + 1;
    for (const uint32_t sign : {0u, 0x8000u}) {
      const float s = sign ? -1.0f : 1.0f;
      wrong += encode_fp16(s * middle).bits != (even | sign);
      wrong += encode_fp16(s * std::nextafter(middle, 0.0f)).bits != (bits | sign);
      wrong += encode_fp16(s * std::nextafter(middle, 1e30f)).bits != ((bits + 1) | sign);
    }
  }
  CHECK(wrong == 0);
  CHECK(encode_fp16(1e30f).bits == 0x7c00);
  CHECK(encode_fp16(-HUGE_VALF).bits == 0xfc00);
  CHECK(encode_fp16(1e-30f).bits == 0);
}
