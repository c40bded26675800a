#include "core/number_formats.h"

#include <array>
#include <cmath>
#include <limits>
#include <vector>

#include "core/philox.h"
#include "tests/support/catch.h"

using namespace parka;

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kFloatMax = std::numeric_limits<float>::max();
constexpr float kFloatDenormMin = std::numeric_limits<float>::denorm_min();

uint32_t bits_of(float x) { return std::bit_cast<uint32_t>(x); }
float float_of(uint32_t bits) { return std::bit_cast<float>(bits); }
bool same_bits(float a, float b) { return bits_of(a) == bits_of(b); }
float next_up(float x) { return std::nextafter(x, kInfinity); }
float next_down(float x) { return std::nextafter(x, -kInfinity); }

// Quiet, signalling, negative, with the largest and the smallest payload.
const std::array<uint32_t, 6> kNanPatterns{0x7fc00000, 0x7f800001, 0x7fffffff, 0xffc00000, 0xff800001, 0xffffffff};

// A binary format by its definition, in double: every value of the formats below is exact there.
double value_by_definition(uint32_t magnitude_code, int mantissa_bits, int exponent_bias) {
  const uint32_t exponent = magnitude_code >> mantissa_bits;
  const uint32_t mantissa = magnitude_code & ((1u << mantissa_bits) - 1);
  const double fraction = std::ldexp(mantissa, -mantissa_bits);
  if (exponent == 0) return std::ldexp(fraction, 1 - exponent_bias);
  return std::ldexp(1.0 + fraction, static_cast<int>(exponent) - exponent_bias);
}

struct Float8Format {
  const char* name;
  int mantissa_bits, exponent_bias;
  uint32_t max_code;   // largest finite value
  uint32_t first_nan;  // magnitude codes from here are NaN; those between are infinity
  Float8Traits traits;
  uint8_t (*encode)(float);
  float (*decode)(uint8_t);

  double value(uint32_t magnitude_code) const {
    return value_by_definition(magnitude_code, mantissa_bits, exponent_bias);
  }
  // The largest magnitude code whose value does not exceed x, for 0 <= x <= the largest finite value.
  uint32_t code_below(double x) const {
    uint32_t code = 0;
    while (code < max_code && value(code + 1) <= x) ++code;
    return code;
  }
};

const std::array<Float8Format, 2> kFloat8Formats{{
    {"e4m3", 3, 7, 0x7e, 0x7f, kE4M3Traits, [](float x) { return encode_e4m3(x).bits; },
     [](uint8_t bits) { return decode_e4m3({bits}); }},
    {"e5m2", 2, 15, 0x7b, 0x7d, kE5M2Traits, [](float x) { return encode_e5m2(x).bits; },
     [](uint8_t bits) { return decode_e5m2({bits}); }},
}};

double bf16_value(uint32_t magnitude_code) { return value_by_definition(magnitude_code, 7, 127); }

// Of a tie between two neighbouring codes the even one wins.
uint32_t even_one(uint32_t code) { return code + (code & 1); }

}  // namespace

TEST_CASE("FP8: every code decodes to its definition and encodes back to itself", "[number_formats]") {
  for (const Float8Format& format : kFloat8Formats) {
    CAPTURE(format.name);
    int wrong = 0;
    for (uint32_t code = 0; code < 256; ++code) {
      const uint32_t magnitude = code & 0x7f, sign = code & 0x80;
      const float decoded = format.decode(static_cast<uint8_t>(code));
      const uint8_t encoded = format.encode(decoded);
      if (magnitude >= format.first_nan) {
        wrong += bits_of(decoded) != 0x7fc00000u || encoded != 0x7f;
      } else if (magnitude > format.max_code) {
        wrong += decoded != (sign ? -kInfinity : kInfinity) || encoded != (sign | format.max_code);
      } else {
        const double value = sign ? -format.value(magnitude) : format.value(magnitude);
        wrong += decoded != value || std::signbit(decoded) != (sign != 0) || encoded != code;
      }
    }
    CHECK(wrong == 0);
  }
}

TEST_CASE("FP8: the traits are those of the codes", "[number_formats]") {
  for (const Float8Format& format : kFloat8Formats) {
    CAPTURE(format.name);
    CHECK(format.traits.mantissa_bits == format.mantissa_bits);
    CHECK(format.traits.exponent_bias == format.exponent_bias);
    CHECK(format.traits.max_code == format.max_code);
    CHECK(format.traits.max == format.value(format.max_code));
    CHECK(format.traits.min_subnormal == format.value(1));
    CHECK(format.traits.min_normal == format.value(1u << format.mantissa_bits));
  }
}

TEST_CASE("FP8: rounds to nearest, ties to even, at every boundary", "[number_formats]") {
  for (const Float8Format& format : kFloat8Formats) {
    CAPTURE(format.name);
    int wrong = 0;
    for (uint32_t code = 0; code < format.max_code; ++code) {
      const double low = format.value(code), high = format.value(code + 1);
      const float middle = static_cast<float>((low + high) / 2);
      wrong += middle != (low + high) / 2;
      const auto check = [&](float x, uint32_t expected) {
        wrong += format.encode(x) != expected;
        wrong += format.encode(-x) != (0x80 | expected);
      };
      check(middle, even_one(code));
      check(next_down(middle), code);
      check(next_up(middle), code + 1);
      check(next_up(static_cast<float>(low)), code);
      check(next_down(static_cast<float>(high)), code + 1);
    }
    CHECK(wrong == 0);
  }
}

TEST_CASE("FP8: floats all over the range go to the nearest value", "[number_formats]") {
  for (const Float8Format& format : kFloat8Formats) {
    CAPTURE(format.name);
    int wrong = 0;
    for (uint64_t pattern = 0; pattern < 0x7f800000u; pattern += 99991) {
      const float x = float_of(static_cast<uint32_t>(pattern));
      const uint32_t below = format.code_below(x);
      uint32_t expected = below;
      if (below < format.max_code) {
        const double to_low = x - format.value(below), to_high = format.value(below + 1) - x;
        expected = to_low < to_high ? below : to_low > to_high ? below + 1 : even_one(below);
      }
      wrong += format.encode(x) != expected || format.encode(-x) != (0x80 | expected);
    }
    CHECK(wrong == 0);
  }
}

TEST_CASE("FP8: saturates, infinities too", "[number_formats]") {
  for (const Float8Format& format : kFloat8Formats) {
    CAPTURE(format.name);
    const float max = format.traits.max;
    const float half_step =
        static_cast<float>((format.value(format.max_code) - format.value(format.max_code - 1)) / 2);
    int wrong = 0;
    for (float x : {max, next_up(max), next_down(max + half_step), max + half_step, next_up(max + half_step),
                    max + 2 * half_step, 2 * max, kFloatMax, kInfinity}) {
      wrong += format.encode(x) != format.max_code || format.encode(-x) != (0x80 | format.max_code);
    }
    CHECK(wrong == 0);
  }
}

TEST_CASE("FP8: one NaN, signed zeros, float denormals", "[number_formats]") {
  for (const Float8Format& format : kFloat8Formats) {
    CAPTURE(format.name);
    int wrong = 0;
    for (uint32_t pattern : kNanPatterns) {
      wrong += format.encode(float_of(pattern)) != 0x7f;
    }
    for (float x : {0.0f, kFloatDenormMin, 0x1p-127f, next_down(0x1p-126f)}) {
      wrong += format.encode(x) != 0 || format.encode(-x) != 0x80;
    }
    CHECK(wrong == 0);
    CHECK(same_bits(format.decode(0x80), -0.0f));
  }
}

TEST_CASE("bf16: every code decodes to its definition and encodes back to itself", "[number_formats]") {
  int wrong = 0;
  for (uint32_t code = 0; code < 65536; ++code) {
    const uint32_t magnitude = code & 0x7fff, sign = code & 0x8000;
    const float decoded = decode_bf16({static_cast<uint16_t>(code)});
    const uint16_t encoded = encode_bf16(decoded).bits;
    if (magnitude > 0x7f80) {
      wrong += !std::isnan(decoded) || encoded != 0x7fff;
    } else if (magnitude == 0x7f80) {
      wrong += decoded != (sign ? -kInfinity : kInfinity) || encoded != code;
    } else {
      const double value = sign ? -bf16_value(magnitude) : bf16_value(magnitude);
      wrong += decoded != value || std::signbit(decoded) != (sign != 0) || encoded != code;
    }
  }
  CHECK(wrong == 0);
}

TEST_CASE("bf16: rounds to nearest, ties to even, at every boundary", "[number_formats]") {
  int wrong = 0;
  for (uint32_t code = 0; code < 0x7f80; ++code) {  // the last step is from the largest value to infinity
    const double low = bf16_value(code), high = bf16_value(code + 1);
    const float middle = static_cast<float>((low + high) / 2);
    wrong += middle != (low + high) / 2;
    const auto check = [&](float x, uint32_t expected) {
      wrong += encode_bf16(x).bits != expected || encode_bf16(-x).bits != (0x8000 | expected);
    };
    check(middle, even_one(code));
    check(next_down(middle), code);
    check(next_up(middle), code + 1);
    check(next_up(static_cast<float>(low)), code);
  }
  for (uint32_t pattern : kNanPatterns) wrong += encode_bf16(float_of(pattern)).bits != 0x7fff;
  CHECK(wrong == 0);
  CHECK(encode_bf16(kFloatMax).bits == 0x7f80);
  CHECK(encode_bf16(-kInfinity).bits == 0xff80);
}

TEST_CASE("bf16 rounding up gives the smallest value that is not below", "[number_formats]") {
  int wrong = 0;
  for (uint32_t code = 0; code < 0x7f80; ++code) {
    const float low = static_cast<float>(bf16_value(code));
    wrong += encode_bf16_round_up(low).bits != code;
    wrong += encode_bf16_round_up(next_up(low)).bits != code + 1;
    wrong += encode_bf16_round_up(float_of((code << 16) | 0x8000u)).bits != code + 1;
    wrong += encode_bf16_round_up(float_of((code << 16) | 0xffffu)).bits != code + 1;
  }
  for (uint32_t pattern : kNanPatterns) wrong += encode_bf16_round_up(float_of(pattern)).bits != 0x7fff;
  CHECK(wrong == 0);
  CHECK(encode_bf16_round_up(kFloatMax).bits == 0x7f80);
  CHECK(encode_bf16_round_up(kInfinity).bits == 0x7f80);
}

TEST_CASE("bf16 stochastic rounding goes up exactly as often as the fraction says", "[number_formats]") {
  int wrong = 0;
  for (uint32_t code : {0x0000u, 0x0001u, 0x007fu, 0x0080u, 0x3f80u, 0x3f81u, 0x3fffu, 0x7f7fu}) {
    for (uint32_t discarded : {0x0000u, 0x0001u, 0x1234u, 0x7fffu, 0x8000u, 0xfffeu, 0xffffu}) {
      const float x = float_of((code << 16) | discarded);
      uint32_t up = 0;
      for (uint32_t random = 0; random < 65536; ++random) {
        const uint32_t result = encode_bf16_stochastic(x, random).bits;
        up += result == code + 1;
        wrong += result != code && result != code + 1;
        wrong += encode_bf16_stochastic(-x, random | 0xffff0000u).bits != (0x8000 | result);
      }
      wrong += up != discarded;
    }
  }
  CHECK(wrong == 0);
}

TEST_CASE("bf16 stochastic rounding keeps representable values, infinities and NaN", "[number_formats]") {
  int wrong = 0;
  for (uint32_t code = 0; code < 65536; ++code) {
    const uint32_t expected = (code & 0x7fff) > 0x7f80 ? 0x7fff : code;
    const float x = float_of(code << 16);
    for (uint32_t random : {0u, 1u, 0x8000u, 0xffffu, 0xffffffffu}) {
      wrong += encode_bf16_stochastic(x, random).bits != expected;
    }
  }
  for (uint32_t pattern : kNanPatterns) {
    for (uint32_t random : {0u, 0xffffu}) wrong += encode_bf16_stochastic(float_of(pattern), random).bits != 0x7fff;
  }
  CHECK(wrong == 0);
}
