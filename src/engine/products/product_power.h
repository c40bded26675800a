#pragma once
#include <optional>
#include <string>
#include <vector>

#include "engine/step/recorded_step.h"
#include "kernels/device/device.h"
#include "kernels/device/power_sampler.h"
#include "kernels/ops/gemm/gemm.h"

// What the products of a config cost in time and energy under load, in other formats, layouts and orders of
// operands than those that the config uses, too.
namespace parka {

// A way to compute out [M, N] = A [M, K] B [N, K]^T.
struct ProductWay {
  std::string formats;   // of A and B, "e5m2 x e4m3, fast"
  std::string layout;    // whether A and B lie transposed: "NN", "NT", "TN", "TT"
  bool swapped = false;  // out^T [N, M] = B A^T: with M and N exchanged
  bool is_used = false;  // by the config
  Gemm gemm = {};        // its tensors have no memory
};

// The ways of products of this shape that cuBLASLt may have an algorithm for: bf16 in four layouts, FP8 with a
// scale per tensor in three pairs of formats with either accumulation, FP8 with a scale per 128, and both orders.
std::vector<ProductWay> ways_of(const GemmShape& shape, DType out);

struct MeasuredWay {
  ProductWay way;
  double seconds = 0;  // of a run
  PowerUse use = {};

  double flops() const { return cost_of(way.gemm).flop / seconds; }  // per second
  std::optional<double> joules() const {                             // of a run
    return use.watts ? std::optional(*use.watts * seconds) : std::nullopt;
  }
};
struct ProductPower {
  GemmShape shape{};
  double flop_share = 0;  // of all products of a step
  std::vector<MeasuredWay> ways = {};
};

// Measures the ways of the products' shapes, each under load without a pause, in about `seconds` altogether: of the
// shapes with the most FLOP, of which there is one at least. Operands are random numbers from a normal
// distribution. Without a counter there are times alone.
std::vector<ProductPower> measure_product_power(Device& device, PowerCounter* counter,
                                                const std::vector<RecordedProduct>& products, double seconds);

}  // namespace parka
