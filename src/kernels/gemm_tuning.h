#pragma once
#include <string>
#include <vector>

#include "kernels/device.h"

namespace parka {

// Which of cuBLASLt's algorithms to use for one matrix product.
struct GemmChoice {
  std::string gemm;       // its shape, formats and, where not full, alignment, as the GEMM cache names it
  std::string algorithm;  // cuBLASLt's own form of it, 64 bytes in hexadecimal: valid for one library version
  double microseconds = 0;
  double default_microseconds = 0;  // of the library's first choice, measured in turn with the chosen one
  std::string shape = {};           // as cost_of(Gemm).shape describes it; not kept in files
};

// Version of the cuBLASLt in use, "13.1.0"; empty without CUDA.
std::string gemm_library_version();

// Makes gemm() on a CUDA device use these algorithms, for products that have not run yet. Throws Error(kBadInput)
// for text that is no algorithm; one that the library refuses when the product comes is an Error(kBadInput) too.
void choose_gemm_algorithms(Device& device, const std::vector<GemmChoice>& choices);

struct GemmTuneOptions {
  int max_candidates = 64;         // per product: those that the library proposes, and variations of them
  double warm_seconds = 2.5;       // of all products in turn before measuring, so that clocks are as in training
  double candidate_seconds = 0.3;  // of measuring per finalist
  double budget_seconds = 90;      // for all; measuring is shortened to fit
};
// Times candidates for every product that has run on the device since the last call, under sustained load and in
// turn with the library's first choice, which stays unless another is clearly faster. Operands, outputs and scales
// of those products' latest runs are overwritten with random numbers. The first in the result is the one that takes
// most time.
std::vector<GemmChoice> tune_gemms(Device& device, const GemmTuneOptions& options);

}  // namespace parka
