#pragma once
#include <cstdint>
#include <string_view>
#include <vector>

#include "core/tensor.h"
#include "kernels/op/op.h"
#include "kernels/ops/gemm/gemm.h"

namespace parka {

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

// The contents of cos_sin, [S, D] row-major. Angles, cosines and sines in double, rounded once to fp32. D is even.
std::vector<float> rope_table(int64_t sequence_length, int64_t head_dim, double theta,
                              const RopeScaling& scaling = {});

// gemm() and the rope_forward() of what it leaves: qkv [T, W] = x [T, K] W_qkv [W, K]^T, W = (H + 2 Hkv) D, queries
// and keys rotated and all saved in FP8. One op where suits_one_kernel(), otherwise these two.
struct RopeProjection {
  static constexpr std::string_view kName = "rope_projection";
  Gemm projection;   // out is rope.qkv
  RopeForward rope;  // with `saved`
};
PARKA_OP(rope_projection, RopeProjection);
int64_t workspace_of(const RopeProjection& a);

// True if formats and alignment suit one kernel, which GPUs of compute capability 9.0 have. It writes to qkv what
// the codes decode to, once, and never reads it.
bool suits_one_kernel(const RopeProjection& a);
// True if rope_projection() is to be called rather than the two ops: it is one kernel here, for as many numbers.
bool runs_as_one(const Device& device, const RopeProjection& a);
void run_as_two(Device& device, const RopeProjection& a);
namespace cuda {
bool has_one_kernel(Device& device, const RopeProjection& a);
}

}  // namespace parka
