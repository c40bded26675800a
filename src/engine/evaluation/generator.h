#pragma once
#include <cstdint>
#include <functional>
#include <vector>

#include "engine/evaluation/sampling.h"
#include "kernels/device/device.h"
#include "model/model.h"

namespace parka {

struct GenerationOptions {
  SamplingOptions sampling;
  int64_t num_tokens = 200;          // of each continuation, at most
  std::vector<int32_t> stop_tokens;  // a continuation ends before any of these
};

// Told of each token as it is drawn: which prompt it continues, and the token.
using TokenListener = std::function<void(size_t prompt, int32_t token)>;

struct Continuation {
  std::vector<int32_t> tokens;
  bool stopped = false;  // by a stop token, not for its length
};

// Continues every prompt, as many at a time as the model's cache has slots. A sequence that has outgrown the cache
// goes on with its latest tokens alone, as many as the cache has room for; their positions change with every token,
// so that each then costs a whole forward. `model` has a cache of `shape`, and prompts are not empty.
std::vector<Continuation> generate(Device& device, Model& model, const CacheShape& shape,
                                   const std::vector<std::vector<int32_t>>& prompts,
                                   const GenerationOptions& options, const TokenListener& listener = {});

}  // namespace parka
