#include "kernels/ops/attention/attention.h"

#include <algorithm>
#include <vector>

#include "core/parallel.h"
#include "kernels/cpu/codec.h"
#include "kernels/cpu/math/exp.h"

namespace parka::cpu {
namespace {

// A cache of sequences of L tokens; H query heads and Hkv key/value heads of width D.
struct Dims {
  int64_t L, H, Hkv, D;

  template <typename Args>
  explicit Dims(const Args& a)
      : L(a.cache.dim[1]), H(a.num_heads), Hkv(a.num_kv_heads), D(a.qkv.dim[1] / (H + 2 * Hkv)) {}

  int64_t kv_width() const { return 2 * Hkv * D; }
  // First element of a token's key head in the cache; its value head g is head Hkv + g.
  int64_t cached(int64_t slot, int64_t position, int64_t head) const {
    return (slot * L + position) * kv_width() + head * D;
  }
};

// The keys or values of one head of `count` tokens from `first` on, [count, D].
std::vector<float> load_cached(const TensorView& cache, const Dims& dims, int64_t slot, int64_t head, int64_t first,
                               int64_t count) {
  std::vector<float> rows(static_cast<size_t>(count * dims.D));
  for (int64_t j = 0; j < count; ++j) {
    decode_elements(cache, dims.cached(slot, first + j, head), dims.D, rows.data() + j * dims.D);
  }
  return rows;
}

// Scores to probabilities; the maximum is subtracted first, so that no exponential overflows.
void softmax(std::vector<float>& p) {
  const float max = *std::max_element(p.begin(), p.end());
  for (float& x : p) x -= max;
  exp_elements(p.data(), static_cast<int64_t>(p.size()), p.data());
  float sum = 0;
  for (float x : p) sum += x;
  for (float& x : p) x /= sum;
}

// All query heads that share a key/value head, of one row.
void decode_group(const AttentionDecode& a, const Dims& dims, int64_t t, int64_t kv_head) {
  const int64_t slot = a.slot.as<int32_t>()[t], end = a.position.as<int32_t>()[t] + 1, D = dims.D;
  const int64_t first = a.window > 0 ? std::max<int64_t>(end - a.window, 0) : 0, count = end - first;
  const std::vector<float> k = load_cached(a.cache, dims, slot, kv_head, first, count);
  const std::vector<float> v = load_cached(a.cache, dims, slot, dims.Hkv + kv_head, first, count);
  std::vector<float> q(static_cast<size_t>(D)), p(static_cast<size_t>(count)), out(static_cast<size_t>(D));
  const int64_t group = dims.H / dims.Hkv;
  for (int64_t h = kv_head * group; h < (kv_head + 1) * group; ++h) {
    decode_elements(a.qkv, t * a.qkv.dim[1] + h * D, D, q.data());
    for (int64_t j = 0; j < count; ++j) {
      float dot = 0;
      for (int64_t d = 0; d < D; ++d) dot += q[d] * k[j * D + d];
      p[j] = a.scale * dot;
    }
    softmax(p);
    std::fill(out.begin(), out.end(), 0.0f);
    for (int64_t j = 0; j < count; ++j) {
      for (int64_t d = 0; d < D; ++d) out[d] += p[j] * v[j * D + d];
    }
    encode_elements(out.data(), t * a.out.dim[1] + h * D, D, a.out);
  }
}

}  // namespace

void cache_append(Device&, const CacheAppend& a) {
  const Dims dims(a);
  const int64_t queries = dims.H * dims.D;
  std::vector<float> kv(static_cast<size_t>(dims.kv_width()));
  for (int64_t t = 0; t < a.qkv.dim[0]; ++t) {
    const int64_t slot = a.slot.as<int32_t>()[t], position = a.position.as<int32_t>()[t];
    PARKA_REQUIRE(slot >= 0 && slot < a.cache.dim[0] && position >= 0 && position < dims.L);
    decode_elements(a.qkv, t * a.qkv.dim[1] + queries, dims.kv_width(), kv.data());
    encode_elements(kv.data(), dims.cached(slot, position, 0), dims.kv_width(), a.cache);
  }
}

void attention_decode(Device&, const AttentionDecode& a) {
  const Dims dims(a);
  const int64_t T = a.qkv.dim[0];
  for (int64_t t = 0; t < T; ++t) {
    const int64_t slot = a.slot.as<int32_t>()[t], position = a.position.as<int32_t>()[t];
    PARKA_REQUIRE(slot >= 0 && slot < a.cache.dim[0] && position >= 0 && position < a.max_keys);
  }
  parallel_for(T * dims.Hkv, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) decode_group(a, dims, i / dims.Hkv, i % dims.Hkv);
  });
  if (!a.out_amax.empty()) a.out_amax.as<float>()[0] = max_abs(decode(a.out));
}

}  // namespace parka::cpu
