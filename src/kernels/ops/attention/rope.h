#pragma once
#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>
#include <vector>
#include "kernels/op/op.h"

#include "core/host_device.h"
#include "core/tensor.h"

namespace parka {

// Joint scales: one scale for all columns of a head in kJointRows rows, those from a multiple of kJointRows on.
// Such codes are operands of products as they are: the scale comes out of a tile's sums.
constexpr int64_t kJointRows = 64;

// What YaRN may multiply cosines and sines by for joint scales to have room for it: with a rotation, which adds at
// most a factor of sqrt 2, it makes 448 of 128.
constexpr double kJointAmplitude = 2.4;

// The joint scale of values of which `amax` is the largest magnitude before they are rotated: the power of 2 that
// makes that 64 to 128, where E4M3 reaches 448. So bf16 holds exactly what codes decode to. At least 2^-40;
// infinity of infinity.
PARKA_HOST_DEVICE inline float joint_scale(float amax) {
  constexpr uint32_t kExponent = 0x7f800000u, kOne = 1u << 23, kLeast = (127 - 40 + 6) * kOne;
  const uint32_t exponent = std::bit_cast<uint32_t>(amax) & kExponent;
  if (exponent == kExponent) return std::numeric_limits<float>::infinity();
  return std::bit_cast<float>((exponent < kLeast ? kLeast : exponent) - 6 * kOne);
}
// What values are multiplied by to become codes: 1 / scale, which is exact; 0 of infinity.
PARKA_HOST_DEVICE inline float inverse_of_joint_scale(float scale) {
  const int32_t bits = 0x7f000000 - std::bit_cast<int32_t>(scale);
  return std::bit_cast<float>(bits < 0 ? 0 : bits);
}

// Rotary position embedding (Su et al. 2021), half-split layout as in NeoX, OLMo and Llama. The pair
// (x[i], x[i + D/2]) of every query and key head is rotated by the angle position * theta^(-2i/D):
//   y[i]       = x[i] * cos - x[i + D/2] * sin
//   y[i + D/2] = x[i + D/2] * cos + x[i] * sin
// In place in the fused QKV buffer; value heads stay unchanged. The position of row t is t mod S.
struct RopeForward {
  TensorView qkv;      // [T, (H + 2 * Hkv) * D] fp32 or bf16, in/out: H query heads, Hkv key heads, Hkv value heads
  TensorView cos_sin;  // [S, D] fp32, in: D/2 cosines, then D/2 sines, from rope_table
  int64_t num_heads;
  int64_t num_kv_heads;
  // kGroup fp8 [T, (H + 2 * Hkv) * D], out: the rotated q and k, and v, as saved for backward. If given, qkv is
  // overwritten with the decoded saved values, so that attention forward and backward use the same numbers.
  ScaledView saved;
  // Whether queries and keys are saved as E4M3 with joint scales. Those are the scales of all of their groups, so
  // that `saved` is read as ever. Needs D a multiple of the group.
  bool joint_scales = false;
};
// D is even. `saved` is quantized from the rotated fp32 values, so each is rounded once. In backward,
// attention_backward rotates the gradients of queries and keys back.
PARKA_OP(rope_forward, RopeForward);
void check_rope_forward(const RopeForward& a);  // as rope_forward() does first

enum class RopeScalingKind : uint8_t { kNone, kLlama3, kLinear, kYarn };

// Scaling of the rotary frequencies, for positions beyond those that a model was first trained on. With kLinear all
// are divided by `factor`. With kLlama3 (Llama 3.1) a pair of frequency f (radians per position) and wavelength
// 2 pi / f gets the frequency
//   f                                wavelength < original_length / high_frequency_factor
//   f / factor                       wavelength > original_length / low_frequency_factor
//   f (s + (1 - s) / factor)         between them, where s rises from 0 to 1 with the frequency:
//     s = (original_length / wavelength - low_frequency_factor) / (high_frequency_factor - low_frequency_factor)
// With kYarn (Peng et al. 2023, as in transformers) pair i of D / 2 gets the frequency
//   f (1 - r) + f / factor r,  r = (i - low) / (high - low) within [0, 1]
// where low and high are the pairs that make beta_fast and beta_slow turns in original_length; and cosines and
// sines are multiplied by attention_factor, so that scores grow by its square. A gradient that is rotated back is
// multiplied with it, too, as it should be.
struct RopeScaling {
  RopeScalingKind kind = RopeScalingKind::kNone;
  double factor = 8.0;
  double low_frequency_factor = 1.0;
  double high_frequency_factor = 4.0;  // more than low_frequency_factor
  int64_t original_length = 8192;
  double beta_fast = 32.0;
  double beta_slow = 1.0;       // at most beta_fast
  double attention_factor = 0;  // 0: 0.1 ln factor + 1
  bool truncate = true;         // low is rounded down and high up to whole pairs

  bool operator==(const RopeScaling&) const = default;
};

// What cosines and sines are multiplied by: 1 but for kYarn.
double rope_amplitude(const RopeScaling& scaling);

// The contents of cos_sin, [S, D] row-major. Angles, cosines and sines in double, rounded once to fp32. D is even.
std::vector<float> rope_table(int64_t sequence_length, int64_t head_dim, double theta,
                              const RopeScaling& scaling = {});

}  // namespace parka
