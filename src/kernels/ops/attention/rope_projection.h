#pragma once
#include <string_view>

#include "kernels/ops/attention/rope.h"
#include "kernels/ops/gemm/gemm.h"

namespace parka {

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
