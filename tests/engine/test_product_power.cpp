#include "engine/products/product_power.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "engine/planning/bench.h"
#include "tests/engine/step_config.h"
#include "tests/support/alone.h"
#include "tests/support/catch.h"
#include "tests/support/steady_counter.h"
#include "tests/support/temporary_folder.h"

using namespace parka;
using namespace parka::test;

namespace {

// Up to rounding.
bool near(double watts, double wanted) { return std::abs(watts - wanted) < 1e-9 * wanted; }

}  // namespace

TEST_CASE("the ways of a product are different products of its shape", "[engine][power]") {
  const auto ways = ways_of({256, 384, 128}, DType::kBF16);
  std::set<std::string> keys;
  std::set<std::pair<std::string, std::string>> kinds;
  for (const ProductWay& way : ways) {
    CAPTURE(way.formats, way.layout, way.swapped);
    const GemmShape shape = gemm_shape(way.gemm);
    CHECK(shape.rows == (way.swapped ? 384 : 256));
    CHECK(shape.cols == (way.swapped ? 256 : 384));
    CHECK(shape.depth == 128);
    CHECK(keys.insert(key_of(way.gemm)).second);
    kinds.insert({way.formats, way.layout});
  }
  CHECK(ways.size() == 14);
  for (const char* layout : {"NN", "NT", "TN", "TT"}) CHECK(kinds.contains({"bf16 x bf16", layout}));
  for (const char* formats : {"e4m3 x e4m3, fast", "e5m2 x e4m3, accurate", "e4m3 1x128 x e4m3 128x128"}) {
    CHECK(kinds.contains({formats, "NN"}));
  }
  // FP8 takes only multiples of 16.
  for (const ProductWay& way : ways_of({40, 24, 20}, DType::kF32)) CHECK(way.formats == "bf16 x bf16");
}

TEST_CASE("all ways of a product run, and those that the config has are marked", "[engine][power][slow]") {
  const TemporaryFolder folder;
  Config config = step_config(folder.path().string(), "coat", 0, true, 1, 1);
  const std::vector<RecordedProduct> products = record_products(config, 1);
  const auto device = make_cpu_device();
  const std::vector<ProductPower> measured = measure_product_power(*device, nullptr, products, 1);
  REQUIRE(measured.size() == 1);  // the seconds are enough for one shape only
  const ProductPower& largest = measured.front();
  CHECK(largest.flop_share > 0.05);
  CHECK(largest.flop_share < 1);
  std::set<std::string> of_config, marked;
  for (const RecordedProduct& product : products) of_config.insert(key_of(product.gemm));
  for (const MeasuredWay& way : largest.ways) {
    CAPTURE(way.way.formats, way.way.layout);
    CHECK(way.seconds > 0);
    CHECK_FALSE(way.joules());
    CHECK(way.way.is_used == of_config.contains(key_of(way.way.gemm)));
    if (way.way.is_used) marked.insert(way.way.formats);
  }
  CHECK(marked.size() == 1);
}

TEST_CASE("a product's energy is the mean power times its time", "[engine][power][slow]") {
  Gemm product = ways_of({40, 24, 20}, DType::kF32).front().gemm;
  SteadyCounter counter(350);
  const auto device = make_cpu_device();
  const std::vector<ProductPower> measured = measure_product_power(*device, &counter, {{product, 3}}, 8);
  REQUIRE(measured.size() == 1);
  CHECK(measured.front().flop_share == 1);
  for (const MeasuredWay& way : measured.front().ways) {
    REQUIRE(way.use.watts);
    CHECK(near(*way.use.watts, 350));
    CHECK(way.joules() == *way.use.watts * way.seconds);
    CHECK(way.use.clock == 1.5e9);
  }
}

TEST_CASE("a benchmark's joules per token are its watts over its speed", "[engine][power][slow]") {
  const TemporaryFolder folder;
  const Config config = step_config(folder.path().string(), "bf16", 0, true, 1, 1);
  const auto device = make_cpu_device();
  const BenchResult quick = run_benchmark(
      config, *device, alone(), {std::make_unique<SteadyCounter>(400, /*seconds_of_reading=*/0), ""}, 1, false);
  CHECK_FALSE(quick.watts());
  CHECK_FALSE(quick.joules_per_token());
  CHECK(quick.power_missing.find("give --steps") != std::string::npos);
  PowerSource source;
  source.counter = std::make_unique<SteadyCounter>(400);
  BenchResult result;
  for (int64_t steps = 100; !result.watts() && steps <= 100'000; steps *= 3) {
    result = run_benchmark(config, *device, alone(), source, steps, false);
  }
  REQUIRE(result.watts());
  CHECK(near(*result.watts(), 400));
  CHECK(result.joules_per_token() == *result.watts() / result.tokens_per_second());
  CHECK(result.power_missing.empty());
  REQUIRE(result.power.size() == 1);
  CHECK(result.power.front().limit_watts == 700);
  const BenchResult without = run_benchmark(config, *device, alone(), {nullptr, "none here"}, 1, false);
  CHECK(without.power_missing == "none here");
}
