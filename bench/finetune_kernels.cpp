#include "bench/kernel_bench.h"

namespace parka::bench {
namespace {

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

// Products of forward in INT8, beside those that gemm() does in E4M3, and what makes their inputs.
void bench_int8(Bench& bench, const ModelShape& m) {
  const auto rows = [](Tensors& t, int64_t count, int64_t cols) {
    const TensorView codes = t.fp8(DType::kE4M3, count, cols, Scaling::kTensor).data;
    return ScaledView{{codes.data, DType::kI8, {count, cols}}, t.fp32({count, 1}), Scaling::kGroup, cols};
  };
  const std::pair<int64_t, int64_t> products[] = {{3 * m.d, m.d}, {m.d, m.d}, {2 * m.f, m.d}, {m.d, m.f}};
  for (const auto& [cols, depth] : products) {
    bench.time(
        m.name, "gemm_int8",
        [&](Tensors& t) {
          return GemmInt8{.a = rows(t, m.T, depth), .b = rows(t, cols, depth), .out = t.bf16({m.T, cols})};
        },
        gemm_int8);
    bench.time(
        m.name, "gemm_int8.e4m3",
        [&](Tensors& t) {
          return Gemm{.a = t.fp8(DType::kE4M3, m.T, depth, Scaling::kTensor),
                      .b = t.fp8(DType::kE4M3, cols, depth, Scaling::kTensor),
                      .out = t.bf16({m.T, cols}),
                      .fast_accumulation = true};
        },
        gemm);
  }
  for (const int64_t cols : {m.d, m.f}) {
    bench.time(
        m.name, "quantize_int8",
        [&](Tensors& t) {
          return QuantizeInt8{.x = t.bf16({m.T, cols}), .out = rows(t, m.T, cols)};
        },
        quantize_int8);
  }
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

}  // namespace

void bench_finetune(Bench& bench, const ModelShape& model) {
  bench_dropout(bench, model);
  bench_adapters(bench, model);
  bench_side(bench, model);
  bench_4bit(bench, model);
  bench_int8(bench, model);
}

}  // namespace parka::bench
