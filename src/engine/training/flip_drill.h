#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "kernels/device/bit_flip.h"
#include "optim/optimizer.h"

namespace parka {

// A drill of the checks for silent data corruption: one bit of one tensor on one rank is flipped in one step,
// chosen by a seed. docs/reliability.md says what each kind stands for.
struct FlipDrill {
  enum class Target : uint8_t {
    kWeight,    // a weight, after the update of the step
    kMoment,    // a master weight or a moment, after the update of the step
    kGradient,  // a gradient that the first micro-batch of the step has left
    kGemm,      // what a matrix product of the first micro-batch of the step writes
  };
  Target target = Target::kWeight;
  int64_t step = 0;
  int64_t rank = 0;
  uint64_t seed = 0;
};

// "flip:weight:STEP", "flip:moment:STEP", "flip:gradient:STEP", "flip:gemm:STEP", each with :RANK and :SEED if need
// be. Throws Error(kBadInput) for another text.
FlipDrill parse_flip_drill(const std::string& text);

// Chooses among `tensors` by their bytes, flips a bit of one, says which in the log.
void flip_one_of(Device& device, const std::vector<NamedTensor>& tensors, const FlipDrill& drill);
// The fault of a kGemm drill in a micro-batch of about `num_gemms` matrix products.
std::unique_ptr<BitFlip> make_gemm_flip(const FlipDrill& drill, int64_t num_gemms);

}  // namespace parka
