#pragma once
#include <string_view>

#include "kernels/ops/gemm/gemm.h"
#include "kernels/ops/swiglu/swiglu.h"

namespace parka {

// gemm() and the swiglu_forward() of what it leaves: up_gate [T, 2F] = x [T, K] W [2F, K]^T, and the product made
// of it. One op where suits_one_kernel(), otherwise these two.
struct SwigluProjection {
  static constexpr std::string_view kName = "swiglu_projection";
  Gemm projection;  // out is swiglu.up_gate_plain, bf16 or fp32 [T, 2F]: scratch, with anything in it afterwards
  SwigluForward swiglu;  // makes fp8 of it
};
PARKA_OP(swiglu_projection, SwigluProjection);
int64_t workspace_of(const SwigluProjection& a);

// Whether formats and alignment suit one kernel, which GPUs of compute capability 9.0 have. It never has the
// projection's bf16 numbers in memory.
bool suits_one_kernel(const SwigluProjection& a);
// Whether to call swiglu_projection() rather than the two ops: it is one kernel here, for as many numbers.
bool runs_as_one(const Device& device, const SwigluProjection& a);
void run_as_two(Device& device, const SwigluProjection& a);
namespace cuda {
bool has_one_kernel(Device& device, const SwigluProjection& a);
}

}  // namespace parka
