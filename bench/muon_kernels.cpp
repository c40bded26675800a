#include "bench/kernel_bench.h"

// Muon's ops: momentum and step of the largest matrix of Llama-2-7B, and orthogonalization at the shapes of several
// models, beside a large product of bf16 matrices as the most that tensor cores give.
namespace parka::bench {
namespace {

constexpr const char* kName = "muon";

void bench_momentum(Bench& bench, int64_t N) {
  const auto time = [&](const char* name, const auto& make_momentum) {
    bench.time(
        kName, name,
        [&](Tensors& t) {
          return MuonMomentum{.gradient = t.bf16({N}),
                              .momentum = make_momentum(t),
                              .mu = 0.95,
                              .grad_scale = t.fp32({1}),
                              .direction = t.bf16({N})};
        },
        muon_momentum);
  };
  time("muon_momentum.fp8", [&](Tensors& t) { return t.expanded_moment(N); });
  time("muon_momentum.fp32", [&](Tensors& t) { return MomentView{t.fp32({N}), {}, {}}; });
}

void bench_step(Bench& bench, int64_t N) {
  for (const auto& [name, form] :
       {std::pair{"muon_step", MasterForm::kFp32}, {"muon_step.fp32", MasterForm::kNone}}) {
    bench.time(
        kName, name,
        [&](Tensors& t) {
          const bool is_split = form == MasterForm::kFp32;
          return MuonStep{.weight = is_split ? t.bf16({N}) : t.fp32({N}),
                          .master = is_split ? t.make(DType::kU16, {N}) : TensorView(),
                          .master_form = form,
                          .direction = t.bf16({N}),
                          .lr = 1e-6f,
                          .weight_decay = 0.1f,
                          .grad_scale = t.fp32({1}),
                          .weight_amax = t.fp32({1}),
                          .seed = 1,
                          .step = 1,
                          .first_element = 0};
        },
        muon_step);
  }
}

}  // namespace

void bench_muon(Bench& bench) {
  constexpr int64_t kLargest = 11008 * 4096;
  bench_momentum(bench, kLargest);
  bench_step(bench, kLargest);
  struct Shape {
    int64_t count, m, n;
  };
  for (const auto& [count, m, n] :
       {Shape{1, 4096, 4096}, Shape{1, 11008, 4096}, Shape{1, 4096, 11008}, Shape{8, 2048, 2048},
        Shape{1, 8192, 2048}, Shape{4, 8192, 2048}, Shape{12, 768, 768}, Shape{12, 3072, 768}}) {
    const int64_t r = std::min(m, n);
    for (const bool in_halves : {false, true}) {
      bench.time(
          kName, in_halves ? "orthogonalize.in_halves" : "orthogonalize",
          [&](Tensors& t) {
            return Orthogonalize{.matrices = t.bf16({count, m, n}),
                                 .other = t.bf16({count, m, n}),
                                 .gram = t.bf16({count, r, r}),
                                 .polynomial = t.bf16({count, r, r}),
                                 .steps = newton_schulz_steps(Orthogonalization::kNewtonSchulz),
                                 .in_halves = in_halves};
          },
          orthogonalize);
    }
  }
  bench.time(
      kName, "orthogonalize: gemm",
      [&](Tensors& t) {
        return Gemm{.a = t.bf16({8192, 8192}), .b = t.bf16({8192, 8192}), .out = t.bf16({8192, 8192})};
      },
      gemm);
}

}  // namespace parka::bench
