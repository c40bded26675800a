#pragma once
#include <cstdint>
#include <vector>

namespace parka {

// How a token is drawn from logits: the temperature comes first, then top_k, then top_p among the tokens left.
struct SamplingOptions {
  double temperature = 0.8;  // divides the logits; 0: always the most likely token, the first of equal ones
  int64_t top_k = 0;         // among the k most likely tokens; 0: all
  double top_p = 1.0;        // among the fewest most likely tokens with at least this total probability; 1: all
  int64_t seed = 0;
};

// A token drawn from [V] logits. Equal logits, seed, stream and index give the same one. Throws Error(kNonFinite)
// when a logit is not finite.
int32_t sample_token(const std::vector<float>& logits, const SamplingOptions& options, uint64_t stream,
                     uint64_t index);

}  // namespace parka
