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

// ---- 24 bits ----

// fp24: a float32 without its last 8 bits, held here as a float32 in which they are 0. Split as above it is the
// bfloat16 and a signed number of 8 bits, in units of fp24's last place.
struct SplitFloat24 {
  BFloat16 weight;
  uint8_t remainder;  // two's complement bits of the signed number
};

// Takes 24 bits of x; the last 8 need not be 0.
PARKA_HOST_DEVICE inline SplitFloat24 split_float24(float x) {
  const SplitFloat split = split_float(std::bit_cast<float>(std::bit_cast<uint32_t>(x) & ~0xffu));
  return {split.weight, static_cast<uint8_t>(split.remainder >> 8)};
}

PARKA_HOST_DEVICE inline float join_float24(BFloat16 weight, uint8_t remainder) {
  return join_float(weight, static_cast<uint16_t>(remainder << 8));
}

// Rounds to fp24: away from zero where the lost fraction and that of `phase`, which counts in 2^-32, add up to 1.
// Numbers of fp24 stay as they are. Magnitudes past fp24's largest finite one may become infinite.
PARKA_HOST_DEVICE inline float round_to_float24(float x, uint32_t phase) {
  return std::bit_cast<float>((std::bit_cast<uint32_t>(x) + (phase >> 24)) & ~0xffu);
}
inline constexpr uint32_t kNearestPhase = 0x80000000u;  // ties away from zero

// The phase of an element at a step, for sums of many small updates. From step to step it turns by the golden
// ratio, the rotation whose points fill the circle most evenly: what one step rounds off, later ones give back, so
// that the sum is off by few units of the last place after any number of steps. Draws that are independent of each
// other would be off by the root of their number. Neighbouring elements are at different places of the circle.
inline constexpr uint32_t kPhaseOfStep = 0x9e3779b9u, kPhaseOfElement = 0x91e10da5u;
PARKA_HOST_DEVICE inline uint32_t rounding_phase(uint64_t step, uint64_t element) {
  return static_cast<uint32_t>(step) * kPhaseOfStep + static_cast<uint32_t>(element) * kPhaseOfElement;
}

}  // namespace parka
