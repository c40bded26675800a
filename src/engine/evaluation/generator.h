#pragma once
#include <cstdint>
#include <functional>
#include <vector>

#include "engine/text/image_geometry.h"
#include "kernels/device/device.h"
#include "model/model.h"

namespace parka {

// How a token is drawn from logits: the temperature comes first, then top_k, then top_p among the tokens left.
struct SamplingOptions {
  double temperature = 0.8;  // divides the logits; 0: always the most likely token, the first of equal ones
  int64_t top_k = 0;         // among the k most likely tokens; 0: all
  double top_p = 1.0;        // among the fewest most likely tokens with at least this total probability; 1: all
  int64_t seed = 0;
};

// A token drawn from [V] logits, a function of all arguments. Throws Error(kNonFinite) when a logit is not finite.
int32_t sample_token(const std::vector<float>& logits, const SamplingOptions& options, uint64_t stream,
                     uint64_t index);

struct GenerationOptions {
  SamplingOptions sampling;
  int64_t num_tokens = 200;              // of each continuation, at most
  std::vector<int32_t> stop_tokens;      // a continuation ends before any of these
  const PromptImages* images = nullptr;  // of the prompt, where there is one alone
};

// Called with each token as it is drawn: the number of the prompt that it continues, and the token.
using TokenListener = std::function<void(size_t prompt, int32_t token)>;

struct Continuation {
  std::vector<int32_t> tokens;
  bool stopped = false;  // by a stop token, not for its length
};

// Continues every prompt, as many at a time as the model's cache has slots. If a sequence outgrows the cache, it
// continues with as many of its latest tokens as fit. Their positions change with every token, so each then costs a
// forward pass, and earlier rows of images are not seen. `model` has a cache of `shape`; prompts have tokens.
std::vector<Continuation> generate(Device& device, Model& model, const CacheShape& shape,
                                   const std::vector<std::vector<int32_t>>& prompts,
                                   const GenerationOptions& options, const TokenListener& listener = {});

}  // namespace parka
