#pragma once
#include <cstdint>

#include "core/number_formats.h"
#include "core/tensor.h"
#include "kernels/op/op.h"

namespace parka {

// A moment of a parameter tensor of N elements. Its number format decides what is stored:
//   fp32 / bf16                     : values [N], no scale, no exponent
//   e4m3                            : codes [N]; amax [ceil(N / 128)] fp32;            value = amax * q / max
//   e4m3 with exponent (range expansion): ... and exponent [ceil(N / 128)] uint8, k = exponent / 16;
//                                       value = sgn(q) * amax * (|q| / max)^(1 / k)
// Groups are 128 consecutive elements of the tensor in memory order; the last may be short. Zeroed memory decodes
// to zeros, so a moment starts as zeroed memory. See docs/precision.md.
//
// Storing a group in fp8 (COAT, arXiv 2410.19313, without its centring, which cancels):
//   amax = max |x|, raised to kSmallestMomentAmax unless it is 0;  a group of zeros has amax 0 and codes 0
//   q = sgn(x) * rn(max * (|x| / amax)^k), to nearest even;           k = 1 without range expansion
//   A nonzero second moment is stored at least as the smallest code, never as 0: a zero under a nonzero first
//   moment would explode the update. A first moment may round to 0. Zero has only the code 0x00.
// A non-finite amax is never stored: the CPU throws Error(kInternal), CUDA stores the group as zeros.
struct MomentView {
  TensorView values;
  TensorView amax;      // e4m3 only
  TensorView exponent;  // e4m3 with range expansion only
};
inline constexpr int64_t kMomentGroup = 128;

enum class MasterForm : uint8_t {
  kFp32,       // bf16 weight plus the 16 bits that it lacks of an fp32 master (core/split_float.h)
  kFp24Split,  // bf16 weight plus the 8 bits that it lacks of a 24-bit master, rounded by rounding_phase()
  kBf16Sr,     // bf16 only, updated with stochastic rounding
  kNone,       // the compute weight is fp32 and is its own master
};

// AdamW, decoupled weight decay (Loshchilov & Hutter 2019), one parameter tensor:
//   m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
//   w -= lr * (m / bias1 / (sqrt(v / bias2) + eps) + weight_decay * w),  bias_i = 1 - b_i^t
// with g = gradient * grad_scale. The update uses m and v before they are rounded to their format. Moments are
// evaluated as m + (1 - b)(g - m): the only rounded constant is 1 - b, so b2 = 0.999 is not off by 1e-5.
// A range that begins at a multiple of 128 elements can be stepped on its own, with the same result.
struct AdamwStep {
  TensorView weight;  // [N] fp32 (kNone) or bf16, in/out: what the model computes with
  // [N] uint16 or uint8 with the remainder's bits (kFp32, kFp24Split), or empty, in/out
  TensorView master;
  MasterForm master_form;
  TensorView gradient;    // [N] fp32 or bf16, in
  MomentView exp_avg;     // m, in/out, in one format with v
  MomentView exp_avg_sq;  // v, in/out
  // Hyperparameters of this step. The host computes bias corrections in double from a 64-bit step count.
  float lr;
  double beta1, beta2;  // double, so that 1 - beta can be rounded once
  float eps;
  float weight_decay;                        // 0 for tensors that are not decayed
  float bias_correction1, bias_correction2;  // 1 - beta^t
  TensorView grad_scale;  // [1] fp32, in: clipping coefficient (clip_coefficient); not finite: nothing is changed
  // [1] fp32, in/out, not negative; empty: not wanted. Becomes max(weight_amax, max |weight|) of the weight as
  // stored after the step, even if nothing was changed; NaN is ignored. So quantize() need not read the weight.
  TensorView weight_amax = {};
  // kBf16Sr: the random bits of element i are word e % 4 of philox4x32(seed, stream = step, index = e / 4) with
  // e = first_element + i; encode_bf16_stochastic takes their low half. kFp24Split: rounding_phase(step, e).
  uint64_t seed;
  uint64_t step;
  uint64_t first_element;  // position of element 0 in the flat parameter space, the same for every world size;
                           // a multiple of 128
};
// If grad_scale is finite, the gradients must be finite too: clip_coefficient ensures it. Does nothing for N == 0.
PARKA_OP(adamw_step, AdamwStep);

// k * 16 of a group with maximum `amax` and smallest nonzero magnitude `amin`:
// clamp(floor(16 * log2(R) / log2(amax / amin)), 16, 255). R = 448 * 448 / 2 is the range that the group is
// expanded to, as in COAT. The result is 16 (k = 1) for a group of one magnitude or of zeros, and for a group wider
// than R: k < 1 would make every member coarser to save the smallest. Used by CPU reference and tests.
uint8_t range_expansion_exponent(float amax, float amin);

// The smallest nonzero amax that is stored, 2^-126 * max / smallest subnormal = 2.7e-33.
// With it every code decodes to a normal fp32 number, so devices that flush subnormals read the same values.
// Members of a smaller group are stored relative to it: a first moment may become 0, a second moment does not.
inline constexpr float kSmallestMomentAmax = 0x1p-126f * (kE4M3Traits.max / kE4M3Traits.min_subnormal);

// Encode `values` (fp32 [N]) into a moment's format, and decode them: what adamw_step does around its update.
// With `is_second`, nonzero values never become code 0 (a zero v with a nonzero m would explode the update).
struct MomentEncode {
  TensorView values;  // [N] fp32, in
  MomentView moment;  // out
  bool is_second;
};
PARKA_OP(moment_encode, MomentEncode);

struct MomentDecode {
  MomentView moment;  // in
  TensorView values;  // [N] fp32, out
};
PARKA_OP(moment_decode, MomentDecode);

}  // namespace parka
