#pragma once
#include <cstdint>
#include <vector>

#include "core/memory/memory_plan.h"
#include "model/model_config.h"

namespace parka {

// How much a cache of keys and values holds.
struct CacheShape {
  int64_t num_slots = 0;   // sequences
  int64_t max_length = 0;  // tokens of each
};

// The keys and values of sequences that are being generated, and what a pass needs to add a token to each.
struct KvCache {
  // Declares ("kv cache") it in the compute format, in which values that a recipe keeps in FP8 are decoded.
  KvCache(const ModelConfig& model, const PrecisionConfig& precision, const CacheShape& shape, MemoryPlan& plan);

  CacheShape shape;
  std::vector<TensorId> blocks;  // [slots, max_length, 2 * Hkv * D] for each block, see ops/attention/attention.h
  TensorId slot, position;       // [max(slots, max_length)] int32: of the rows of the batch at hand
  // [slots, D] fp32: rows of the rotary table, of any positions; of blocks with a window where theirs is another.
  TensorId cos_sin, windowed_cos_sin;
};

}  // namespace parka
