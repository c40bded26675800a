#pragma once
#include <string>
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

// The parts of a FusedProduct (fused_product.h). The kernel that does both writes to qkv what the codes decode to,
// once, and never reads it.
bool suits_one_kernel(const RopeProjection& a);
void run_as_one(Device& device, const RopeProjection& a);
void run_as_two(Device& device, const RopeProjection& a);
std::string effect_of(const RopeProjection& a);  // as key_of(FusedProduct) has it: the groups of what is saved
namespace cuda {
bool has_one_kernel(Device& device, const RopeProjection& a);
}

}  // namespace parka
