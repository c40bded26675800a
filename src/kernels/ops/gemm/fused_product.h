#pragma once
#include <string>
#include <string_view>
#include <variant>

#include "kernels/ops/attention/rope_projection.h"
#include "kernels/ops/swiglu/swiglu_projection.h"

// A product and the op that reads what it leaves, which may be one kernel on GPUs of compute capability 9.0. Which
// is faster, tuning finds out (docs/tuning.md).
namespace parka {

struct FusedProduct : std::variant<SwigluProjection, RopeProjection> {
  using variant::variant;
};

// The op that is both, and the two that it stands for.
std::string_view op_of(const FusedProduct& a);
bool is_fused_product(std::string_view op);
void run_as_one(Device& device, const FusedProduct& a);
void run_as_two(Device& device, const FusedProduct& a);

// What it is decided for whether one kernel is faster: the product's own key_of() and what is made of it. It leaves
// out which other outputs are wanted, so that a block that is run again makes the same bits, and the width of
// heads: a GPU that has no kernel for that runs two.
std::string key_of(const FusedProduct& a);
const Gemm& gemm_of(const FusedProduct& a);
int64_t workspace_of(const FusedProduct& a);

// Whether the device has one kernel for it. A CPU has wherever a GPU may: it does one thing after the other either
// way. Not for devices that record.
bool has_one_kernel(Device& device, const FusedProduct& a);

// Whether to call run_as_one() rather than the two ops: the device has chosen it, and formats and alignment suit
// one kernel. Tells the device's ProductRecorder that there is a choice.
bool chooses_one_kernel(Device& device, const FusedProduct& a);

}  // namespace parka
