#include "engine/products/product_power.h"

#include <algorithm>
#include <cstddef>
#include <optional>
#include <set>
#include <tuple>

#include "engine/products/product_scratch.h"
#include "engine/products/random_operands.h"
#include "engine/products/timed_runs.h"

namespace parka {
namespace {

constexpr double kSettleSeconds = 0.2;  // until clock and power are those of the load
constexpr double kLeastMeasuredSeconds = kLeastPowerSeconds + 0.2;
// Once, unless something else had slowed down what the number of runs was taken from: then they are over too soon.
constexpr int kTries = 3;
constexpr double kLeastShare = 0.9;
constexpr int64_t kBlock = 128;

// An address for tensors that get memory later, with which cuBLASLt's alignment is full.
void* nowhere() {
  alignas(256) static std::byte place[1];
  return place;
}

TensorView matrix(DType dtype, int64_t rows, int64_t cols) { return {nowhere(), dtype, {rows, cols}}; }

ScaledView scaled(DType dtype, int64_t rows, int64_t cols, Scaling scaling) {
  const int64_t group = scaling == Scaling::kTensor ? 0 : kBlock;
  const auto [scale_rows, scale_cols] = scale_shape(scaling, group, rows, cols);
  const TensorView scale = scaling == Scaling::kTensor ? TensorView(nowhere(), DType::kF32, {1})
                                                       : matrix(DType::kF32, scale_rows, scale_cols);
  return {matrix(dtype, rows, cols), scale, scaling, group};
}

ProductWay plain_way(const GemmShape& s, DType out, bool a_transposed, bool b_transposed) {
  ProductWay way = {.formats = "bf16 x bf16",
                    .layout = fmt::format("{}{}", a_transposed ? 'T' : 'N', b_transposed ? 'T' : 'N')};
  way.gemm.a = a_transposed ? matrix(DType::kBF16, s.depth, s.rows) : matrix(DType::kBF16, s.rows, s.depth);
  way.gemm.b = b_transposed ? matrix(DType::kBF16, s.depth, s.cols) : matrix(DType::kBF16, s.cols, s.depth);
  way.gemm.a_transposed = a_transposed;
  way.gemm.b_transposed = b_transposed;
  way.gemm.out = matrix(out, s.rows, s.cols);
  return way;
}

ProductWay float8_way(const GemmShape& s, DType out, DType a, DType b, bool fast) {
  ProductWay way = {.formats = fmt::format("{} x {}, {}", name_of(a), name_of(b), fast ? "fast" : "accurate"),
                    .layout = "NN"};
  way.gemm = {.a = scaled(a, s.rows, s.depth, Scaling::kTensor),
              .b = scaled(b, s.cols, s.depth, Scaling::kTensor),
              .out = matrix(out, s.rows, s.cols),
              .fast_accumulation = fast};
  return way;
}

ProductWay block_way(const GemmShape& s, DType out) {
  ProductWay way = {.formats = fmt::format("e4m3 1x{0} x e4m3 {0}x{0}", kBlock), .layout = "NN"};
  way.gemm = {.a = scaled(DType::kE4M3, s.rows, s.depth, Scaling::kGroup),
              .b = scaled(DType::kE4M3, s.cols, s.depth, Scaling::kBlock),
              .out = matrix(out, s.rows, s.cols)};
  return way;
}

class Measurement {
 public:
  Measurement(Device& device, PowerCounter* counter, const std::vector<Gemm>& gemms, double seconds)
      : device_(device),
        counter_(counter),
        seconds_(seconds),
        scratch_(device, gemms, most_of(gemms, RandomOperands::workspace_of)),
        operands_(device, most_of(gemms, RandomOperands::elements_of)) {}

  MeasuredWay measure(const ProductWay& way) const {
    const Gemm a = scratch_.place(way.gemm);
    operands_.fill(a);
    gemm(device_, a);  // the library sets itself up
    MeasuredWay measured = {.way = way};
    measured.seconds = time(a, runs_in(kSettleSeconds, time(a, 1)));
    for (int tries = 0; tries < kTries; ++tries) {
      const int64_t count = runs_in(seconds_, measured.seconds);
      std::optional<PowerSampler> sampler;
      if (counter_ != nullptr) sampler.emplace(*counter_);
      measured.seconds = time(a, count);
      if (sampler) measured.use = sampler->stop();
      if (measured.seconds * static_cast<double>(count) >= kLeastShare * seconds_) break;
    }
    return measured;
  }

 private:
  template <typename Value>
  static int64_t most_of(const std::vector<Gemm>& gemms, const Value& value) {
    int64_t most = 0;
    for (const Gemm& a : gemms) most = std::max(most, value(a));
    return most;
  }

  double time(const Gemm& a, int64_t count) const {
    return seconds_of_each(device_, count, [&] { gemm(device_, a); });
  }

  Device& device_;
  PowerCounter* counter_;
  double seconds_;  // of measuring a way
  ProductScratch scratch_;
  RandomOperands operands_;
};

// The shapes with their ways, those with the most FLOP of a step first.
std::vector<ProductPower> shapes_of(const std::vector<RecordedProduct>& products) {
  std::set<std::string> used;
  double all_flop = 0;
  for (const RecordedProduct& product : products) {
    used.insert(key_of(product.gemm));
    all_flop += static_cast<double>(product.count) * cost_of(product.gemm).flop;
  }
  std::vector<ProductPower> shapes;
  for (const RecordedProduct& product : products) {
    const GemmShape shape = gemm_shape(product.gemm);
    auto found = std::find_if(shapes.begin(), shapes.end(), [&](const ProductPower& other) {
      return std::tie(other.shape.rows, other.shape.cols, other.shape.depth) ==
             std::tie(shape.rows, shape.cols, shape.depth);
    });
    if (found == shapes.end()) {
      found = shapes.insert(shapes.end(), {.shape = shape});
      for (const ProductWay& way : ways_of(shape, product.gemm.out.dtype)) {
        found->ways.push_back({.way = way});
        found->ways.back().way.is_used = used.contains(key_of(way.gemm));
      }
    }
    found->flop_share += static_cast<double>(product.count) * cost_of(product.gemm).flop / all_flop;
  }
  std::stable_sort(shapes.begin(), shapes.end(),
                   [](const ProductPower& a, const ProductPower& b) { return a.flop_share > b.flop_share; });
  return shapes;
}

}  // namespace

std::vector<ProductWay> ways_of(const GemmShape& shape, DType out) {
  std::vector<ProductWay> ways;
  const auto add = [&](ProductWay way, bool swapped) {
    way.swapped = swapped;
    if (suits_cublaslt(way.gemm)) ways.push_back(std::move(way));
  };
  for (const bool a_transposed : {false, true}) {
    for (const bool b_transposed : {false, true}) add(plain_way(shape, out, a_transposed, b_transposed), false);
  }
  constexpr DType kE4M3 = DType::kE4M3, kE5M2 = DType::kE5M2;
  for (const bool fast : {true, false}) {
    add(float8_way(shape, out, kE4M3, kE4M3, fast), false);
    add(float8_way(shape, out, kE5M2, kE4M3, fast), false);
    add(float8_way(shape, out, kE4M3, kE5M2, fast), false);
  }
  add(block_way(shape, out), false);
  const GemmShape swapped = {shape.cols, shape.rows, shape.depth};
  add(plain_way(swapped, out, false, false), true);
  add(float8_way(swapped, out, kE4M3, kE4M3, true), true);
  add(float8_way(swapped, out, kE4M3, kE5M2, true), true);
  return ways;
}

std::vector<ProductPower> measure_product_power(Device& device, PowerCounter* counter,
                                                const std::vector<RecordedProduct>& products, double seconds) {
  std::vector<ProductPower> shapes = shapes_of(products);
  if (shapes.empty()) return shapes;
  const auto ways = static_cast<double>(shapes.front().ways.size());
  const double least = ways * (kSettleSeconds + kLeastMeasuredSeconds);
  const auto fit = static_cast<size_t>(std::max(1.0, seconds / least));
  if (shapes.size() > fit) shapes.resize(fit);
  const double of_way = seconds / (ways * static_cast<double>(shapes.size())) - kSettleSeconds;
  std::vector<Gemm> gemms;
  for (const ProductPower& shape : shapes) {
    for (const MeasuredWay& way : shape.ways) gemms.push_back(way.way.gemm);
  }
  const Measurement measurement(device, counter, gemms, std::max(of_way, 0.0));
  for (ProductPower& shape : shapes) {
    for (MeasuredWay& way : shape.ways) way = measurement.measure(way.way);
  }
  return shapes;
}

}  // namespace parka
