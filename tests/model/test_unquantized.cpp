// precision.unquantized: the products that stay in bf16, and those that do not.
#include <set>

#include "kernels/ops/quantize/quantization_statistics.h"
#include "tests/model/small_model.h"
#include "tests/support/catch.h"
#include "tests/support/refusal.h"
#include "tests/support/tensors.h"

using namespace parka;
using namespace parka::test;

namespace {

constexpr BatchShape kShape{2, 32};

ModelConfig dense() {
  ModelConfig config;
  config.vocab_size = 96;
  config.d_model = 64;
  config.num_layers = 2;
  config.num_heads = 4;
  config.d_ffn = 112;
  config.norm = NormKind::kRmsNorm;
  return config;
}

// A model of which the products named are in the compute format, with the telemetry of one micro-batch.
struct Run {
  Run(const ModelConfig& config, const PrecisionConfig& precision, const std::vector<std::string>& unquantized,
      bool samples = false, bool int8_forward = false, Device& device = *devices().front())
      : model(config, precision, false, kShape, 24, Model::Use::kTraining, {}, plan,
              {.unquantized = unquantized, .int8_forward = int8_forward}) {
    if (samples) model.declare_telemetry(plan);
    std::vector<TensorId> ids;
    for (const ParameterInfo& p : model.parameters().all) {
      ids.push_back(plan.add("gradients", p.name, DType::kF32, {p.rows, p.cols}));
    }
    plan.finish();
    const Arena arena(device, plan);
    model.bind(device, arena);
    std::vector<TensorView> views;
    for (size_t i = 0; i < ids.size(); ++i) {
      views.push_back(arena[ids[i]]);
      upload_weight(device, model.weights().own()[i], initial_weight(config, model.parameters(), i, 1));
    }
    model.weights_changed(device);
    const std::vector<int32_t> tokens = random_tokens(kShape.num_tokens(), config.vocab_size, 5);
    const std::vector<int32_t> targets = next_token_targets(tokens, kShape.sequence_length);
    const Model::Batch batch = {tokens.data(), targets.data(), kShape};
    for (const auto accumulation : {Model::Accumulation::kBegin, Model::Accumulation::kContinue}) {
      model.accumulate_gradients(device, batch, {.grad_scale = 0.01f}, views, accumulation,
                                 samples ? Model::Queueing::kWithTelemetry : Model::Queueing::kEachTime);
    }
    losses = model.losses(device);
    for (const TensorView& view : views) {
      gradients.emplace_back(static_cast<size_t>(view.numel()));
      device.copy_to_host(gradients.back().data(), view.data, view.bytes());
    }
    if (!samples) return;
    std::vector<float> totals(static_cast<size_t>(model.telemetry().numel()));
    device.copy_to_host(totals.data(), model.telemetry().data, model.telemetry().bytes());
    for (int64_t row = 0; row < static_cast<int64_t>(totals.size()) / QuantizationTotals::kCount; ++row) {
      if (totals[static_cast<size_t>(row * QuantizationTotals::kCount)] == 0) continue;
      quantized.insert(std::to_string(row / kNumQuantizedTensors) + "." +
                       std::string(name_of(QuantizedTensor{static_cast<uint8_t>(row % kNumQuantizedTensors)})));
    }
  }

  MemoryPlan plan;
  Model model;
  std::vector<float> losses;
  std::vector<std::vector<float>> gradients;
  std::set<std::string> quantized;  // "0.up_gate.weight"
};

}  // namespace

TEST_CASE("with all products unquantized FP8 GEMMs leave the bits of bf16, forward and backward", "[model]") {
  const Run bf16(dense(), precision_recipe(Recipe::kBf16), {});
  for (const Recipe recipe : {Recipe::kFp8Linear, Recipe::kFp8Block}) {
    PrecisionConfig precision = precision_recipe(recipe);
    precision.head = Storage::kFp8;
    precision.save_norm_output = precision.save_product = false;  // made again: the same bits
    const Run all(dense(), precision, {"*"});
    CHECK(all.losses == bf16.losses);
    CHECK(all.gradients == bf16.gradients);
    CHECK(Run(dense(), precision, {}).losses != bf16.losses);
  }
}

TEST_CASE("a product of forward that is named alone has the bits of bf16, and FP8 gradients", "[model]") {
  ModelConfig post_norms = dense();
  post_norms.norm_placement = NormPlacement::kAfter;
  for (const ModelConfig& config : {dense(), post_norms}) {
    const Run bf16(config, precision_recipe(Recipe::kBf16), {});
    for (const Recipe recipe : {Recipe::kFp8Linear, Recipe::kFp8Block}) {
      for (const bool saves : {true, false}) {
        PrecisionConfig precision = precision_recipe(recipe);
        precision.save_norm_output = precision.save_product = saves;
        const Run forward(config, precision, {"*.forward"}), fp8(config, precision, {});
        CHECK(forward.losses == bf16.losses);
        CHECK(forward.gradients != bf16.gradients);
        for (size_t i = 0; i < bf16.gradients.size(); ++i) {
          CHECK(relative_error(forward.gradients[i], bf16.gradients[i]) < 0.2);
        }
        const Run mixed(config, precision, {"blocks.0.*.forward", "*.down.forward", "*.attention_out.forward"});
        CHECK(mixed.losses != fp8.losses);
        CHECK(mixed.losses != bf16.losses);
      }
    }
  }
}

TEST_CASE("products of forward in int8 cost less loss than in E4M3, the same bits however weights are kept",
          "[model]") {
  const auto far = [](const Run& run, const Run& bf16) {
    double sum = 0;
    for (size_t i = 0; i < bf16.losses.size(); ++i) sum += std::abs(run.losses[i] - bf16.losses[i]);
    return sum;
  };
  const Run bf16(dense(), precision_recipe(Recipe::kBf16), {});
  for (const Recipe recipe : {Recipe::kFp8Linear, Recipe::kFp8Block, Recipe::kCoat}) {
    PrecisionConfig precision = precision_recipe(recipe);
    const auto int8 = [&] { return Run(dense(), precision, {}, false, true); };
    const Run fp8(dense(), precision, {}), kept = int8();
    CAPTURE(name_of(recipe));
    CHECK(kept.losses != bf16.losses);
    CHECK(far(kept, bf16) < far(fp8, bf16));
    CHECK(kept.gradients != bf16.gradients);
    for (size_t i = 0; i < bf16.gradients.size(); ++i) {
      CHECK(relative_error(kept.gradients[i], bf16.gradients[i]) < 0.2);
    }
    const Run named(dense(), precision, {"*.forward"}, false, true);
    CHECK(named.losses == Run(dense(), precision, {"*.forward"}).losses);
    for (const WeightCopies copies : {WeightCopies::kRows, WeightCopies::kNone}) {
      if (recipe == Recipe::kFp8Block && copies == WeightCopies::kRows) continue;
      precision.weight_copies = copies;
      CHECK((int8().losses == kept.losses && int8().gradients == kept.gradients));
    }
    precision.recompute = Recompute::kBlock;
    CHECK((int8().losses == kept.losses && int8().gradients == kept.gradients));
  }
}

TEST_CASE("the named products leave FP8, and no others", "[model]") {
  const PrecisionConfig precision = precision_recipe(Recipe::kFp8Linear);
  const Run run(dense(), precision, {"blocks.0.qkv", "*.down"}, /*samples=*/true);
  std::set<std::string> left = Run(dense(), precision, {}, /*samples=*/true).quantized;
  for (const char* name : {"0.attention_norm.output", "0.qkv.weight", "0.qkv.gradient", "0.product",
                           "0.down.weight", "0.down.gradient", "1.product", "1.down.weight", "1.down.gradient"}) {
    CHECK(left.erase(name) == 1);
  }
  CHECK(run.quantized == left);
}

TEST_CASE("a name of precision.unquantized that no product has is refused", "[model]") {
  for (const char* name : {"blocks.9.down", "*norm", "embedding"}) {
    const std::string message = refusal([&] { make_parameter_table(dense(), false, {.unquantized = {name}}); });
    CHECK(message.find("precision.unquantized") != std::string::npos);
    CHECK(message.find(name) != std::string::npos);
  }
  const ParameterTable tied = make_parameter_table(dense(), false, {.unquantized = {"head"}});
  CHECK_FALSE(tied.all[static_cast<size_t>(tied.head)].quantized);
}
