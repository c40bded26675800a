#include <algorithm>

#include "core/ignored_target.h"
#include "kernels/ops/elementwise/embedding.h"
#include "model/pass.h"

// Generation with a cache: Model's part of it, and how it loads a batch. See also layers/attention_cache.cpp.
namespace parka {

void Model::declare_cache(const CacheShape& shape, MemoryPlan& plan) {
  PARKA_REQUIRE(evaluation_ != nullptr && !cache_);
  PARKA_REQUIRE(shape.max_length <= max_shape_.sequence_length);
  PARKA_REQUIRE(std::max(shape.num_slots, shape.max_length) <= max_shape_.num_tokens());
  cache_.emplace(config_, evaluation_->precision(), shape, plan);
  if (table_.side.exists())
    side_cache_.emplace(side_stack(config_, table_.side), evaluation_->precision(), shape, plan);
}

std::vector<float> Model::prefill(Device& device, int64_t slot, const std::vector<int32_t>& tokens,
                                  const SequenceImages& images) {
  PARKA_REQUIRE(cache_ && slot >= 0 && slot < cache_->shape.num_slots);
  const auto length = static_cast<int64_t>(tokens.size());
  PARKA_REQUIRE(length >= 1 && length <= cache_->shape.max_length);
  std::vector<CachedToken> rows;
  for (int64_t i = 0; i < length; ++i) {
    rows.push_back({static_cast<int32_t>(slot), static_cast<int32_t>(i), tokens[i]});
  }
  const BatchShape shape{1, length, false, images.count};
  const StepContext step = evaluation_->load_cached(device, caches(), rows, shape, /*newest=*/false, images);
  evaluation_->forward(step);
  return read_logits(*evaluation_, step, length - 1, 1);
}

std::vector<float> Model::decode(Device& device, const std::vector<CachedToken>& next) {
  const auto count = static_cast<int64_t>(next.size());
  PARKA_REQUIRE(cache_ && count >= 1 && count <= cache_->shape.num_slots);
  const StepContext step = evaluation_->load_cached(device, caches(), next, {count, 1}, /*newest=*/true, {});
  evaluation_->forward(step);
  return read_logits(*evaluation_, step, 0, count);
}

StepContext Model::Pass::load_cached(Device& device, const Caches& caches, const std::vector<CachedToken>& rows,
                                     const BatchShape& shape, bool newest, const SequenceImages& images) const {
  const KvCache& cache = *caches.model;
  const KvCache* const side_cache = caches.side;
  std::vector<int32_t> tokens, slots, positions;
  for (const CachedToken& row : rows) {
    tokens.push_back(row.token);
    slots.push_back(row.slot);
    positions.push_back(row.position);
  }
  const std::vector<int32_t> targets(rows.size(), kIgnoreTarget);
  StepContext step = load(
      device, {tokens.data(), targets.data(), shape, nullptr, {}, images.pixels, images.positions}, /*keep=*/false);
  step.cache = &cache;
  step.side_cache = side_cache;
  step.newest_rows = newest;
  step.num_keys = *std::ranges::max_element(positions) + 1;
  PARKA_REQUIRE(step.num_keys <= cache.shape.max_length);
  const int64_t T = step.num_tokens();
  const TensorView slot = step.vector(cache.slot, T), position = step.vector(cache.position, T);
  device.copy_to_device(slot.data, slots.data(), slot.bytes());
  device.copy_to_device(position.data, positions.data(), position.bytes());
  if (side_cache != nullptr) {
    device.copy(step.vector(side_cache->slot, T).data, slot.data, slot.bytes());
    device.copy(step.vector(side_cache->position, T).data, position.data, position.bytes());
  }
  if (!newest) return step;
  // Row t of a gathered table is that of row t's position.
  const auto gather = [&](const TensorView& table, TensorId rows) {
    const TensorView gathered = step.tensor(rows, T, table.dim[1]);
    embedding_forward(device, {.ids = position, .table = table, .out = gathered});
    return gathered;
  };
  const auto gather_both = [&](const RotaryTables& tables, const KvCache& of, Positions& full,
                               Positions& windowed) {
    full.rotations = gather(tables.full, of.cos_sin);
    windowed.rotations =
        of.windowed_cos_sin.valid() ? gather(tables.windowed, of.windowed_cos_sin) : full.rotations;
  };
  gather_both(tables_, cache, step.positions, step.windowed_positions);
  if (side_cache != nullptr) {
    gather_both(side_tables_, *side_cache, step.side_positions, step.side_windowed_positions);
  }
  return step;
}

}  // namespace parka
