#pragma once
#include <string>
#include <vector>

#include "kernels/device.h"

namespace parka {

// Which of cuBLASLt's algorithms to use for one matrix product.
struct GemmChoice {
  std::string gemm;       // as cost_of(Gemm).shape describes it
  std::string algorithm;  // cuBLASLt's own form of it, 64 bytes in hexadecimal: valid for one library version
  double microseconds = 0;
  double default_microseconds = 0;  // of the library's first choice
};

// Version of the cuBLASLt in use, "13.1.0"; empty without CUDA.
std::string gemm_library_version();

// Makes gemm() on a CUDA device use these algorithms, for products that have not run yet. Throws Error(kBadInput)
// for text that is no algorithm; one that the library refuses when the product comes is an Error(kBadInput) too.
void choose_gemm_algorithms(Device& device, const std::vector<GemmChoice>& choices);

struct GemmTuneOptions {
  int max_candidates = 16;         // per product, of those that the library proposes
  double warm_seconds = 0.5;       // of load before measuring, so that the card is at its sustained clock
  double candidate_seconds = 0.1;  // of measuring per candidate, spread over rounds that take turns
};
// Times the library's candidates for every product that has run on the device since the last call, on the operands
// of its latest run. Outputs are overwritten. The first in the result is the one that takes most time.
std::vector<GemmChoice> tune_gemms(Device& device, const GemmTuneOptions& options);

}  // namespace parka
