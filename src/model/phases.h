#pragma once
#include "core/memory/memory_plan.h"

namespace parka {

// Parts of a run, for MemoryPlan: buffers that are never alive in the same phase share memory.
enum Phase : PhaseMask {
  kForwardAttention = 1u << 0,  // first half of a block: norm, QKV, attention, output projection
  kForwardFfn = 1u << 1,        // second half: norm, up and gate, SwiGLU, down
  kHeadNorm = 1u << 2,          // final norm
  kHead = 1u << 3,              // logits, loss and their backward, to the final norm's output
  kBackwardHeadNorm = 1u << 4,
  // Backward of the second half of a block: the down projection's input gradient; SwiGLU and the down projection's
  // weight gradient; up and gate. Then its norm.
  kBackwardDown = 1u << 5,
  kBackwardSwiglu = 1u << 6,
  kBackwardUpGate = 1u << 7,
  // Backward of the first half: the output projection; attention; its gradient's FP8 codes; QKV. Then its norm.
  kBackwardAttentionOut = 1u << 8,
  kBackwardAttention = 1u << 9,
  kBackwardQkvCodes = 1u << 10,
  kBackwardQkv = 1u << 11,
  kBackwardNorm = 1u << 12,  // of both halves
  kRerun = 1u << 13,         // recompute = block: the block's forward again, inside backward
  kEvaluation = 1u << 14,    // between steps, with another precision than training's
  kUpdate = 1u << 15,        // of weights, after backward
};
inline constexpr PhaseMask kBlockForward = kForwardAttention | kForwardFfn;
// The phases in which linear layers go backward.
inline constexpr PhaseMask kBackwardLinear = kBackwardDown | kBackwardUpGate | kBackwardAttentionOut | kBackwardQkv;
inline constexpr PhaseMask kBackward =
    kBackwardLinear | kBackwardSwiglu | kBackwardAttention | kBackwardQkvCodes | kBackwardNorm | kRerun;
// The head as a whole.
inline constexpr PhaseMask kWholeHead = kHeadNorm | kHead | kBackwardHeadNorm;
inline constexpr PhaseMask kStep = kBlockForward | kWholeHead | kBackward;

}  // namespace parka
