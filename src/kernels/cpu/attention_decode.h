#pragma once
#include "kernels/ops/attention_decode.h"

namespace parka::cpu {

void cache_append(Device& device, const CacheAppend& a);
void attention_decode(Device& device, const AttentionDecode& a);

}  // namespace parka::cpu
