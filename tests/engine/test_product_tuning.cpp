#include "engine/products/product_tuning.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "engine/files/gemm_tuning_file.h"
#include "engine/products/product_power.h"
#include "engine/products/product_scratch.h"
#include "engine/products/random_operands.h"
#include "engine/training/training_run.h"
#include "kernels/device/op_fault.h"
#include "tests/engine/step_config.h"
#include "tests/support/alone.h"
#include "tests/support/catch.h"
#include "tests/support/temporary_folder.h"

using namespace parka;
using namespace parka::test;

namespace {

std::set<std::string> keys_of(const std::vector<FusedProduct>& products) {
  std::set<std::string> keys;
  for (const FusedProduct& a : products) keys.insert(key_of(a));
  return keys;
}

// The only one of its kind among a step's.
template <typename Op>
Op only(const std::vector<FusedProduct>& products) {
  std::vector<Op> found;
  for (const FusedProduct& a : products) {
    if (const Op* op = std::get_if<Op>(&a)) found.push_back(*op);
  }
  REQUIRE(found.size() == 1);
  return found.front();
}

// Of tensors by where they begin and their bytes.
bool are_apart(const std::set<std::pair<const std::byte*, int64_t>>& places) {
  const std::byte* end = nullptr;
  for (const auto& [begin, bytes] : places) {
    if (begin < end) return false;
    end = begin + bytes;
  }
  return true;
}

// Three steps on a device that makes one kernel of what has these keys.
struct Steps {
  Steps(std::unique_ptr<Device> device, const Config& config, std::set<std::string> fused) {
    device->set_fused(std::move(fused));
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

const TensorView& codes_of(const SwigluProjection& a) { return a.swiglu.up_gate.data; }
const TensorView& codes_of(const RopeProjection& a) { return a.rope.saved.data; }

// Changes the first code, or all of them, that one kernel leaves: each time, or every other one.
class WrongKernel final : public OpFault {
 public:
  enum class Codes { kFirst, kAll };
  WrongKernel(const FusedProduct& of, Codes which, bool every_other)
      : op_(op_of(of)),
        codes_(std::visit([](const auto& a) { return codes_of(a); }, of)),
        which_(which),
        every_other_(every_other) {}
  void after(Device&, std::string_view op, const TensorView&) override {
    if (op != op_ || (every_other_ && ++runs_ % 2 == 0)) return;
    const int64_t changed = which_ == Codes::kFirst ? 1 : codes_.bytes();
    for (int64_t i = 0; i < changed; ++i) codes_.as<Float8E4M3>()[i].bits ^= 0x80;  // the sign
  }

 private:
  std::string_view op_;
  TensorView codes_;
  Codes which_;
  bool every_other_;
  int64_t runs_ = 0;
};

}  // namespace

TEST_CASE("products that may be one kernel with what reads them are recorded once", "[engine][tuning]") {
  const TemporaryFolder folder;
  for (const char* recipe : {"coat", "parka"}) {
    for (const int64_t micro_batches : {1, 3}) {
      CAPTURE(recipe, micro_batches);
      const Config config = step_config(folder.path().string(), recipe, 0, true, micro_batches, 1);
      const std::vector<FusedProduct> products = record_fused_products(config, 1);
      const bool saves_qkv = recipe == std::string("parka");  // in FP8
      CHECK(products.size() == (saves_qkv ? 2 : 1));
      const auto projection = only<SwigluProjection>(products);
      CHECK(suits_one_kernel(projection));
      if (saves_qkv) {
        const auto rotated = only<RopeProjection>(products);
        CHECK(suits_one_kernel(rotated));
        CHECK(key_of(FusedProduct(rotated)) ==
              "16 x 80 x 48 e4m3 NN bf16 [e4m3 per tensor, e4m3 per tensor, fast], rope per 1x16");
      }
      const GemmShape shape = gemm_shape(projection.projection);
      CHECK(shape.rows == kStepSequence);
      CHECK(shape.cols == 2 * 80);
      CHECK(shape.depth == 48);
      CHECK(key_of(FusedProduct(projection)) ==
            "16 x 160 x 48 e4m3 NN bf16 [e4m3 per tensor, e4m3 per tensor, fast], swiglu per 1x16");
    }
  }
  for (const char* recipe : {"bf16", "fp8_linear", "fp8_block"}) {
    CAPTURE(recipe);
    CHECK(record_fused_products(step_config(folder.path().string(), recipe, 0, true, 1, 1), 1).empty());
  }
}

TEST_CASE("a run makes one kernel of what its device fuses, and its bits stay", "[engine][tuning]") {
  const TemporaryFolder folder;
  for (const char* recipe : {"coat", "parka"}) {
    for (const Recompute recompute : {Recompute::kNone, Recompute::kBlock}) {
      CAPTURE(recipe, recompute == Recompute::kBlock);
      Config config = step_config(folder.path().string(), recipe, 0, true, 2, 1);
      config.precision.recompute = recompute;
      config.precision.weight_copies = WeightCopies::kNone;  // they are made for each product
      config.data.eval.clear();
      const Steps two(make_cpu_device(), config, {});
      const Steps one(make_cpu_device(), config, keys_of(record_fused_products(config, 1)));
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
  const Steps two(make_cpu_device(), config, {});
  const Steps one(make_cpu_device(), config, keys_of(record_fused_products(config, 1)));
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

TEST_CASE("scratch has room for every tensor of every way of a product", "[engine][tuning]") {
  const auto device = make_cpu_device();
  for (const ProductWay& way : ways_of({256, 384, 128}, DType::kBF16)) {
    CAPTURE(way.formats, way.layout, way.swapped);
    const ProductScratch scratch(*device, std::vector{way.gemm});
    const Gemm placed = scratch.place(way.gemm);
    std::set<std::pair<const std::byte*, int64_t>> places;
    for (const TensorView* t : {&placed.a.data, &placed.a.scale, &placed.b.data, &placed.b.scale, &placed.out}) {
      if (!t->empty()) places.emplace(static_cast<const std::byte*>(t->data), t->bytes());
    }
    CHECK(places.size() == (placed.a.scale.empty() ? 3 : 5));
    CHECK(are_apart(places));
  }
}

TEST_CASE("scratch has room for every tensor of a projection, and those that share memory share it there",
          "[engine][tuning]") {
  const TemporaryFolder folder;
  const auto device = make_cpu_device();
  Config config = step_config(folder.path().string(), "coat", 0, true, 1, 1);
  config.precision.save_silu = true;
  const FusedProduct product = only<SwigluProjection>(record_fused_products(config, 1));
  const ProductScratch scratch(*device, product);
  const auto placed = std::get<SwigluProjection>(scratch.place(product));
  CHECK(key_of(placed) == key_of(product));
  CHECK(placed.swiglu.up_gate_plain.data == placed.projection.out.data);
  REQUIRE(!placed.swiglu.product_t.empty());
  CHECK(placed.swiglu.product_t.scale.data == placed.swiglu.product.scale.data);
  const SwigluForward& swiglu = placed.swiglu;
  std::set<std::pair<const std::byte*, int64_t>> places;
  for (const ScaledView* x : {&placed.projection.a, &placed.projection.b, &swiglu.up_gate, &swiglu.silu,
                              &swiglu.product, &swiglu.product_t}) {
    for (const TensorView* t : {&x->data, &x->scale}) {
      REQUIRE(!t->empty());
      places.emplace(static_cast<const std::byte*>(t->data), t->bytes());
    }
  }
  places.emplace(static_cast<const std::byte*>(placed.projection.out.data), placed.projection.out.bytes());
  CHECK(places.size() == 12);  // 13 tensors, of which two scales are one
  CHECK(are_apart(places));
  swiglu_projection(*device, placed);  // AddressSanitizer looks
}

TEST_CASE("scratch of a rotated projection has its tables, and q, k and v where the product is",
          "[engine][tuning]") {
  const TemporaryFolder folder;
  const auto device = make_cpu_device();
  const FusedProduct product =
      only<RopeProjection>(record_fused_products(step_config(folder.path().string(), "parka", 0, true, 1, 1), 1));
  const ProductScratch scratch(*device, product);
  const auto placed = std::get<RopeProjection>(scratch.place(product));
  CHECK(key_of(placed) == key_of(product));
  CHECK(placed.rope.qkv.data == placed.projection.out.data);
  std::set<std::pair<const std::byte*, int64_t>> places;
  for (const TensorView* t : {&placed.projection.a.data, &placed.projection.a.scale, &placed.projection.b.data,
                              &placed.projection.b.scale, &placed.rope.qkv, &placed.rope.cos_sin,
                              &placed.rope.saved.data, &placed.rope.saved.scale}) {
    REQUIRE(!t->empty());
    places.emplace(static_cast<const std::byte*>(t->data), t->bytes());
  }
  CHECK(places.size() == 8);
  CHECK(are_apart(places));
  rope_projection(*device, placed);  // AddressSanitizer looks
}

TEST_CASE("tuning says of each product that has one kernel whether it is that", "[engine][tuning]") {
  const TemporaryFolder folder;
  const auto device = make_cpu_device();
  const std::vector<FusedProduct> products =
      record_fused_products(step_config(folder.path().string(), "parka", 0, true, 1, 1), 1);
  const std::vector<GemmChoice> choices = tune_fused_products(*device, products, 0.01);
  REQUIRE(choices.size() == products.size());
  const GemmTuningFile file = parse_gemm_tuning(gemm_tuning_text(choices, *device), "test");
  REQUIRE(file.choices.size() == products.size());
  for (size_t i = 0; i < products.size(); ++i) {
    CHECK(choices[i].gemm == key_of(products[i]));
    CHECK(choices[i].is_of_kernels());
    CHECK(choices[i].microseconds > 0);
    CHECK(file.choices[i].algorithm == choices[i].algorithm);
    CHECK(file.choices[i].is_of_kernels());
  }
}

TEST_CASE("one kernel agrees with two if it leaves about the same, and the same bits each time",
          "[engine][tuning]") {
  using Codes = WrongKernel::Codes;
  const TemporaryFolder folder;
  const auto device = make_cpu_device();
  const std::vector<FusedProduct> products =
      record_fused_products(step_config(folder.path().string(), "parka", 0, true, 1, 1), 1);
  REQUIRE(products.size() == 2);
  for (const FusedProduct& product : products) {
    CAPTURE(op_of(product));
    const ProductScratch scratch(*device, product, RandomOperands::workspace_of(gemm_of(product)));
    const FusedProduct placed = scratch.place(product);
    RandomOperands(*device, RandomOperands::elements_of(gemm_of(placed))).fill(gemm_of(placed));
    const auto agrees_with = [&](WrongKernel fault) {
      device->set_op_fault(&fault);
      const bool agrees = one_kernel_agrees(*device, placed);
      device->set_op_fault(nullptr);
      return agrees;
    };
    CHECK(one_kernel_agrees(*device, placed));
    CHECK(agrees_with({placed, Codes::kFirst, false}));  // as sums that are rounded otherwise
    CHECK_FALSE(agrees_with({placed, Codes::kFirst, true}));
    CHECK_FALSE(agrees_with({placed, Codes::kAll, false}));
  }
}

TEST_CASE("one kernel is chosen where it is clearly faster", "[engine][tuning]") {
  const GemmChoice faster = choose_kernels("k", 2e-3, 0.9), tie = choose_kernels("k", 2e-3, 0.998),
                   slower = choose_kernels("k", 2e-3, 1.1);
  CHECK(faster.gemm == "k");
  CHECK(faster.algorithm == GemmChoice::kOneKernel);
  CHECK(std::abs(faster.microseconds - 1800) < 1e-9);
  CHECK(faster.default_microseconds == 2000);
  for (const GemmChoice& choice : {tie, slower}) {
    CHECK(choice.algorithm == GemmChoice::kTwoKernels);
    CHECK(choice.microseconds == 2000);
    CHECK(choice.default_microseconds == 2000);
  }
}

TEST_CASE("a run on a GPU makes one kernel of what its device fuses", "[engine][tuning][gpu]") {
  if (num_cuda_devices() == 0) return;
  const TemporaryFolder folder;
  for (const char* recipe : {"coat", "parka"}) {
    CAPTURE(recipe);
    Config config = step_config(folder.path().string(), recipe, 0, true, 2, 1);
    config.data.eval.clear();
    config.model.d_model = 128;  // with heads and a width of q, k and v that the kernel has
    config.model.num_heads = 2;
    config.model.num_kv_heads = 1;
    config.model.given_head_dim = 64;
    const Steps two(make_cuda_device(), config, {});
    const Steps one(make_cuda_device(), config, keys_of(record_fused_products(config, 1)));
    const size_t with_fp8_qkv = config.precision.qkv == Storage::kFp8 ? 1 : 0;
    CHECK(one.ops.count("swiglu_projection") == 2u * 4u);
    CHECK(one.ops.count("rope_projection") == with_fp8_qkv * 2u * 4u);
    for (const char* op : {"swiglu_projection", "rope_projection"}) CHECK(two.ops.count(op) == 0);
    REQUIRE(one.losses.size() == two.losses.size());
    // Which numbers it leaves is for tests of the kernel: here a few codes may be neighbours.
    for (const double loss : one.losses) CHECK(std::isfinite(loss));
  }
}

TEST_CASE("a GPU fuses what was chosen to be one kernel", "[engine][tuning][gpu]") {
  if (num_cuda_devices() == 0) return;
  const auto gpu = make_cuda_device();
  choose_gemm_algorithms(*gpu,
                         {{"a", std::string(GemmChoice::kOneKernel)}, {"b", std::string(GemmChoice::kTwoKernels)}});
  CHECK(gpu->fuses("a"));
  CHECK_FALSE(gpu->fuses("b"));
}
