#include "kernels/ops/attention/attention.h"
#include "model/layers/attention.h"

namespace parka {

void Attention::append_to_cache(const StepContext& step, const TensorView& qkv) const {
  const KvCache& cache = *step.cache;
  cache_append(step.device, {.qkv = qkv,
                             .cache = step.arena[cache.blocks[static_cast<size_t>(block_)]],
                             .slot = step.vector(cache.slot, step.num_tokens()),
                             .position = step.vector(cache.position, step.num_tokens()),
                             .num_heads = num_heads_,
                             .num_kv_heads = num_kv_heads_});
}

void Attention::attend_to_cache(const StepContext& step, const TensorView& qkv, const TensorView& out,
                                const TensorView& amax) const {
  const KvCache& cache = *step.cache;
  attention_decode(step.device, {.qkv = qkv,
                                 .cache = step.arena[cache.blocks[static_cast<size_t>(block_)]],
                                 .slot = step.vector(cache.slot, step.num_tokens()),
                                 .position = step.vector(cache.position, step.num_tokens()),
                                 .out = out,
                                 .max_keys = step.num_keys,
                                 .num_heads = num_heads_,
                                 .num_kv_heads = num_kv_heads_,
                                 .scale = scale_,
                                 .out_amax = amax,
                                 .window = window_});
}

}  // namespace parka
