#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>
#include <tuple>
#include <vector>

#include "bench/kernel_bench.h"
#include "kernels/op/workspace.h"

namespace parka::bench {
namespace {

// Through a window of a quarter and of half of the sequence, and within four documents in each; `.full` is causal
// attention over sequences so long that a query has as many keys on average. Of documents the rate counts four
// times the pairs that there are.
void bench_first_keys(Bench& bench, const ModelShape& m) {
  const int64_t quarter = m.S / 4;
  const auto time_both = [&](const std::string& name, int64_t S, int64_t window, const auto& first_key) {
    const int64_t B = m.T / S, T = B * S;
    bench.time(
        m.name, ("attention_forward." + name).c_str(),
        [&](Tensors& t) {
          return AttentionForward{.qkv = t.bf16({T, 3 * m.d}),
                                  .out = t.bf16({T, m.d}),
                                  .lse = t.fp32({B, m.heads, S}),
                                  .sequence_length = S,
                                  .num_heads = m.heads,
                                  .num_kv_heads = m.heads,
                                  .scale = 0.088f,
                                  .first_key = first_key(t),
                                  .window = window};
        },
        attention_forward);
    bench.time(
        m.name, ("attention_backward." + name).c_str(),
        [&](Tensors& t) {
          return AttentionBackward{.qkv = t.bf16({T, 3 * m.d}),
                                   .out = t.bf16({T, m.d}),
                                   .d_out = t.bf16({T, m.d}),
                                   .lse = t.fp32({B, m.heads, S}),
                                   .d_qkv = t.bf16({T, 3 * m.d}),
                                   .sequence_length = S,
                                   .num_heads = m.heads,
                                   .num_kv_heads = m.heads,
                                   .scale = 0.088f,
                                   .first_key = first_key(t),
                                   .window = window};
        },
        attention_backward);
  };
  constexpr std::tuple<const char*, int> kQuarters[] = {{"window", 1}, {"half_window", 2}, {"documents", 0}};
  for (const auto& [name, quarters] : kQuarters) {
    const int64_t window = quarters * quarter;
    time_both(name, m.S, window, [&](Tensors& t) {
      std::vector<int32_t> keys;
      for (int64_t row = 0; row < m.T; ++row) {
        const int64_t i = row % m.S;
        keys.push_back(
            static_cast<int32_t>(window > 0 ? std::max<int64_t>(i - window + 1, 0) : i / quarter * quarter));
      }
      return t.upload(keys);
    });
    // (S - w / 2) w pairs through a window of w, which is S' / 2 for each query.
    const int64_t length = window > 0 ? (2 * m.S - window) * window / m.S : quarter;
    time_both(std::string(name) + ".full", length, 0, [](Tensors&) { return TensorView(); });
  }
}

}  // namespace

// Over all keys, as vision towers attend: heads, their width and the tokens of an image.
void bench_towers(Bench& bench) {
  struct Tower {
    const char* name;
    int64_t heads, D, S;
  };
  constexpr int64_t kImages = 32;
  for (const Tower& tower : {Tower{"clip-l-336", 16, 64, 577}, Tower{"siglip-so400m-384", 16, 72, 729}}) {
    const int64_t T = kImages * tower.S, d = tower.heads * tower.D;
    const float scale = 1.0f / std::sqrt(static_cast<float>(tower.D));
    bench.time(
        tower.name, "attention_forward.all_keys",
        [&](Tensors& t) {
          return AttentionForward{.qkv = t.bf16({T, 3 * d}),
                                  .out = t.bf16({T, d}),
                                  .lse = t.fp32({kImages, tower.heads, tower.S}),
                                  .sequence_length = tower.S,
                                  .num_heads = tower.heads,
                                  .num_kv_heads = tower.heads,
                                  .scale = scale,
                                  .causal = false};
        },
        attention_forward);
    bench.time(
        tower.name, "attention_backward.all_keys",
        [&](Tensors& t) {
          return AttentionBackward{.qkv = t.bf16({T, 3 * d}),
                                   .out = t.bf16({T, d}),
                                   .d_out = t.bf16({T, d}),
                                   .lse = t.fp32({kImages, tower.heads, tower.S}),
                                   .d_qkv = t.bf16({T, 3 * d}),
                                   .sequence_length = tower.S,
                                   .num_heads = tower.heads,
                                   .num_kv_heads = tower.heads,
                                   .scale = scale,
                                   .causal = false};
        },
        attention_backward);
  }
}

void bench_attention(Bench& bench, const ModelShape& m) {
  const int64_t B = m.T / m.S;
  const float scale = 0.088f;
  bench.time(
      m.name, "attention_forward",
      [&](Tensors& t) {
        return AttentionForward{
            t.bf16({m.T, 3 * m.d}), t.bf16({m.T, m.d}), t.fp32({B, m.heads, m.S}), m.S, m.heads, m.heads, scale};
      },
      attention_forward);
  const int64_t scratch = cuda::attention_backward_scratch_bytes(B, m.S, m.heads, m.heads, m.d / m.heads);
  const auto time_backward = [&](const char* name, bool rotates, bool finds_amax, int64_t scratch_bytes) {
    bench.time(
        m.name, name,
        [&](Tensors& t) {
          return AttentionBackward{
              .qkv = t.bf16({m.T, 3 * m.d}),
              .out = t.bf16({m.T, m.d}),
              .d_out = t.bf16({m.T, m.d}),
              .lse = t.fp32({B, m.heads, m.S}),
              .d_qkv = t.bf16({m.T, 3 * m.d}),
              .sequence_length = m.S,
              .num_heads = m.heads,
              .num_kv_heads = m.heads,
              .scale = scale,
              .cos_sin = rotates ? cos_sin(t, m) : TensorView(),
              .d_qkv_amax = finds_amax ? t.fp32({1}) : TensorView(),
              .scratch = scratch_bytes > 0 ? t.make(DType::kU8, {scratch_bytes}) : TensorView()};
        },
        attention_backward);
  };
  time_backward("attention_backward", false, false, scratch);  // alone, as others compute it
  time_backward("attention_backward.no_scratch", false, false, 0);
  time_backward("attention_backward.rotated", true, false, scratch);
  time_backward("attention_backward.fp8", true, true, scratch);
  constexpr int64_t kSampledRows = 512;  // as telemetry's
  bench.time(
      m.name, "attention_statistics",
      [&](Tensors& t) {
        return AttentionStatistics{.qkv = t.bf16({m.T, 3 * m.d}),
                                   .out = t.bf16({m.T, m.d}),
                                   .d_out = t.bf16({m.T, m.d}),
                                   .lse = t.fp32({B, m.heads, m.S}),
                                   .totals = t.fp32({AttentionTotals::kCount}),
                                   .rows = kSampledRows,
                                   .sequence_length = m.S,
                                   .num_heads = m.heads,
                                   .num_kv_heads = m.heads,
                                   .scale = scale};
      },
      attention_statistics);
  bench_first_keys(bench, m);
}

// A token more of each of some sequences as long as the context.
void bench_decode(Bench& bench, const ModelShape& m) {
  constexpr int32_t kSequences = 8;
  const auto rows = [&](Tensors& t, bool slots) {
    std::vector<int32_t> values(kSequences, static_cast<int32_t>(m.S - 1));
    if (slots) std::iota(values.begin(), values.end(), 0);
    return t.upload(values);
  };
  const auto cache = [&](Tensors& t) { return t.bf16({kSequences, m.S, 2 * m.d}); };
  bench.time(
      m.name, "cache_append",
      [&](Tensors& t) {
        return CacheAppend{
            t.bf16({kSequences, 3 * m.d}), cache(t), rows(t, true), rows(t, false), m.heads, m.heads};
      },
      cache_append);
  bench.time(
      m.name, "attention_decode",
      [&](Tensors& t) {
        return AttentionDecode{.qkv = t.bf16({kSequences, 3 * m.d}),
                               .cache = cache(t),
                               .slot = rows(t, true),
                               .position = rows(t, false),
                               .out = t.bf16({kSequences, m.d}),
                               .max_keys = m.S,
                               .num_heads = m.heads,
                               .num_kv_heads = m.heads,
                               .scale = 0.088f};
      },
      attention_decode);
}

}  // namespace parka::bench
