#include "engine/files/safetensors.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "tests/support/catch.h"

using namespace parka;

namespace {

// By the format's own decoding.
float value_of(DType dtype, uint32_t bits) {
  const auto byte = static_cast<uint8_t>(bits);
  const auto half = static_cast<uint16_t>(bits);
  switch (dtype) {
    case DType::kF32: return std::bit_cast<float>(bits);
    case DType::kBF16: return decode_bf16({half});
    case DType::kF16: return decode_fp16({half});
    case DType::kE4M3: return decode_e4m3({byte});
    default: return decode_e5m2({byte});
  }
}

void put(std::vector<std::byte>& bytes, size_t at, DType dtype, uint32_t bits) {
  std::memcpy(bytes.data() + at, &bits, static_cast<size_t>(size_of(dtype)));  // little-endian: the low bytes
}

// All codes of the small formats; of fp32 those around every exponent's ends and random ones.
std::vector<uint32_t> patterns(DType dtype) {
  std::vector<uint32_t> all;
  if (dtype != DType::kF32) {
    for (uint32_t bits = 0; bits < 1u << (8 * size_of(dtype)); ++bits) all.push_back(bits);
    return all;
  }
  std::mt19937 random(1);
  for (uint32_t high = 0; high < 512; ++high) {
    for (uint32_t low : {0u, 1u, 0x400000u, 0x7ffffeu, 0x7fffffu}) all.push_back(high << 23 | low);
  }
  for (int i = 0; i < 100000; ++i) all.push_back(static_cast<uint32_t>(random()));
  return all;
}

constexpr DType kFloats[] = {DType::kF32, DType::kBF16, DType::kF16, DType::kE4M3, DType::kE5M2};

}  // namespace

TEST_CASE("every pattern of a float format is finite as its decoding is", "[engine]") {
  for (const DType dtype : kFloats) {
    CAPTURE(name_of(dtype));
    int wrong = 0;
    std::vector<std::byte> one(static_cast<size_t>(size_of(dtype)));
    for (const uint32_t bits : patterns(dtype)) {
      put(one, 0, dtype, bits);
      wrong += all_finite(dtype, one) != std::isfinite(value_of(dtype, bits));
    }
    CHECK(wrong == 0);
    CHECK(all_finite(dtype, {}));
  }
}

TEST_CASE("one element that is not finite is found at any place, length and alignment", "[engine]") {
  for (const DType dtype : kFloats) {
    CAPTURE(name_of(dtype));
    const auto size = static_cast<size_t>(size_of(dtype));
    const std::vector<uint32_t> all = patterns(dtype);
    std::vector<uint32_t> finite, others;
    for (const uint32_t bits : all) (std::isfinite(value_of(dtype, bits)) ? finite : others).push_back(bits);
    std::mt19937 random(2);
    int wrong = 0;
    for (size_t count = 1; count < 150; ++count) {
      for (const size_t shift : {0u, 1u, 3u, 32u}) {
        std::vector<std::byte> bytes(shift + count * size, std::byte{0xff});
        for (size_t i = 0; i < count; ++i) put(bytes, shift + i * size, dtype, finite[random() % finite.size()]);
        const ByteSpan elements = ByteSpan(bytes).subspan(shift);
        wrong += !all_finite(dtype, elements);
        put(bytes, shift + (random() % count) * size, dtype, others[random() % others.size()]);
        wrong += all_finite(dtype, elements);
      }
    }
    CHECK(wrong == 0);
  }
}

TEST_CASE("one element that is not finite is found in each piece of a large tensor", "[engine]") {
  constexpr size_t kBytes = (3 << 20) + 4;
  for (const DType dtype : kFloats) {
    CAPTURE(name_of(dtype));
    std::vector<std::byte> bytes(kBytes);
    CHECK(all_finite(dtype, bytes));
    for (size_t at = 0; at < kBytes; at += 100 << 10) {
      put(bytes, at, dtype, 0x7f800000u | 0x7fffu);  // a NaN in every format
      CHECK_FALSE(all_finite(dtype, bytes));
      put(bytes, at, dtype, 0);
    }
    put(bytes, kBytes - static_cast<size_t>(size_of(dtype)), dtype, 0x7f800000u | 0x7fffu);
    CHECK_FALSE(all_finite(dtype, bytes));
  }
}

TEST_CASE("integers of any bits are finite", "[engine]") {
  const std::vector<std::byte> bytes(64, std::byte{0xff});
  for (const DType dtype : {DType::kI32, DType::kU16, DType::kU8}) CHECK(all_finite(dtype, bytes));
}
