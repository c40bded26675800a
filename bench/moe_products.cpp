#include <cmath>
#include <tuple>

#include "bench/kernel_bench.h"

// The products of experts at the shapes of OLMoE and Qwen3-30B-A3B, in FP8 and bf16, beside one product of cuBLASLt
// for each expert. Only rows in use count.
namespace parka::bench {
namespace {

struct ExpertsShape {
  const char* name;
  int64_t slots, experts, d, f;
};
constexpr ExpertsShape kExperts[] = {{"olmoe", 16384 * 8, 64, 2048, 1024},
                                     {"qwen3-30b-a3b", 16384 * 8, 128, 2048, 768}};

// About as many rows for each expert as random routing leaves, on the host.
struct RowsOfExperts {
  explicit RowsOfExperts(const ExpertsShape& s) : total(expert_rows(s.slots, s.experts)), slots(s.slots) {
    const double mean = static_cast<double>(s.slots) / static_cast<double>(s.experts);
    int64_t left = s.slots;
    int32_t begin = 0;
    for (int64_t e = 0; e < s.experts; ++e) {
      const double drawn = mean + std::sqrt(mean) * philox_normal2(9, 10, static_cast<uint64_t>(e))[0];
      const int64_t count = e + 1 == s.experts ? left : std::min<int64_t>(left, std::llround(drawn));
      offsets.push_back(begin);
      counts.push_back(static_cast<int32_t>(count));
      begin += static_cast<int32_t>(ceil_div(count, kExpertRows) * kExpertRows);
      left -= count;
    }
    offsets.push_back(begin);
  }
  int64_t total, slots;
  std::vector<int32_t> offsets, counts;
};

// An op whose cost is that of the rows in use.
template <typename Op>
struct OfRowsInUse : Op {
  double flop;
};
template <typename Op>
OpCost cost_of(const OfRowsInUse<Op>& a) {
  OpCost cost = parka::cost_of(static_cast<const Op&>(a));
  cost.flop = a.flop;
  return cost;
}

struct ProductsOfExperts {
  std::vector<Gemm> products;
  double flop;
};
OpCost cost_of(const ProductsOfExperts& a) {
  OpCost cost = parka::cost_of(a.products.front());
  cost.bytes = 0;
  for (const Gemm& product : a.products) cost.bytes += parka::cost_of(product).bytes;
  cost.flop = a.flop;
  return cost;
}
void multiply_each(Device& device, const ProductsOfExperts& a) {
  for (const Gemm& product : a.products) gemm(device, product);
}

// One matrix [N, K] of each expert.
struct ExpertsBench {
  Bench& bench;
  const ExpertsShape& shape;
  RowsOfExperts rows{shape};
  bool fp8;
  std::string prefix;
  int64_t N, K;

  ScaledView matrix(Tensors& t, DType code, int64_t r, int64_t c) const {
    return fp8 ? t.fp8(code, r, c, Scaling::kTensor) : ScaledView(t.bf16({r, c}));
  }
  ScaledView weights(Tensors& t, int64_t r, int64_t c) const {
    ScaledView w = matrix(t, DType::kE4M3, shape.experts * r, c);
    if (fp8) w.scale = t.fp32({shape.experts});
    return w;
  }
  double flop() const {
    return 2.0 * static_cast<double>(rows.slots) * static_cast<double>(N) * static_cast<double>(K);
  }
  template <typename Make, typename Op>
  void time(const char* name, const Make& make, const Op& op) const {
    bench.time(shape.name, ("grouped." + prefix + name).c_str(), make, op);
  }

  // Rows of `code` [R, depth] times matrices [cols, depth].
  void time_rows(const std::string& name, DType code, int64_t cols, int64_t depth) const {
    time(
        name.c_str(),
        [&](Tensors& t) {
          return OfRowsInUse<GroupedGemm>{{.a = matrix(t, code, rows.total, depth),
                                           .b = weights(t, cols, depth),
                                           .offsets = t.upload(rows.offsets),
                                           .counts = t.upload(rows.counts),
                                           .out = t.bf16({rows.total, cols}),
                                           .fast_accumulation = true},
                                          flop()};
        },
        grouped_gemm);
    time((name + ".each").c_str(),
         [&](Tensors& t) {
           ProductsOfExperts all{{}, flop()};
           for (const int32_t count : rows.counts) {
             all.products.push_back({.a = matrix(t, code, count, depth),
                                     .b = matrix(t, DType::kE4M3, cols, depth),
                                     .out = t.bf16({count, cols}),
                                     .fast_accumulation = true});
           }
           return all;
         },
         multiply_each);
  }

  void time_weight_gradient() const {
    const auto operand = [&](Tensors& t, DType code, int64_t r, int64_t c) {
      return fp8 ? matrix(t, code, c, r) : matrix(t, code, r, c);
    };
    time(
        "weight_gradient",
        [&](Tensors& t) {
          return OfRowsInUse<GroupedWeightGradient>{{.d_y = operand(t, DType::kE5M2, rows.total, N),
                                                     .x = operand(t, DType::kE4M3, rows.total, K),
                                                     .offsets = t.upload(rows.offsets),
                                                     .counts = t.upload(rows.counts),
                                                     .out = t.bf16({shape.experts * N, K}),
                                                     .accumulate = true},
                                                    flop()};
        },
        grouped_weight_gradient);
    time(
        "weight_gradient.each",
        [&](Tensors& t) {
          ProductsOfExperts all{{}, flop()};
          for (const int32_t count : rows.counts) {
            const int64_t padded = ceil_div(count, 16) * 16;
            all.products.push_back({.a = operand(t, DType::kE5M2, padded, N),
                                    .b = operand(t, DType::kE4M3, padded, K),
                                    .a_transposed = !fp8,
                                    .b_transposed = !fp8,
                                    .out = t.bf16({N, K}),
                                    .accumulate = true});
          }
          return all;
        },
        multiply_each);
  }
};

}  // namespace

void bench_moe_products(Bench& bench) {
  for (const ExpertsShape& s : kExperts) {
    for (const bool fp8 : {true, false}) {
      for (const auto& [name, N, K] : {std::tuple{"up_gate.", 2 * s.f, s.d}, {"down.", s.d, s.f}}) {
        const ExpertsBench experts{.bench = bench,
                                   .shape = s,
                                   .fp8 = fp8,
                                   .prefix = (fp8 ? "fp8." : "bf16.") + std::string(name),
                                   .N = N,
                                   .K = K};
        experts.time_rows("forward", DType::kE4M3, N, K);
        experts.time_rows("input_gradient", DType::kE5M2, K, N);
        experts.time_weight_gradient();
      }
    }
  }
}

}  // namespace parka::bench
