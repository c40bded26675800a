#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "kernels/device/device.h"

namespace parka {

// Which of cuBLASLt's algorithms to use for one GEMM.
struct GemmChoice {
  std::string gemm;       // its shape, formats and, where not full, alignment: key_of() of the op
  std::string algorithm;  // cuBLASLt's own form of it, 64 bytes in hexadecimal: valid for one library version
  double microseconds = 0;
  double default_microseconds = 0;  // of the library's first choice, measured in turn with it
  std::string shape = {};           // as cost_of(Gemm).shape describes it; not kept in files
};

// Version of the cuBLASLt in use, "13.1.0"; empty without CUDA.
std::string gemm_library_version();

// Makes gemm() on a CUDA device use these algorithms, for products that have not run yet. Throws Error(kBadInput)
// for text that is no algorithm; one that the library refuses when the product comes is an Error(kBadInput) too.
void choose_gemm_algorithms(Device& device, const std::vector<GemmChoice>& choices);

struct GemmTuneOptions {
  int max_candidates = 64;       // per product: those that the library proposes, and variations of them
  double warm_seconds = 2.5;     // of all products in turn before measuring
  double settle_seconds = 0.15;  // of a finalist alone, before each time that it is measured
  double measured_seconds = 0.15;
  int rounds = 3;               // in which every finalist is measured once
  double budget_seconds = 150;  // for all; settling and measuring are shortened to fit: divide_measuring()
  std::map<std::string, int64_t> counts = {};  // of runs in a step, by key_of(); 1 where there is none
};
// Times candidates for every product that has run on the device since the last call, each against the library's
// first choice, which stays unless another is clearly faster. Operands, outputs and scales of those products'
// latest runs are overwritten with random numbers. The first in the result is the one that takes most time.
//
// A finalist runs alone until the clock has settled to the power that it draws, for a step is held back by the
// card's power limit: let products take t seconds and e joules at the clock of a step, P be the limit, time go as
// f^-a and energy as f^b with the clock f. A change of one product by dt and de then lengthens the step by
// (b dt + a de / P) / (a + b), and that is what the change does to the product's own time at the limit. In short
// turns with others it would be timed at their clock, where only dt shows.
std::vector<GemmChoice> tune_gemms(Device& device, const GemmTuneOptions& options);

// Makes a device use what tune_gemms() chose on it, from here on: what it computes then may have other bits.
void replace_gemm_algorithms(Device& device, const std::vector<GemmChoice>& choices);

}  // namespace parka
