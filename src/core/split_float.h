#pragma once
#include <bit>
#include <cstdint>

#include "core/host_device.h"
#include "core/number_formats.h"

// A float32 split into the bfloat16 that the model computes with and the 16 bits that it lacks. So an exact fp32
// master weight takes two bytes beside the weight instead of four.
//   weight    = (bits + 0x8000) >> 16        nearest bfloat16, ties away from zero
//   remainder = bits - (weight << 16)        a signed number, -0x8000 .. 0x7fff, in units of the last place
// The two formulas give remainder = bits mod 2^16: read as unsigned, the remainder is the low half of the float,
// and only the weight shows whether rounding went up. Hence
//   bits = (weight << 16) + sign_extend(remainder)   (mod 2^32)
// for each of the 2^32 patterns. Ties go away from zero, not to even, because the remainder of a tie must show
// which way it was rounded: 0x8000 always means "rounded up". Magnitudes from 0x1.ffp127 on round to infinity, and
// the weight of a NaN need not be a NaN: masters are finite.
namespace parka {

struct SplitFloat {
  BFloat16 weight;
  uint16_t remainder;  // two's complement bits of the signed number
};

PARKA_HOST_DEVICE inline SplitFloat split_float(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  return {{static_cast<uint16_t>((bits + 0x8000u) >> 16)}, static_cast<uint16_t>(bits)};
}

PARKA_HOST_DEVICE inline float join_float(BFloat16 weight, uint16_t remainder) {
  const uint32_t borrow = remainder & 0x8000u ? 0x10000u : 0u;
  return std::bit_cast<float>((uint32_t{weight.bits} << 16) + remainder - borrow);
}

}  // namespace parka
