#include "bench/kernel_bench.h"

// The products of the head, and the loss between them, by the rows of a chunk (training.logits_chunk_tokens), in
// bf16 and with precision.head = fp8. Gradients of the weight are added to bf16 ones, as those of every chunk but a
// micro-batch's first are.
namespace parka::bench {
namespace {

struct HeadShape {
  const char* name;
  int64_t d, vocab;  // multiples of 16
};
constexpr HeadShape kHeads[] = {{"llama2-7b", 4096, 32000}, {"llama3-8b", 4096, 128256}};
constexpr int64_t kChunks[] = {1024, 2048, 4096, 8192};

CrossEntropy loss(Tensors& t, const HeadShape& head, int64_t rows) {
  return {.logits = t.bf16({rows, head.vocab}),
          .targets = t.ids(rows, head.vocab),
          .loss = t.fp32({rows}),
          .z_loss_value = {},
          .grad_scale = 1.0f / static_cast<float>(rows)};
}

void bench_compute(Bench& bench, const HeadShape& head, int64_t rows, const char* name) {
  bench.time(
      name, "head.logits",
      [&](Tensors& t) {
        return Gemm{
            .a = t.bf16({rows, head.d}), .b = t.bf16({head.vocab, head.d}), .out = t.bf16({rows, head.vocab})};
      },
      gemm);
  bench.time(
      name, "head.loss", [&](Tensors& t) { return loss(t, head, rows); }, cross_entropy);
  bench.time(
      name, "head.input_gradient",
      [&](Tensors& t) {
        return Gemm{.a = t.bf16({rows, head.vocab}),
                    .b = t.bf16({head.vocab, head.d}),
                    .b_transposed = true,
                    .out = t.bf16({rows, head.d})};
      },
      gemm);
  bench.time(
      name, "head.weight_gradient",
      [&](Tensors& t) {
        return Gemm{.a = t.bf16({rows, head.vocab}),
                    .b = t.bf16({rows, head.d}),
                    .a_transposed = true,
                    .b_transposed = true,
                    .out = t.bf16({head.vocab, head.d}),
                    .accumulate = true};
      },
      gemm);
}

void bench_fp8(Bench& bench, const HeadShape& head, int64_t rows, const char* name) {
  const auto codes = [](Tensors& t, DType dtype, int64_t code_rows, int64_t cols) {
    return t.fp8(dtype, code_rows, cols, Scaling::kTensor);
  };
  bench.time(
      name, "head.input.fp8",
      [&](Tensors& t) {
        const ScaledView out = codes(t, DType::kE4M3, rows, head.d);
        return Quantize{.x = t.bf16({rows, head.d}),
                        .out = out,
                        .out_t = t.fp8(DType::kE4M3, head.d, rows, Scaling::kTensor, 0, out.scale)};
      },
      quantize);
  for (const bool fast : {false, true}) {
    bench.time(
        name, fast ? "head.logits.fp8.fast" : "head.logits.fp8",
        [&](Tensors& t) {
          return Gemm{.a = codes(t, DType::kE4M3, rows, head.d),
                      .b = codes(t, DType::kE4M3, head.vocab, head.d),
                      .out = t.bf16({rows, head.vocab}),
                      .fast_accumulation = fast};
        },
        gemm);
    bench.time(
        name, fast ? "head.input_gradient.fp8.fast" : "head.input_gradient.fp8",
        [&](Tensors& t) {
          return Gemm{.a = codes(t, DType::kE5M2, rows, head.vocab),
                      .b = codes(t, DType::kE4M3, head.d, head.vocab),
                      .out = t.bf16({rows, head.d}),
                      .fast_accumulation = fast};
        },
        gemm);
  }
  bench.time(
      name, "head.loss.fp8",
      [&](Tensors& t) {
        CrossEntropy op = loss(t, head, rows);
        op.d_logits = codes(t, DType::kE5M2, rows, head.vocab);
        op.d_logits_t = t.fp8(DType::kE5M2, head.vocab, rows, Scaling::kTensor, 0, op.d_logits.scale);
        return op;
      },
      cross_entropy);
  bench.time(
      name, "head.weight_gradient.fp8",
      [&](Tensors& t) {
        return Gemm{.a = codes(t, DType::kE5M2, head.vocab, rows),
                    .b = codes(t, DType::kE4M3, head.d, rows),
                    .out = t.bf16({head.vocab, head.d}),
                    .accumulate = true};
      },
      gemm);
}

}  // namespace

void bench_head(Bench& bench) {
  for (const HeadShape& head : kHeads) {
    for (const int64_t rows : kChunks) {
      const std::string name = std::string(head.name) + ".chunk" + std::to_string(rows);
      bench_compute(bench, head, rows, name.c_str());
      bench_fp8(bench, head, rows, name.c_str());
    }
  }
}

}  // namespace parka::bench
