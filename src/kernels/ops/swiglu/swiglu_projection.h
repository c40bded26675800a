#pragma once
#include <string>

#include "kernels/ops/gemm/gemm.h"
#include "kernels/ops/swiglu/swiglu.h"

namespace parka {

// gemm() and the swiglu_forward() of what it leaves: up_gate [T, 2F] = x [T, K] W [2F, K]^T, and the product made
// of it. One op where suits_one_kernel(), otherwise these two.
struct SwigluProjection {
  Gemm projection;  // out is swiglu.up_gate_plain, bf16 or fp32 [T, 2F]: scratch, with anything in it afterwards
  SwigluForward swiglu;  // makes fp8 of it
};
PARKA_OP(swiglu_projection, SwigluProjection);
int64_t workspace_of(const SwigluProjection& a);

// Whether formats and alignment are those of the kernel for GPUs of compute capability 9.0 that does both: the
// projection's bf16 numbers never lie in memory. Other GPUs run two kernels.
bool suits_one_kernel(const SwigluProjection& a);

// Whether the device has that kernel for it. A CPU has: it does one thing after the other either way. Not for
// devices that record.
bool has_one_kernel(Device& device, const SwigluProjection& a);
namespace cuda {
bool has_one_kernel(Device& device, const SwigluProjection& a);
}

// What it is decided for whether one kernel is faster: the product's own key_of() and the groups of up and gate.
// Not what else it leaves, so that a block that is run again makes the same bits.
std::string key_of(const SwigluProjection& a);

// Whether to call swiglu_projection() rather than gemm() and swiglu_forward(): the device has chosen it, and it
// suits one kernel. Tells the device's ProductRecorder that there is a choice.
bool chooses_one_kernel(Device& device, const SwigluProjection& a);

}  // namespace parka
