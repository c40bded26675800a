#include <algorithm>
#include <cmath>

#include "kernels/ops.h"
#include "model/pass.h"

// Generation with a cache: Model's part of it, and what a pass does differently.
namespace parka {

void Model::declare_cache(const CacheShape& shape, MemoryPlan& plan) {
  PARKA_REQUIRE(evaluation_ != nullptr && !cache_);
  PARKA_REQUIRE(shape.max_length <= max_shape_.sequence_length);
  PARKA_REQUIRE(std::max(shape.num_slots, shape.max_length) <= max_shape_.num_tokens());
  cache_.emplace(config_, evaluation_->precision(), shape, plan);
}

std::vector<float> Model::prefill(Device& device, int64_t slot, const std::vector<int32_t>& tokens) {
  PARKA_REQUIRE(cache_ && slot >= 0 && slot < cache_->shape.num_slots);
  const auto length = static_cast<int64_t>(tokens.size());
  PARKA_REQUIRE(length >= 1 && length <= cache_->shape.max_length);
  std::vector<CachedToken> rows;
  for (int64_t i = 0; i < length; ++i) {
    rows.push_back({static_cast<int32_t>(slot), static_cast<int32_t>(i), tokens[i]});
  }
  evaluation_->load_cached(device, *cache_, rows, {1, length}, Pass::Attend::kToBatch);
  evaluation_->forward(device);
  return read_logits(device, *evaluation_, length - 1, 1);
}

std::vector<float> Model::decode(Device& device, const std::vector<CachedToken>& next) {
  const auto count = static_cast<int64_t>(next.size());
  PARKA_REQUIRE(cache_ && count >= 1 && count <= cache_->shape.num_slots);
  evaluation_->load_cached(device, *cache_, next, {count, 1}, Pass::Attend::kToCache);
  evaluation_->forward(device);
  return read_logits(device, *evaluation_, 0, count);
}

void Model::Pass::load_cached(Device& device, const KvCache& cache, const std::vector<CachedToken>& rows,
                              const BatchShape& shape, Attend attend) {
  std::vector<int32_t> tokens, slots, positions;
  for (const CachedToken& row : rows) {
    tokens.push_back(row.token);
    slots.push_back(row.slot);
    positions.push_back(row.position);
  }
  const std::vector<int32_t> targets(rows.size(), kIgnoreTarget);
  load(device, {tokens.data(), targets.data(), shape}, /*keep=*/false);
  cache_ = &cache;
  attend_ = attend;
  num_keys_ = *std::max_element(positions.begin(), positions.end()) + 1;
  PARKA_REQUIRE(num_keys_ <= cache.shape.max_length);
  const TensorView slot = vector(cache.slot, num_tokens_), position = vector(cache.position, num_tokens_);
  device.copy_to_device(slot.data, slots.data(), slot.bytes());
  device.copy_to_device(position.data, positions.data(), position.bytes());
  if (attend == Attend::kToBatch) return;
  // Row t of the gathered table is that of row t's position.
  embedding_forward(
      device, {.ids = position, .table = cos_sin_, .out = tensor(cache.cos_sin, num_tokens_, config_.head_dim())});
}

TensorView Model::Pass::rotations() const {
  return attends_to_cache() ? tensor(cache_->cos_sin, num_tokens_, config_.head_dim())
                            : cos_sin_.rows(0, shape_.sequence_length);
}

float Model::Pass::attention_scale() const { return 1.0f / std::sqrt(static_cast<float>(config_.head_dim())); }

void Model::Pass::append_to_cache(Device& device, int64_t l, const TensorView& qkv) {
  cache_append(device, {.qkv = qkv,
                        .cache = (*arena_)[cache_->blocks[l]],
                        .slot = vector(cache_->slot, num_tokens_),
                        .position = vector(cache_->position, num_tokens_),
                        .num_heads = config_.num_heads,
                        .num_kv_heads = config_.kv_heads()});
}

void Model::Pass::attend_to_cache(Device& device, int64_t l, const TensorView& qkv, const TensorView& out,
                                  const TensorView& out_amax) {
  attention_decode(device, {.qkv = qkv,
                            .cache = (*arena_)[cache_->blocks[l]],
                            .slot = vector(cache_->slot, num_tokens_),
                            .position = vector(cache_->position, num_tokens_),
                            .out = out,
                            .max_keys = num_keys_,
                            .num_heads = config_.num_heads,
                            .num_kv_heads = config_.kv_heads(),
                            .scale = attention_scale(),
                            .out_amax = out_amax});
}

}  // namespace parka
