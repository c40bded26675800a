#pragma once

namespace parka {

// Whether a sum overwrites its output, or adds to it: of gradients over the micro-batches of a step, and of a
// reduction over ranks.
enum class Accumulation {
  kBegin,     // overwrites: the output may hold anything
  kContinue,  // adds to the old value
};

}  // namespace parka
