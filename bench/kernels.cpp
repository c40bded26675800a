// Every op of a model's step alone, at the shapes of a model, against the copy bandwidth of the device:
//   bench_kernels [MODEL...] [op:NAME]  olmo-1b llama2-7b so400m; only ops whose names begin with NAME
//   bench_kernels attention:S[xD]...    attention alone, heads of D columns (128) in rows of 2048, 32768 tokens in
//                                       sequences of S
//   bench_kernels head                  the products of the head and its loss, in bf16 and FP8, by rows of a chunk
//   bench_kernels towers                attention over all keys, of the images of vision towers
//   bench_kernels moe                   the ops that bring tokens to experts and back
//   bench_kernels moe-products          the products of experts, and one product for each expert beside them
//   bench_kernels muon                  the ops of Muon, and a product to compare them with
//   bench_kernels amax                  what the maximum of a matrix costs, in a pass of its own and on the way
// One line of JSON per op: median, least and most time of many runs over several sets of tensors, so that no cache
// holds what is read, and the time of a plain copy of as many bytes, which shows what a short kernel's start and
// tail take. GEMMs, but for the head's and adapters', are timed by `parka tune` and `parka bench`.
#include <algorithm>
#include <cstdio>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bench/kernel_bench.h"
#include "kernels/device/measuring_time.h"

namespace parka::bench {
namespace {

constexpr ModelShape kModels[] = {
    {"olmo-1b", NormKind::kLayerNorm, 32768, 2048, 2048, 16, 8192, 50304, 4096},
    {"llama2-7b", NormKind::kRmsNorm, 8192, 2048, 4096, 32, 11008, 32000, 4096},
};

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
  bench.time(
      m.name, "norm_forward",
      [&](Tensors& t) {
        return NormForward{.kind = m.norm,
                           .eps = 1e-5f,
                           .residual = t.bf16({m.T, m.d}),
                           .branch = t.bf16({m.T, m.d}),
                           .weight = norm_weight(t, m),
                           .residual_out = t.bf16({m.T, m.d}),
                           .y = t.bf16({m.T, m.d}),
                           .mean = norm_mean(t, m),
                           .rstd = t.fp32({m.T})};
      },
      norm_forward);
  bench.time(
      m.name, "norm_recompute",
      [&](Tensors& t) {
        return NormRecompute{.kind = m.norm,
                             .x = t.bf16({m.T, m.d}),
                             .weight = norm_weight(t, m),
                             .mean = norm_mean(t, m),
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
                            .weight = norm_weight(t, m),
                            .mean = norm_mean(t, m),
                            .rstd = t.fp32({m.T}),
                            .d_y = t.bf16({m.T, m.d}),
                            .d_residual = d_residual,
                            .d_residual_out = d_residual,
                            .d_weight = norm_weight_gradient(t, m)};
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

// Times the copies that a rank makes before and after it exchanges parts of sequences with another one.
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

void bench_optimizer(Bench& bench, const ModelShape& m) {
  const int64_t N = 2 * m.f * m.d;  // the largest tensor of a block
  bench.time(
      m.name, "add", [&](Tensors& t) { return Add{.x = t.bf16({N}), .total = t.bf16({N})}; }, add);
  bench.time(
      m.name, "add_columns",
      [&](Tensors& t) {
        return AddColumns{.x = t.bf16({m.T, m.f}), .y = t.bf16({m.T, m.f}), .accumulate = true};
      },
      add_columns);
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
    if (argument == "moe") bench_moe(*device, bench);
    if (argument == "moe-products") bench_moe_products(bench);
    if (argument == "muon") bench_muon(bench);
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
    bench_optimizer(bench, model);
    bench_finetune(bench, model);
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
