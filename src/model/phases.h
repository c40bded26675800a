#pragma once
#include "core/memory_plan.h"

namespace parka {

// Parts of a run, for MemoryPlan: buffers that are never alive in the same phase share memory.
enum Phase : PhaseMask {
  kForwardAttention = 1u << 0,  // first half of a block: norm, QKV, attention, output projection
  kForwardFfn = 1u << 1,        // second half: norm, up and gate, SwiGLU, down
  kHead = 1u << 2,              // final norm, logits, loss and their backward
  kBackwardFfn = 1u << 3,
  kBackwardAttention = 1u << 4,
  kRerun = 1u << 5,       // recompute = block: the block's forward again, inside backward
  kEvaluation = 1u << 6,  // between steps, with another precision than training's
};
inline constexpr PhaseMask kBackward = kBackwardFfn | kBackwardAttention | kRerun;
inline constexpr PhaseMask kStep = kForwardAttention | kForwardFfn | kHead | kBackward;

}  // namespace parka
