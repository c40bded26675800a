#include <string>

#include "bench/kernel_bench.h"

// The ops as the recipe `parka` uses them: inputs of norms and SwiGLU kept in groups of 16, everything that a GEMM
// reads with one scale, weight gradients' operands transposed.
namespace parka::bench {
namespace {

constexpr int64_t kGroup = 16;

void bench_norm(Bench& bench, const ModelShape& m) {
  const auto kept = [&](Tensors& t) { return t.fp8(DType::kE4M3, m.T, m.d, Scaling::kGroup, kGroup); };
  bench.time(
      m.name, "norm_forward.fp8",
      [&](Tensors& t) {
        return NormForward{.kind = m.norm,
                           .eps = 1e-5f,
                           .residual = t.bf16({m.T, m.d}),
                           .branch = t.bf16({m.T, m.d}),
                           .weight = norm_weight(t, m),
                           .residual_out = t.bf16({m.T, m.d}),
                           .x = kept(t),
                           .y = t.fp8(DType::kE4M3, m.T, m.d, Scaling::kTensor),
                           .mean = norm_mean(t, m),
                           .rstd = t.fp32({m.T})};
      },
      norm_forward);
  bench.time(
      m.name, "norm_recompute.fp8",
      [&](Tensors& t) {
        return NormRecompute{.kind = m.norm,
                             .x = kept(t),
                             .weight = norm_weight(t, m),
                             .mean = norm_mean(t, m),
                             .rstd = t.fp32({m.T}),
                             .y_t = t.fp8(DType::kE4M3, m.d, m.T, Scaling::kTensor)};
      },
      norm_recompute);
  bench.time(
      m.name, "norm_backward.fp8",
      [&](Tensors& t) {
        const TensorView d_residual = t.bf16({m.T, m.d});
        const ScaledView d_quantized = t.fp8(DType::kE5M2, m.T, m.d, Scaling::kTensor);
        return NormBackward{.kind = m.norm,
                            .x = kept(t),
                            .weight = norm_weight(t, m),
                            .mean = norm_mean(t, m),
                            .rstd = t.fp32({m.T}),
                            .d_y = t.bf16({m.T, m.d}),
                            .d_residual = d_residual,
                            .d_residual_out = d_residual,
                            .d_quantized = d_quantized,
                            .d_quantized_t = t.fp8(DType::kE5M2, m.d, m.T, Scaling::kTensor, 0, d_quantized.scale),
                            .d_weight = norm_weight_gradient(t, m)};
      },
      norm_backward);
}

void bench_rope(Bench& bench, const ModelShape& m) {
  bench.time(
      m.name, "rope_forward.fp8",
      [&](Tensors& t) {
        return RopeForward{t.bf16({m.T, 3 * m.d}), cos_sin(t, m), m.heads, m.heads,
                           t.fp8(DType::kE4M3, m.T, 3 * m.d, Scaling::kGroup, kGroup)};
      },
      rope_forward);
}

void bench_swiglu(Bench& bench, const ModelShape& m, const char* forward, const char* backward,
                  GateActivation activation) {
  const auto kept = [&](Tensors& t) { return t.fp8(DType::kE4M3, m.T, 2 * m.f, Scaling::kGroup, kGroup); };
  bench.time(
      m.name, forward,
      [&](Tensors& t) {
        return SwigluForward{.up_gate = kept(t),
                             .product = t.fp8(DType::kE4M3, m.T, m.f, Scaling::kTensor),
                             .up_gate_plain = t.bf16({m.T, 2 * m.f}),
                             .activation = activation};
      },
      swiglu_forward);
  for (const bool samples_amax : {false, true}) {
    const std::string name = std::string(backward) + (samples_amax ? ".sampled" : "");
    bench.time(
        m.name, name.c_str(),
        [&](Tensors& t) {
          const ScaledView d_up_gate = t.fp8(DType::kE5M2, m.T, 2 * m.f, Scaling::kTensor);
          return SwigluBackward{
              .up_gate = kept(t),
              .d_product = t.bf16({m.T, m.f}),
              .d_up_gate = d_up_gate,
              .d_up_gate_t = t.fp8(DType::kE5M2, 2 * m.f, m.T, Scaling::kTensor, 0, d_up_gate.scale),
              .samples_amax = samples_amax,
              .product_t = t.fp8(DType::kE4M3, m.f, m.T, Scaling::kTensor),
              .activation = activation};
        },
        swiglu_backward);
  }
}

// The projection to up and gate with SwiGLU, as one op and as two.
void bench_swiglu_projection(Bench& bench, const ModelShape& m) {
  const auto make = [&](Tensors& t) {
    const TensorView plain = t.bf16({m.T, 2 * m.f});
    return SwigluProjection{.projection = {.a = t.fp8(DType::kE4M3, m.T, m.d, Scaling::kTensor),
                                           .b = t.fp8(DType::kE4M3, 2 * m.f, m.d, Scaling::kTensor),
                                           .out = plain,
                                           .fast_accumulation = true},
                            .swiglu = {.up_gate = t.fp8(DType::kE4M3, m.T, 2 * m.f, Scaling::kGroup, kGroup),
                                       .product = t.fp8(DType::kE4M3, m.T, m.f, Scaling::kTensor),
                                       .up_gate_plain = plain}};
  };
  bench.time(m.name, "swiglu_projection", make, swiglu_projection);
  bench.time(m.name, "swiglu_projection.two", make,
             [](Device& device, const SwigluProjection& a) { run_as_two(device, a); });
}

// The projection to q, k and v with their rotation, as one op and as two.
void bench_rope_projection(Bench& bench, const ModelShape& m) {
  const auto make = [&](Tensors& t) {
    const int64_t width = 3 * m.d;
    const TensorView qkv = t.bf16({m.T, width});
    return RopeProjection{.projection = {.a = t.fp8(DType::kE4M3, m.T, m.d, Scaling::kTensor),
                                         .b = t.fp8(DType::kE4M3, width, m.d, Scaling::kTensor),
                                         .out = qkv,
                                         .fast_accumulation = true},
                          .rope = {.qkv = qkv,
                                   .cos_sin = cos_sin(t, m),
                                   .num_heads = m.heads,
                                   .num_kv_heads = m.heads,
                                   .saved = t.fp8(DType::kE4M3, m.T, width, Scaling::kGroup, kGroup)}};
  };
  bench.time(m.name, "rope_projection", make, rope_projection);
  bench.time(m.name, "rope_projection.two", make,
             [](Device& device, const RopeProjection& a) { run_as_two(device, a); });
}

void bench_quantize(Bench& bench, const ModelShape& m) {
  const auto time = [&](const char* name, const auto& make) { bench.time(m.name, name, make, quantize); };
  // A weight for the whole step, in both orders; the optimizer's step has found its maximum.
  time("quantize.weight", [&](Tensors& t) {
    const ScaledView w = t.fp8(DType::kE4M3, 2 * m.f, m.d, Scaling::kTensor);
    return Quantize{.x = t.bf16({2 * m.f, m.d}),
                    .out = w,
                    .out_t = t.fp8(DType::kE4M3, m.d, 2 * m.f, Scaling::kTensor, 0, w.scale),
                    .amax = t.fp32({1})};
  });
  // The attention output, whose maximum the attention kernel has found.
  time("quantize.attention", [&](Tensors& t) {
    return Quantize{
        .x = t.bf16({m.T, m.d}), .out = t.fp8(DType::kE4M3, m.T, m.d, Scaling::kTensor), .amax = t.fp32({1})};
  });
  // Attention's gradient, likewise.
  time("quantize.d_qkv", [&](Tensors& t) {
    const ScaledView d_qkv = t.fp8(DType::kE5M2, m.T, 3 * m.d, Scaling::kTensor);
    return Quantize{.x = t.bf16({m.T, 3 * m.d}),
                    .out = d_qkv,
                    .out_t = t.fp8(DType::kE5M2, 3 * m.d, m.T, Scaling::kTensor, 0, d_qkv.scale),
                    .amax = t.fp32({1})};
  });
  time("quantize.transpose", [&](Tensors& t) {
    const ScaledView x = t.fp8(DType::kE4M3, m.T, m.d, Scaling::kTensor);
    return Quantize{
        .x = x, .out_t = t.fp8(DType::kE4M3, m.d, m.T, Scaling::kTensor, 0, x.scale), .scale_given = true};
  });
  time("quantize.decode", [&](Tensors& t) {
    return Quantize{.x = t.fp8(DType::kE4M3, m.T, 3 * m.d, Scaling::kGroup, kGroup), .out = t.bf16({m.T, 3 * m.d})};
  });
}

void bench_adamw(Bench& bench, const ModelShape& m) {
  const int64_t N = 2 * m.f * m.d;
  bench.time(
      m.name, "adamw_step.fp8",
      [&](Tensors& t) {
        const MomentView exp_avg = t.expanded_moment(N), exp_avg_sq = t.expanded_moment(N);
        t.fill_zero(exp_avg_sq.values);  // codes of a second moment have no sign; the first step gives them values
        AdamwStep step = make_adamw_step(t, exp_avg, exp_avg_sq);
        step.weight_amax = t.fp32({1});
        return step;
      },
      adamw_step);
}

}  // namespace

void bench_float8(Bench& bench, const ModelShape& model) {
  bench_norm(bench, model);
  bench_rope(bench, model);
  bench_swiglu(bench, model, "swiglu_forward.fp8", "swiglu_backward.fp8", GateActivation::kSilu);
  bench_swiglu(bench, model, "swiglu_forward.fp8.gelu", "swiglu_backward.fp8.gelu", GateActivation::kGeluTanh);
  bench_swiglu_projection(bench, model);
  bench_rope_projection(bench, model);
  bench_quantize(bench, model);
  bench_adamw(bench, model);
}

}  // namespace parka::bench
