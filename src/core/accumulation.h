#pragma once

namespace parka {

// A sum overwrites its output, or adds to it: gradients over a step's micro-batches, reductions over ranks.
enum class Accumulation {
  kBegin,     // overwrites: the output may hold anything
  kContinue,  // adds to the old value
};

}  // namespace parka
