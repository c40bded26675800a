#pragma once
#include <array>
#include <bit>
#include <cstdint>

#include "core/host_device.h"

// The 4-bit formats of bitsandbytes. A code stands for a fraction of the largest magnitude of its block. Two codes
// lie in a byte, the first in the high half; after an odd number of elements the low half holds the code of zero.
namespace parka {

// kNf4: quantiles of the normal distribution, ascending. kFp4: a sign in bit 3, and eight magnitudes in any order.
enum class Format4Bit : uint8_t { kNf4, kFp4 };

using Values4Bit = std::array<float, 16>;
inline constexpr Values4Bit kNf4Values = {-1.0f,
                                          -0.6961928009986877f,
                                          -0.5250730514526367f,
                                          -0.39491748809814453f,
                                          -0.28444138169288635f,
                                          -0.18477343022823334f,
                                          -0.09105003625154495f,
                                          0.0f,
                                          0.07958029955625534f,
                                          0.16093020141124725f,
                                          0.24611230194568634f,
                                          0.33791524171829224f,
                                          0.44070982933044434f,
                                          0.5626170039176941f,
                                          0.7229568362236023f,
                                          1.0f};
inline constexpr Values4Bit kFp4Values = {0.0f,       0.0625f / 12, 8.0f / 12,  1.0f,          4.0f / 12,  0.5f,
                                          2.0f / 12,  0.25f,        -0.0f,      -0.0625f / 12, -8.0f / 12, -1.0f,
                                          -4.0f / 12, -0.5f,        -2.0f / 12, -0.25f};
inline const Values4Bit& values_of(Format4Bit format) {
  return format == Format4Bit::kNf4 ? kNf4Values : kFp4Values;
}

// The code of the value nearest to t, in about [-1, 1]: the number of midpoints between values, as fp32, below t.
PARKA_HOST_DEVICE inline uint32_t encode_nf4(float t) {
  return (t > -0x1.b239bp-1f) + (t > -0x1.38a4ep-1f) + (t > -0x1.d709p-2f) + (t > -0x1.5bd4ecp-2f) +
         (t > -0x1.e079d8p-3f) + (t > -0x1.1a7178p-3f) + (t > -0x1.74f0e2p-5f) + (t > 0x1.45f5fep-5f) +
         (t > 0x1.ec90c4p-4f) + (t > 0x1.a0cfcp-3f) + (t > 0x1.2b05a8p-2f) + (t > 0x1.8ea7f2p-2f) +
         (t > 0x1.00da08p-1f) + (t > 0x1.491b5ep-1f) + (t > 0x1.b913b4p-1f);
}

// The same of the magnitude; the sign is that of t, of zero too.
PARKA_HOST_DEVICE inline uint32_t encode_fp4(float t) {
  constexpr uint32_t kCodesByMagnitude = 0x32547610u;  // the smallest in the lowest 4 bits
  const uint32_t bits = std::bit_cast<uint32_t>(t);
  const float m = std::bit_cast<float>(bits & 0x7fffffffu);
  const uint32_t rank = (m > 0x1.555556p-9f) + (m > 0x1.6p-4f) + (m > 0x1.aaaaacp-3f) + (m > 0x1.2aaaacp-2f) +
                        (m > 0x1.aaaaacp-2f) + (m > 0x1.2aaaacp-1f) + (m > 0x1.aaaaacp-1f);
  return (kCodesByMagnitude >> (4 * rank) & 7u) | (bits >> 31 << 3);
}

template <Format4Bit kFormat>
PARKA_HOST_DEVICE inline uint32_t encode_4bit(float t) {
  if constexpr (kFormat == Format4Bit::kNf4) {
    return encode_nf4(t);
  } else {
    return encode_fp4(t);
  }
}

// The "dynamic" map by which bitsandbytes quantizes the scales of blocks to 8 bits: 256 values from -0.99 to 1 in
// rising order, the denser the nearer to zero; 0 is code 127.
using DynamicMap = std::array<float, 256>;
const DynamicMap& dynamic_map();

}  // namespace parka
