#pragma once
#include <cstdint>
#include <vector>

#include "kernels/ops/attention/rope.h"
#include "tests/support/tensors.h"

// Queries and keys with joint scales, as rope_forward saves them.
namespace parka::test {

struct JointShape {
  int64_t T, S, H, Hkv, D, group;
  DType scales = DType::kBF16;

  int64_t width() const { return (H + 2 * Hkv) * D; }
  int64_t joint_heads() const { return H + Hkv; }  // of queries and keys
  int64_t joint_columns() const { return joint_heads() * D; }
  int64_t tiles() const { return ceil_div(T, kJointRows); }
  int64_t at(int64_t t, int64_t head, int64_t d) const { return t * width() + head * D + d; }
};

// What rope_forward leaves of x.
struct JointRotation {
  JointRotation(Device& device, const JointShape& s, DType dtype, const std::vector<float>& x,
                const std::vector<float>& cos_sin, bool joint_scales = true)
      : qkv(device, dtype, {s.T, s.width()}, x),
        table(device, DType::kF32, {s.S, s.D}, cos_sin),
        saved(device, DType::kE4M3, s.T, s.width(), Scaling::kGroup, s.group, s.scales) {
    rope_forward(device, {.qkv = qkv,
                          .cos_sin = table,
                          .num_heads = s.H,
                          .num_kv_heads = s.Hkv,
                          .saved = saved,
                          .joint_scales = joint_scales});
  }
  bool guards_intact() const { return qkv.guard_intact() && table.guard_intact() && saved.guard_intact(); }

  TestTensor qkv, table;
  TestMatrix saved;
};

}  // namespace parka::test
