#pragma once
#include "kernels/ops/attention_decode.h"

namespace parka::cuda {

void cache_append(Device& device, const CacheAppend& a);
void attention_decode(Device& device, const AttentionDecode& a);

}  // namespace parka::cuda
