#pragma once
#include <string_view>

#include "core/tensor.h"
#include "kernels/op/op.h"
#include "kernels/ops/gemm/gemm.h"

namespace parka {

// The function of the gate: act(g) = g sig(v(g)),  sig(v) = 1 / (1 + exp(-v)).
enum class GateActivation : uint8_t {
  kSilu,      // v(g) = g
  kGeluTanh,  // v(g) = 2 sqrt(2 / pi) (g + 0.044715 g^3): g (1 + tanh(v / 2)) / 2, as in Gemma
};
inline constexpr float kGeluLinear = 1.5957691216f, kGeluCubic = 0.044715f * kGeluLinear;

// product[t,f] = up[t,f] * act(gate[t,f])
// up_gate holds [up | gate]: the first F columns are up, the last F gate (OLMo's order).
struct SwigluForward {
  ScaledView up_gate;  // [T, 2F] fp32, bf16, or fp8 kGroup, in; a group never spans the two halves (F % group == 0)
  // [T, F] fp8 kGroup, out: act(gate), as in COAT, from whose decoded values product is computed. Empty: fp32.
  ScaledView silu = {};
  ScaledView product;         // [T, F] fp32, bf16, or fp8, out
  ScaledView product_t = {};  // [F, T] fp8, out: the product transposed for the weight gradient; empty: not wanted;
                              // shares a kTensor scale with product, and a kGroup one has its groups along T
  // [T, 2F] fp32 or bf16, in: if given, up_gate is an output, fp8 kGroup, quantized from this. The product is
  // computed from the decoded up_gate, so that backward uses the same numbers. Empty: up_gate is an input.
  TensorView up_gate_plain = {};
  GateActivation activation = GateActivation::kSilu;
  // [T] fp32, in: multiplies each row of the product; a row whose factor is 0 is zeros. Empty: ones.
  TensorView row_factor = {};
};
PARKA_OP(swiglu_forward, SwigluForward);
int64_t workspace_of(const SwigluForward& a);
void check_swiglu_forward(const SwigluForward& a);  // for ops that it is a part of

inline constexpr int64_t kAmaxSampling = 16;
inline constexpr float kAmaxRoom = 64.0f;

// d_up = d_product * act(gate);  d_gate = d_product * up * act'(gate),  act' = sig + act * v' * (1 - sig), with v'
// of the gate and sig of v. Also recomputes the product, transposed, for the weight gradient of the down
// projection.
struct SwigluBackward {
  ScaledView up_gate;         // [T, 2F], in
  ScaledView silu = {};       // [T, F] as saved by forward, in: used for act(gate); empty if forward saved none
  TensorView d_product = {};  // [T, F] fp32 or bf16, in; empty: only the product is wanted
  ScaledView d_up_gate = {};  // [T, 2F] fp32, bf16, or fp8 with any scaling, out; empty: not wanted
  // [2F, T] fp8, out: d_up_gate transposed; empty: not wanted; shares a kTensor scale with d_up_gate
  ScaledView d_up_gate_t = {};
  // Finds the kTensor scale of an E5M2 d_up_gate from a sample: not from M = max |d_up_gate|, but from kAmaxRoom
  // times the maximum over tokens 0, kAmaxSampling, 2 kAmaxSampling, ..., unless M is larger than that. Then M
  // alone counts, so nothing exceeds the format. E5M2 has powers of two to spare, and the numbers are computed once
  // instead of twice.
  bool samples_amax = false;
  ScaledView product = {};    // [T, F], out; empty: not wanted. kTensor: its scale is an input (saved by forward)
  ScaledView product_t = {};  // [F, T], out; empty: not wanted. kTensor: its scale is an input (saved by forward)
  GateActivation activation = GateActivation::kSilu;
  TensorView row_factor = {};  // [T] fp32, in: as SwigluForward's; multiplies d_product and the product
};
PARKA_OP(swiglu_backward, SwigluBackward);
int64_t workspace_of(const SwigluBackward& a);

// The gradient of SwigluForward::row_factor:
//   d_row_factor[t] = sum over f of d_product[t,f] * up[t,f] * act(gate[t,f])
struct SwigluRowGradient {
  ScaledView up_gate;       // [T, 2F] as SwigluBackward's, in
  ScaledView silu = {};     // [T, F] as saved by forward, in; empty if it saved none
  TensorView d_product;     // [T, F] fp32 or bf16, in
  TensorView d_row_factor;  // [T] fp32, out
  GateActivation activation = GateActivation::kSilu;
};
PARKA_OP(swiglu_row_gradient, SwigluRowGradient);

// gemm() and the swiglu_forward() of what it leaves: up_gate [T, 2F] = x [T, K] W [2F, K]^T, and the product made
// of it. One op where suits_one_kernel(), otherwise these two.
struct SwigluProjection {
  static constexpr std::string_view kName = "swiglu_projection";
  Gemm projection;  // out is swiglu.up_gate_plain, bf16 or fp32 [T, 2F]: scratch, with anything in it afterwards
  SwigluForward swiglu;  // makes fp8 of it
};
PARKA_OP(swiglu_projection, SwigluProjection);
int64_t workspace_of(const SwigluProjection& a);

// True if formats and alignment suit one kernel of compute capability 9.0, without the projection in memory.
bool suits_one_kernel(const SwigluProjection& a);
// True if swiglu_projection() is to be called rather than the two ops: it is one kernel here, for as many numbers.
bool runs_as_one(const Device& device, const SwigluProjection& a);
void run_as_two(Device& device, const SwigluProjection& a);
namespace cuda {
bool has_one_kernel(Device& device, const SwigluProjection& a);
}

}  // namespace parka
