#include "bench/kernel_bench.h"

// The ops that bring tokens to experts and back, at the shapes of OLMoE, Qwen3-30B-A3B and the mixture of `parka
// config new`.
namespace parka::bench {
namespace {

struct RouterShape {
  const char* name;
  int64_t T, d, E, k;
  int64_t rows() const { return expert_rows(T * k, E); }
};

// Logits whose choices differ from token to token; the experts are used about equally.
TensorView router_logits(Tensors& t, const RouterShape& s) {
  const TensorView logits = t.make(DType::kF32, {s.T, s.E});
  std::vector<float> values(static_cast<size_t>(logits.numel()));
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(philox_normal2(7, 8, i)[0]);
  t.copy(logits, values.data());
  return logits;
}

// Holds the choice that these logits give, on the device.
SortByExpert sorted_slots(Device& device, Tensors& t, const RouterShape& s) {
  const SortByExpert sort{.experts = t.make(DType::kI32, {s.T, s.k}),
                          .weights = t.fp32({s.T, s.k}),
                          .offsets = t.make(DType::kI32, {s.E + 1}),
                          .counts = t.make(DType::kI32, {s.E}),
                          .row_of_slot = t.make(DType::kI32, {s.T, s.k}),
                          .slot_of_row = t.make(DType::kI32, {s.rows()}),
                          .row_weights = t.fp32({s.rows()})};
  route(device, {.logits = router_logits(t, s), .experts = sort.experts, .weights = sort.weights});
  sort_by_expert(device, sort);
  return sort;
}

void bench_router(Device& device, Bench& bench, const RouterShape& s) {
  bench.time(
      s.name, "route",
      [&](Tensors& t) {
        return Route{.logits = router_logits(t, s),
                     .experts = t.make(DType::kI32, {s.T, s.k}),
                     .weights = t.fp32({s.T, s.k})};
      },
      route);
  bench.time(
      s.name, "sort_by_expert", [&](Tensors& t) { return sorted_slots(device, t, s); }, sort_by_expert);
  bench.time(
      s.name, "router_load",
      [&](Tensors& t) {
        return RouterLoad{.logits = router_logits(t, s),
                          .experts = sorted_slots(device, t, s).experts,
                          .load = t.fp32({2 * s.E + 1})};
      },
      router_load);
  bench.time(
      s.name, "route_backward",
      [&](Tensors& t) {
        const SortByExpert sorted = sorted_slots(device, t, s);
        return RouteBackward{.logits = router_logits(t, s),
                             .experts = sorted.experts,
                             .row_of_slot = sorted.row_of_slot,
                             .d_row_weights = sorted.row_weights,
                             .load = t.fp32({s.E}),
                             .balance_factor = 1e-6f,
                             .z_factor = 1e-6f,
                             .d_logits = t.bf16({s.T, s.E})};
      },
      route_backward);
}

void bench_rows(Device& device, Bench& bench, const RouterShape& s) {
  const auto gather = [&](Tensors& t) {
    return GatherTokens{.slot_of_row = sorted_slots(device, t, s).slot_of_row, .slots_per_token = s.k};
  };
  const auto codes = [](Tensors& t, int64_t rows, int64_t cols) {
    return t.fp8(DType::kE4M3, rows, cols, Scaling::kTensor).data;
  };
  bench.time(
      s.name, "gather_tokens.fp8",
      [&](Tensors& t) {
        GatherTokens op = gather(t);
        op.x = codes(t, s.T, s.d), op.out = codes(t, s.rows(), s.d);
        return op;
      },
      gather_tokens);
  bench.time(
      s.name, "gather_tokens.fp8_t",
      [&](Tensors& t) {
        GatherTokens op = gather(t);
        op.x_t = codes(t, s.d, s.T), op.out_t = codes(t, s.d, s.rows());
        return op;
      },
      gather_tokens);
  bench.time(
      s.name, "gather_tokens.bf16",
      [&](Tensors& t) {
        GatherTokens op = gather(t);
        op.x = t.bf16({s.T, s.d}), op.out = t.bf16({s.rows(), s.d});
        return op;
      },
      gather_tokens);
  bench.time(
      s.name, "combine_rows",
      [&](Tensors& t) {
        return CombineRows{.rows = t.bf16({s.rows(), s.d}),
                           .row_of_slot = sorted_slots(device, t, s).row_of_slot,
                           .out = t.bf16({s.T, s.d})};
      },
      combine_rows);
}

}  // namespace

void bench_moe(Device& device, Bench& bench) {
  for (const RouterShape& s : {RouterShape{"OLMoE", 16384, 2048, 64, 8},
                               {"Qwen3-30B-A3B", 16384, 2048, 128, 8},
                               {"150m", 65536, 768, 32, 8}}) {
    bench_router(device, bench, s);
    bench_rows(device, bench, s);
  }
}

}  // namespace parka::bench
