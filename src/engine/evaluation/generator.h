#pragma once
#include <cstdint>
#include <functional>
#include <vector>

#include "engine/evaluation/sampling.h"
#include "engine/text/image_prompt.h"
#include "kernels/device/device.h"
#include "model/model.h"

namespace parka {

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
// continues with its latest tokens, as many as fit in the cache. Their positions change with every token, so each
// then costs a whole forward pass. `model` has a cache of `shape`, and prompts are not empty. Only rows of images
// that lie in the latest tokens are seen.
std::vector<Continuation> generate(Device& device, Model& model, const CacheShape& shape,
                                   const std::vector<std::vector<int32_t>>& prompts,
                                   const GenerationOptions& options, const TokenListener& listener = {});

}  // namespace parka
