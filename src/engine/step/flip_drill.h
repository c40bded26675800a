#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "kernels/device/bit_flip.h"
#include "optim/optimizer.h"

namespace parka {

// A drill of the checks for silent data corruption: it flips one bit, chosen by a seed, of one tensor on one rank
// in one step. docs/reliability.md explains the kinds.
struct FlipDrill {
  enum class Target : uint8_t {
    kWeight,    // a weight, after the update of the step
    kMoment,    // a master weight or a moment, after the update of the step
    kGradient,  // a gradient after the first micro-batch of the step
    kGemm,      // the output of a matrix product in the first micro-batch
  };
  Target target = Target::kWeight;
  int64_t step = 0;
  int64_t rank = 0;
  uint64_t seed = 0;
};

// "flip:weight:STEP", "flip:moment:STEP", "flip:gradient:STEP" or "flip:gemm:STEP", optionally with :RANK and
// :SEED. Throws Error(kBadInput) for any other text.
FlipDrill parse_flip_drill(const std::string& text);

// Flips a bit of one of `tensors`, chosen with a probability by its bytes, and logs which.
void flip_one_of(Device& device, const std::vector<NamedTensor>& tensors, const FlipDrill& drill);
// The fault of a kGemm drill in a micro-batch of about `num_gemms` matrix products.
std::unique_ptr<BitFlip> make_gemm_flip(const FlipDrill& drill, int64_t num_gemms);

}  // namespace parka
