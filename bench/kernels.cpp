// Every op of a model's step alone, at the shapes of a model, against the copy bandwidth of the device:
//   bench_kernels [MODEL...] [op:NAME]  olmo-1b llama2-7b so400m; only ops whose names begin with NAME
//   bench_kernels attention:S[xD]...    attention alone, heads of D columns (128) in rows of 2048, 32768 tokens in
//                                       sequences of S
//   bench_kernels head                  the products of the head and its loss, in bf16 and FP8, by rows of a chunk
//   bench_kernels towers                attention over all keys, of the images of vision towers
//   bench_kernels amax                  what the maximum of a matrix costs, in a pass of its own and on the way
// One line of JSON per op: median, least and most time of many runs over several sets of tensors, so that no cache
// holds what is read, and the time of a plain copy of as many bytes, which shows what a short kernel's start and
// tail take. Matrix products, but for the head's and adapters', are timed by `parka tune` and `parka bench`.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>
#include <numeric>
#include <string>
#include <string_view>
#include <tuple>

#include "bench/kernel_bench.h"
#include "kernels/device/copy_bandwidth.h"
#include "kernels/op/workspace.h"

namespace parka::bench {
namespace {

constexpr ModelShape kModels[] = {
    {"olmo-1b", NormKind::kLayerNorm, 32768, 2048, 2048, 16, 8192, 50304, 4096},
    {"llama2-7b", NormKind::kRmsNorm, 8192, 2048, 4096, 32, 11008, 32000, 4096},
};

TensorView cos_sin(Tensors& t, const ModelShape& m) { return t.fp32({m.S, m.d / m.heads}); }

// Of either kind, as FP8 training has them: forward saves q, k and v, and backward, which also finds the maximum,
// reads what was saved.
void bench_qk_norm(Bench& bench, const ModelShape& m) {
  const int64_t D = m.d / m.heads, N = 3 * m.d;
  const auto saved = [&](Tensors& t) { return t.fp8(DType::kE4M3, m.T, N, Scaling::kGroup, 32); };
  for (const auto& [kind, suffix] : {std::pair{QkNormKind::kPerHead, " per_head"}, {QkNormKind::kFull, " full"}}) {
    const int64_t cols = kind == QkNormKind::kFull ? m.d : D, groups = qk_norm_groups(kind, m.heads, m.heads);
    const auto forward = [&](Tensors& t) {
      return QkNormRopeForward{.kind = kind,
                               .x = {},
                               .q_weight = t.bf16({cols}),
                               .k_weight = t.bf16({cols}),
                               .cos_sin = cos_sin(t, m),
                               .num_heads = m.heads,
                               .num_kv_heads = m.heads,
                               .eps = 1e-6f,
                               .saved = {},
                               .out = t.bf16({m.T, N}),
                               .rstd = t.fp32({m.T, groups})};
    };
    bench.time(
        m.name, (std::string("qk_norm_rope_forward") + suffix).c_str(),
        [&](Tensors& t) {
          QkNormRopeForward op = forward(t);
          op.x = t.bf16({m.T, N});
          op.saved = saved(t);
          return op;
        },
        qk_norm_rope_forward);
    bench.time(
        m.name, (std::string("qk_norm_rope_forward.again") + suffix).c_str(),
        [&](Tensors& t) {
          QkNormRopeForward op = forward(t);
          op.x = saved(t);
          return op;
        },
        qk_norm_rope_forward);
    bench.time(
        m.name, (std::string("qk_norm_backward") + suffix).c_str(),
        [&](Tensors& t) {
          return QkNormBackward{.kind = kind,
                                .x = saved(t),
                                .rstd = t.fp32({m.T, groups}),
                                .q_weight = t.bf16({cols}),
                                .k_weight = t.bf16({cols}),
                                .d_qkv = t.bf16({m.T, N}),
                                .d_q_weight = t.fp32({cols}),
                                .d_k_weight = t.fp32({cols}),
                                .num_heads = m.heads,
                                .num_kv_heads = m.heads,
                                .d_qkv_amax = t.fp32({1})};
        },
        qk_norm_backward);
  }
}

void bench_activations(Bench& bench, const ModelShape& m) {
  const bool layernorm = m.norm == NormKind::kLayerNorm;
  const auto weight = [&](Tensors& t) { return layernorm ? TensorView() : t.bf16({m.d}); };
  const auto mean = [&](Tensors& t) { return layernorm ? t.fp32({m.T}) : TensorView(); };
  bench.time(
      m.name, "norm_forward",
      [&](Tensors& t) {
        return NormForward{.kind = m.norm,
                           .eps = 1e-5f,
                           .residual = t.bf16({m.T, m.d}),
                           .branch = t.bf16({m.T, m.d}),
                           .weight = weight(t),
                           .residual_out = t.bf16({m.T, m.d}),
                           .y = t.bf16({m.T, m.d}),
                           .mean = mean(t),
                           .rstd = t.fp32({m.T})};
      },
      norm_forward);
  bench.time(
      m.name, "norm_recompute",
      [&](Tensors& t) {
        return NormRecompute{.kind = m.norm,
                             .x = t.bf16({m.T, m.d}),
                             .weight = weight(t),
                             .mean = mean(t),
                             .rstd = t.fp32({m.T}),
                             .y = t.bf16({m.T, m.d})};
      },
      norm_recompute);
  bench.time(
      m.name, "norm_backward",
      [&](Tensors& t) {
        const TensorView d_residual = t.bf16({m.T, m.d});
        return NormBackward{.kind = m.norm,
                            .x = t.bf16({m.T, m.d}),
                            .weight = weight(t),
                            .mean = mean(t),
                            .rstd = t.fp32({m.T}),
                            .d_y = t.bf16({m.T, m.d}),
                            .d_residual = d_residual,
                            .d_residual_out = d_residual,
                            .d_weight = layernorm ? TensorView() : t.fp32({m.d})};
      },
      norm_backward);
  bench_qk_norm(bench, m);
  bench.time(
      m.name, "rope_forward",
      [&](Tensors& t) {
        return RopeForward{t.bf16({m.T, 3 * m.d}), cos_sin(t, m), m.heads, m.heads, {}};
      },
      rope_forward);
  bench.time(
      m.name, "swiglu_forward",
      [&](Tensors& t) {
        return SwigluForward{.up_gate = t.bf16({m.T, 2 * m.f}), .product = t.bf16({m.T, m.f})};
      },
      swiglu_forward);
  bench.time(
      m.name, "swiglu_backward",
      [&](Tensors& t) {
        return SwigluBackward{.up_gate = t.bf16({m.T, 2 * m.f}),
                              .d_product = t.bf16({m.T, m.f}),
                              .d_up_gate = t.bf16({m.T, 2 * m.f})};
      },
      swiglu_backward);
}

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
  constexpr int64_t kGroup = 32;
  const auto codes = [&](Tensors& t) { return t.fp8(DType::kE4M3, m.T, 3 * m.d, Scaling::kGroup, kGroup); };
  bench.time(
      m.name, "attention_forward.codes",
      [&](Tensors& t) {
        return AttentionForward{.qkv = t.bf16({m.T, 3 * m.d}),
                                .out = t.bf16({m.T, m.d}),
                                .lse = t.fp32({B, m.heads, m.S}),
                                .sequence_length = m.S,
                                .num_heads = m.heads,
                                .num_kv_heads = m.heads,
                                .scale = scale,
                                .codes = codes(t)};
      },
      attention_forward);
  const int64_t scratch = cuda::attention_backward_scratch_bytes(B, m.S, m.heads, m.heads, m.d / m.heads);
  const auto time_backward = [&](const char* name, bool rotates, bool finds_amax, int64_t scratch_bytes,
                                 bool from_codes = false) {
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
              .scratch = scratch_bytes > 0 ? t.make(DType::kU8, {scratch_bytes}) : TensorView(),
              .codes = from_codes ? codes(t) : ScaledView()};
        },
        attention_backward);
  };
  time_backward("attention_backward", false, false, scratch);  // alone, as others compute it
  time_backward("attention_backward.no_scratch", false, false, 0);
  time_backward("attention_backward.rotated", true, false, scratch);
  time_backward("attention_backward.fp8", true, true, scratch);
  time_backward("attention_backward.fp8.codes", true, true, scratch, /*from_codes=*/true);
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

// Of ids that are known: only the rows of d_table that they name are touched.
struct EmbeddingBackwardOfIds : EmbeddingBackward {
  int64_t tokens;  // that occur
};
OpCost cost_of(EmbeddingBackwardOfIds a) {
  a.d_table.dim[0] = a.tokens;
  return parka::cost_of(static_cast<const EmbeddingBackward&>(a));
}

void bench_ends(Bench& bench, const ModelShape& m) {
  bench.time(
      m.name, "embedding_forward",
      [&](Tensors& t) {
        return EmbeddingForward{t.ids(m.T, m.vocab), t.bf16({m.vocab, m.d}), t.bf16({m.T, m.d})};
      },
      embedding_forward);
  bench.time(
      m.name, "embedding_backward",
      [&](Tensors& t) {
        std::vector<int32_t> ids;
        t.ids(m.T, m.vocab, &ids);
        const std::vector<TokenRow> rows = embedding_order(ids.data(), m.T, m.vocab);
        const TensorView order = t.make(DType::kI32, {m.T, kTokenRowInts});
        t.copy(order, rows.data());
        return EmbeddingBackwardOfIds{
            {.order = order, .d_out = t.bf16({m.T, m.d}), .d_table = t.bf16({m.vocab, m.d})},
            std::count_if(rows.begin(), rows.end(), [](const TokenRow& row) { return row.rank == 0; })};
      },
      embedding_backward);
  bench.time(
      m.name, "cross_entropy",
      [&](Tensors& t) {
        return CrossEntropy{.logits = t.bf16({m.chunk, m.vocab}),
                            .targets = t.ids(m.chunk, m.vocab),
                            .loss = t.fp32({m.chunk}),
                            .z_loss_value = {}};
      },
      cross_entropy);
}

void bench_bias(Bench& bench, const ModelShape& m) {
  const int64_t N = 3 * m.d;
  bench.time(
      m.name, "bias_forward",
      [&](Tensors& t) {
        return BiasForward{.bias = t.bf16({N}), .x = t.bf16({m.T, N})};
      },
      bias_forward);
  bench.time(
      m.name, "bias_backward",
      [&](Tensors& t) {
        return BiasBackward{.d_y = t.bf16({m.T, N}), .d_bias = t.bf16({N})};
      },
      bias_backward);
}

// What Quantized Side Tuning adds to each block, with r = 16.
void bench_side(Bench& bench, const ModelShape& m) {
  constexpr int64_t kReduction = 16;
  const int64_t s = m.d / kReduction;
  bench.time(
      m.name, "mix_forward",
      [&](Tensors& t) {
        const TensorView x = t.bf16({m.T, s});
        return MixForward{.kind = MixWeight::kLogistic,
                          .c = t.bf16({1}),
                          .x = x,
                          .residual = t.bf16({m.T, s}),
                          .branch = t.bf16({m.T, s}),
                          .out = t.bf16({m.T, s}),
                          .difference = x};
      },
      mix_forward);
  bench.time(
      m.name, "mix_backward",
      [&](Tensors& t) {
        const TensorView d_out = t.bf16({m.T, s});
        return MixBackward{.kind = MixWeight::kLogistic,
                           .c = t.bf16({1}),
                           .difference = t.bf16({m.T, s}),
                           .d_out = d_out,
                           .d_x = t.bf16({m.T, s}),
                           .d_y = d_out,
                           .d_c = t.fp32({1})};
      },
      mix_backward);
  for (const PoolKind kind : {PoolKind::kMax, PoolKind::kAverage}) {
    bench.time(
        m.name, kind == PoolKind::kMax ? "pool_channels max" : "pool_channels average",
        [&](Tensors& t) {
          return PoolChannels{.kind = kind, .group = kReduction, .x = t.bf16({m.T, m.d}), .out = t.bf16({m.T, s})};
        },
        pool_channels);
  }
}

// What a rank that shares sequences with another one copies before and behind their exchange.
void bench_context_heads(Bench& bench, const ModelShape& m) {
  constexpr int64_t kRanks = 2;
  for (const int64_t kv_heads : {m.heads, int64_t{0}}) {
    const int64_t width = (m.heads + 2 * kv_heads) * (m.d / m.heads);
    const auto whole = [&](Tensors& t) { return t.bf16({m.T, width}); };
    const auto parts = [&](Tensors& t) {
      return t.bf16({m.T, width}).reshaped({m.T / m.S, kRanks, m.S / kRanks, width / kRanks});
    };
    bench.time(
        m.name, kv_heads > 0 ? "split_heads qkv" : "split_heads",
        [&](Tensors& t) {
          return SplitHeads{.x = whole(t), .parts = parts(t), .num_heads = m.heads, .num_kv_heads = kv_heads};
        },
        split_heads);
    bench.time(
        m.name, kv_heads > 0 ? "merge_heads qkv" : "merge_heads",
        [&](Tensors& t) {
          return MergeHeads{.parts = parts(t), .x = whole(t), .num_heads = m.heads, .num_kv_heads = kv_heads};
        },
        merge_heads);
  }
}

// Of an adapter's input, and of its part of the input gradient.
void bench_dropout(Bench& bench, const ModelShape& m) {
  for (const bool accumulate : {false, true}) {
    bench.time(
        m.name, accumulate ? "dropout, added" : "dropout",
        [&](Tensors& t) {
          return Dropout{.x = t.bf16({m.T, m.d}),
                         .y = t.bf16({m.T, m.d}),
                         .position = t.ids(3, 1),
                         .sequence_length = m.T,
                         .probability = 0.1,
                         .accumulate = accumulate};
        },
        dropout);
  }
}

// The products of adapters of rank 64: what they add to an output and to an input gradient, alone and as those of
// up and gate, and of queries, keys and values do together; and the others, which read an input or an output
// gradient. With `a` transposed cuBLASLt adds, which is otherwise our own kernel's.
void bench_adapters(Bench& bench, const ModelShape& m) {
  constexpr int64_t kRank = 64;
  struct Product {
    const char* name;
    int64_t rows, cols, depth;
    bool a_transposed, b_transposed, accumulate;
  };
  const int64_t T = m.T, d = m.d, f = m.f;
  const Product products[] = {
      {"adapter output", T, d, kRank, false, false, true},
      {"adapter output of up", T, f, kRank, false, false, true},
      {"adapter gradient", T, d, kRank, false, true, true},
      {"adapter gradient of 2", T, d, 2 * kRank, false, true, true},
      {"adapter gradient of 3", T, d, 3 * kRank, false, true, true},
      {"adapter gradient of down", T, f, kRank, false, true, true},
      {"adapter output, cuBLASLt", T, d, kRank, true, false, true},
      {"adapter output of up, cuBLASLt", T, f, kRank, true, false, true},
      {"adapter gradient, cuBLASLt", T, d, kRank, true, true, true},
      {"adapter gradient of 2, cuBLASLt", T, d, 2 * kRank, true, true, true},
      {"adapter gradient of 3, cuBLASLt", T, d, 3 * kRank, true, true, true},
      {"adapter gradient of down, cuBLASLt", T, f, kRank, true, true, true},
      {"adapter inner", T, kRank, d, false, false, false},
      {"adapter inner of 3", T, 3 * kRank, d, false, false, false},
      {"adapter inner of down", T, kRank, f, false, false, false},
      {"adapter inner gradient", T, kRank, d, false, true, false},
      {"adapter weight gradient of A", kRank, d, T, true, true, false},
      {"adapter weight gradient of 3 A", 3 * kRank, d, T, true, true, false},
      {"adapter weight gradient of B", d, kRank, T, true, true, false},
  };
  for (const Product& p : products) {
    bench.time(
        m.name, p.name,
        [&](Tensors& t) {
          return Gemm{.a = p.a_transposed ? t.bf16({p.depth, p.rows}) : t.bf16({p.rows, p.depth}),
                      .b = p.b_transposed ? t.bf16({p.depth, p.cols}) : t.bf16({p.cols, p.depth}),
                      .a_transposed = p.a_transposed,
                      .b_transposed = p.b_transposed,
                      .out = t.bf16({p.rows, p.cols}),
                      .accumulate = p.accumulate,
                      .factor = 2};
        },
        gemm);
  }
}

void bench_optimizer(Bench& bench, const ModelShape& m) {
  const int64_t N = 2 * m.f * m.d;  // the largest tensor of a block
  bench.time(
      m.name, "add", [&](Tensors& t) { return Add{.x = t.bf16({N}), .total = t.bf16({N})}; }, add);
  bench.time(
      m.name, "sum_of_squares",
      [&](Tensors& t) {
        return SumOfSquares{{t.bf16({N})}, t.fp32({1}), t.fp32({1})};
      },
      sum_of_squares);
  bench.time(
      m.name, "bit_hash",
      [&](Tensors& t) {
        return BitHash{t.bf16({N}), t.make(DType::kU8, {kHashWordBytes})};
      },
      bit_hash);
  bench.time(
      m.name, "adamw_step",
      [&](Tensors& t) {
        const TensorView m1 = t.bf16({N}), m2 = t.bf16({N});
        return make_adamw_step(t, {m1, {}, {}}, {m2, {}, {}});
      },
      adamw_step);
}

// Those of 448 adapters, in the moments' format of recipe `parka`: with a kernel for each tensor they take far
// longer.
void bench_adapter_steps(Bench& bench, const ModelShape& m) {
  constexpr int64_t kTensors = 448, kRank = 64;
  bench.time(
      m.name, "adamw_steps.fp8",
      [&](Tensors& t) {
        AdamwSteps steps;
        const TensorView scale = t.fp32({1});
        for (int64_t i = 0; i < kTensors; ++i) {
          const int64_t N = kRank * m.d;
          const auto moment = [&] {
            const MomentView x{t.make(DType::kE4M3, {N}), t.fp32({N / kMomentGroup}),
                               t.make(DType::kU8, {N / kMomentGroup})};
            for (const TensorView& zeros : {x.values, x.amax, x.exponent}) t.fill_zero(zeros);
            return x;
          };
          const MomentView exp_avg = moment(), exp_avg_sq = moment();
          steps.steps.push_back(make_adamw_step(t, exp_avg, exp_avg_sq));
          steps.steps.back().grad_scale = scale;
        }
        return steps;
      },
      adamw_steps);
}

// The largest tensor of a block in NF4, with scales in fp32 and in 8 bits.
void bench_4bit(Bench& bench, const ModelShape& m) {
  const int64_t N = 2 * m.f * m.d, blocks = ceil_div(N, Dequantize4Bit().block_size);
  const auto codes = [&](Tensors& t) { return t.make(DType::kU8, {ceil_div(N, 2)}); };
  const auto nested_absmax = [&](Tensors& t) { return t.fp32({ceil_div(blocks, kNestedBlock)}); };
  bench.time(
      m.name, "quantize_4bit",
      [&](Tensors& t) { return Quantize4Bit{.x = t.bf16({N}), .codes = codes(t), .absmax = t.fp32({blocks})}; },
      quantize_4bit);
  bench.time(
      m.name, "quantize_absmax",
      [&](Tensors& t) {
        return QuantizeAbsmax{t.fp32({blocks}), t.fp32({kNestedBlock}), t.make(DType::kU8, {blocks}),
                              nested_absmax(t), t.fp32({1})};
      },
      quantize_absmax);
  bench.time(
      m.name, "dequantize_4bit",
      [&](Tensors& t) { return Dequantize4Bit{.codes = codes(t), .absmax = t.fp32({blocks}), .out = t.bf16({N})}; },
      dequantize_4bit);
  bench.time(
      m.name, "dequantize_4bit.nested",
      [&](Tensors& t) {
        return Dequantize4Bit{.codes = codes(t),
                              .absmax = t.make(DType::kU8, {blocks}),
                              .map = t.fp32({kNestedBlock}),
                              .nested_absmax = nested_absmax(t),
                              .offset = t.fp32({1}),
                              .out = t.bf16({N})};
      },
      dequantize_4bit);
}

int run(int argc, char** argv) {
  if (num_cuda_devices() == 0) {
    std::fprintf(stderr, "kernels: there is no GPU\n");
    return 2;
  }
  const std::unique_ptr<Device> device = make_cuda_device();
  constexpr int64_t kWorkspaceBytes = int64_t{256} << 20;
  device->set_workspace(device->allocate(kWorkspaceBytes), kWorkspaceBytes);
  const double copy = measure_copy_bandwidth(*device);
  std::printf("{\"device\": \"%s\", \"copy_gb_s\": %.1f}\n", device->name().c_str(), 1e-9 * copy);
  constexpr std::string_view kAttention = "attention:", kOp = "op:";
  std::vector<std::string> arguments(argv + 1, argv + argc);
  std::string op;
  std::erase_if(arguments, [&](const std::string& argument) {
    if (!argument.starts_with(kOp)) return false;
    op = argument.substr(kOp.size());
    return true;
  });
  Bench bench(*device, copy, op);
  for (const std::string& argument : arguments) {
    if (argument == "amax") bench_amax(*device, copy);
    if (argument == "head") bench_head(bench);
    if (argument == "towers") bench_towers(bench);
    if (!argument.starts_with(kAttention)) continue;
    ModelShape shape = kModels[0];
    const std::string sizes = argument.substr(kAttention.size());
    const size_t cross = sizes.find('x');
    const int64_t D = cross == std::string::npos ? 128 : std::stoll(sizes.substr(cross + 1));
    shape.S = std::stoll(sizes);
    PARKA_REQUIRE(shape.S > 0 && shape.T % shape.S == 0 && D > 0 && shape.d % D == 0);
    shape.heads = shape.d / D;
    const std::string name = "d" + std::to_string(D) + ".s" + std::to_string(shape.S);
    shape.name = name.c_str();
    bench_attention(bench, shape);
  }
  const auto wants = [&](const std::string& model) {
    return arguments.empty() || std::find(arguments.begin(), arguments.end(), model) != arguments.end();
  };
  if (wants(kVisionModel)) bench_vision(bench);
  if (arguments.empty()) bench_towers(bench);
  for (const ModelShape& model : kModels) {
    if (!wants(model.name)) continue;
    bench_activations(bench, model);
    bench_attention(bench, model);
    bench_decode(bench, model);
    bench_ends(bench, model);
    bench_bias(bench, model);
    bench_context_heads(bench, model);
    bench_dropout(bench, model);
    bench_adapters(bench, model);
    bench_side(bench, model);
    bench_optimizer(bench, model);
    bench_adapter_steps(bench, model);
    bench_4bit(bench, model);
    bench_float8(bench, model);
  }
  return 0;
}

}  // namespace
}  // namespace parka::bench

int main(int argc, char** argv) {
  try {
    return parka::bench::run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "kernels: %s\n", error.what());
    return 1;
  }
}
