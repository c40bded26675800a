#include "model/kv_cache.h"

#include <algorithm>
#include <string>

namespace parka {

KvCache::KvCache(const ModelConfig& model, const PrecisionConfig& precision, const CacheShape& shape_,
                 MemoryPlan& plan)
    : shape(shape_) {
  const int64_t width = 2 * model.kv_heads() * model.head_dim();
  for (int64_t l = 0; l < model.num_layers; ++l) {
    blocks.push_back(plan.add("kv cache", "blocks." + std::to_string(l) + ".kv", precision.compute,
                              {shape.num_slots, shape.max_length, width}));
  }
  const int64_t rows = std::max(shape.num_slots, shape.max_length);
  slot = plan.add("kv cache", "slot", DType::kI32, {rows});
  position = plan.add("kv cache", "position", DType::kI32, {rows});
  cos_sin = plan.add("kv cache", "cos_sin", DType::kF32, {shape.num_slots, model.head_dim()});
  if (!model.has_windowed_rotations()) return;
  windowed_cos_sin = plan.add("kv cache", "windowed_cos_sin", DType::kF32, {shape.num_slots, model.head_dim()});
}

}  // namespace parka
