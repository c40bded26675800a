
#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/products/product_scratch.h"
#include "engine/training/training_run.h"
#include "tests/engine/step_config.h"
#include "tests/support/alone.h"
#include "tests/support/catch.h"
#include "tests/support/forwarding_device.h"
#include "tests/support/temporary_folder.h"

using namespace parka;
using namespace parka::test;

namespace {

// A CPU that has all products that may be as one kernel with what reads them.
class FusingDevice final : public ForwardingDevice {
 public:
  bool fuses(std::string_view, int64_t) const override { return true; }
  void start_op_timer() override { op_timer_ = &timer_; }
  std::vector<OpTime> stop_op_timer() override {
    op_timer_ = nullptr;
    return std::exchange(timer_.ops, {});
  }

 private:
  struct Timer final : OpTimer {  // of a device, not of the CPU behind it
    void begin(std::string_view op, OpCost cost) override { ops.push_back({section, std::string(op), cost, 0}); }
    void end() override {}
    std::vector<OpTime> ops;
  };
  Timer timer_;
};

// Of tensors by where they begin and their bytes.
bool are_apart(const std::set<std::pair<const std::byte*, int64_t>>& places) {
  const std::byte* end = nullptr;
  for (const auto& [begin, bytes] : places) {
    if (begin < end) return false;
    end = begin + bytes;
  }
  return true;
}

// Three steps on a device.
struct Steps {
  Steps(std::unique_ptr<Device> device, const Config& config) {
    TrainingRun run(config, *device, alone());
    run.initialize();
    for (int step = 0; step < 3; ++step) {
      if (step == 2) device->start_op_timer();
      add(run.step());
    }
    for (const OpTime& time : device->stop_op_timer()) ops.insert(time.op);
    add(run.finish());
  }

  void add(const std::optional<StepReport>& report) {
    if (!report) return;
    losses.push_back(report->loss);
    if (report->telemetry) telemetry.push_back(*report->telemetry);
  }

  std::vector<double> losses;
  std::vector<TelemetryReport> telemetry;
  std::multiset<std::string> ops;  // of the last step
};

}  // namespace

TEST_CASE("a run makes one kernel of what its device fuses, and its bits stay", "[engine][tuning]") {
  const TemporaryFolder folder;
  for (const char* recipe : {"coat", "parka"}) {
    for (const Recompute recompute : {Recompute::kNone, Recompute::kBlock}) {
      CAPTURE(recipe, recompute == Recompute::kBlock);
      Config config = step_config(folder.path().string(), recipe, 0, true, 2, 1);
      config.precision.recompute = recompute;
      config.precision.weight_copies = WeightCopies::kNone;  // they are made for each product
      config.data.eval.clear();
      const Steps two(make_cpu_device(), config);
      const Steps one(std::make_unique<FusingDevice>(), config);
      CHECK(one.losses.size() == 3);
      CHECK(one.losses == two.losses);
      // In backward, too, where a block is run again.
      const size_t forwards = 2u * 4u * (recompute == Recompute::kBlock ? 2u : 1u);
      const auto check_fused = [&](const char* op, const char* both) {
        CHECK(two.ops.count(both) == 0);
        CHECK(two.ops.count(op) == forwards);
        CHECK(one.ops.count(op) == 0);
        CHECK(one.ops.count(both) == forwards);
      };
      const bool saves_qkv = recipe == std::string("parka");  // in FP8
      check_fused("swiglu_forward", "swiglu_projection");
      if (saves_qkv) check_fused("rope_forward", "rope_projection");
      CHECK(one.ops.count("quantize") == two.ops.count("quantize"));
      CHECK(one.ops.count("gemm") + (saves_qkv ? 2 : 1) * forwards == two.ops.count("gemm"));
    }
  }
}

TEST_CASE("telemetry samples what one kernel quantizes as it does what two quantize", "[engine][tuning]") {
  const TemporaryFolder folder;
  Config config = step_config(folder.path().string(), "parka", 0, true, 2, 1);
  config.data.eval.clear();
  config.telemetry.interval = 1;
  const auto device = make_cpu_device();
  const TrainingRun run(config, *device, alone());
  const Steps two(make_cpu_device(), config);
  const Steps one(std::make_unique<FusingDevice>(), config);
  CHECK(one.losses == two.losses);
  REQUIRE(one.telemetry.size() == 3);
  REQUIRE(two.telemetry.size() == 3);
  for (size_t i = 0; i < 3; ++i) {
    const auto records = telemetry_records(one.telemetry[i], 1, run.model().parameters());
    const auto of_two = telemetry_records(two.telemetry[i], 1, run.model().parameters());
    REQUIRE(records.size() == of_two.size());
    // As text: some of the numbers are NaN.
    for (size_t n = 0; n < records.size(); ++n) CHECK(records[n].dump() == of_two[n].dump());
    const auto quantization = std::find_if(records.begin(), records.end(),
                                           [](const auto& record) { return record["kind"] == "quantization"; });
    REQUIRE(quantization != records.end());
    for (const char* tensor : {"qkv", "up_gate"}) {
      for (const auto& error : (*quantization)["tensors"].at(tensor)["error"]) CHECK(error > 0);
    }
  }
}

TEST_CASE("scratch has room for every tensor of a step's products", "[engine][tuning]") {
  const TemporaryFolder folder;
  const auto device = make_cpu_device();
  const Config config = step_config(folder.path().string(), "parka", 0, true, 1, 1);
  for (const RecordedProduct& product : record_products(config, 1)) {
    CAPTURE(key_of(product.gemm));
    const ProductScratch scratch(*device, std::vector{product.gemm});
    const Gemm placed = scratch.place(product.gemm);
    std::set<std::pair<const std::byte*, int64_t>> places;
    for (const TensorView* t : {&placed.a.data, &placed.a.scale, &placed.b.data, &placed.b.scale, &placed.out}) {
      if (!t->empty()) places.emplace(static_cast<const std::byte*>(t->data), t->bytes());
    }
    CHECK(places.size() == (placed.a.scale.empty() ? 3 : 5));
    CHECK(are_apart(places));
  }
}
