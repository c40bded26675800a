// precision.head = fp8: closeness to fp32, and the same bits however copies of the weight are kept.
#include <cmath>

#include "tests/model/trained_model.h"
#include "tests/support/catch.h"
#include "tests/support/tensors.h"

using namespace parka;
using namespace parka::test;

namespace {

constexpr BatchShape kShape{4, 24};  // 96 tokens

// A vocabulary of 96 fills rows of 16 numbers; one of 101 leaves columns at their end.
ModelConfig small_config(int64_t vocab_size, bool tied) {
  ModelConfig config;
  config.vocab_size = vocab_size;
  config.d_model = 64;
  config.num_layers = 2;
  config.num_heads = 4;
  config.d_ffn = 176;
  config.norm = tied ? NormKind::kLayerNorm : NormKind::kRmsNorm;
  config.tie_embeddings = tied;
  return config;
}

PrecisionConfig with_head(Recipe recipe, Storage head) {
  PrecisionConfig precision = precision_recipe(recipe);
  precision.head = head;
  return precision;
}

struct Result {
  std::vector<float> losses, evaluated, gradients, of_head;
};

Result run(const ModelConfig& config, const PrecisionConfig& precision, int64_t logits_chunk = 1 << 20) {
  SmallModel m(config, precision, kShape, logits_chunk);
  m.initialize(config, 1);
  const std::vector<int32_t> tokens = random_tokens(kShape.num_tokens(), config.vocab_size, 5);
  std::vector<int32_t> targets = next_token_targets(tokens, kShape.sequence_length);
  targets[7] = targets[60] = kIgnoreTarget;
  const Model::Batch batch = {tokens.data(), targets.data(), kShape};
  m.model.evaluate(*m.device, batch);
  Result result;
  result.evaluated = m.model.losses(*m.device);
  // Twice, as of two micro-batches.
  for (const auto accumulation : {Model::Accumulation::kBegin, Model::Accumulation::kContinue}) {
    m.model.accumulate_gradients(*m.device, batch, {.grad_scale = 0.005f, .z_loss = 1e-4f}, m.gradients,
                                 accumulation);
  }
  result.losses = m.model.losses(*m.device);
  result.gradients = m.all_gradients();
  result.of_head = m.gradient(static_cast<size_t>(m.model.parameters().head));
  return result;
}

}  // namespace

TEST_CASE("gradients with an FP8 head are close to fp32's in every recipe with FP8 GEMMs", "[model][head]") {
  const auto [vocab_size, tied] = GENERATE(table<int64_t, bool>({{96, false}, {101, false}, {101, true}}));
  const ModelConfig config = small_config(vocab_size, tied);
  const Result exact = run(config, precision_recipe(Recipe::kFp32));
  for (const Recipe recipe : {Recipe::kFp8Linear, Recipe::kFp8Block, Recipe::kCoat, Recipe::kParka}) {
    const Result plain = run(config, with_head(recipe, Storage::kCompute));
    const Result got = run(config, with_head(recipe, Storage::kFp8), /*logits_chunk=*/64);
    const double error = relative_error(got.gradients, exact.gradients);
    const double head_error = relative_error(got.of_head, exact.of_head);
    const double plain_head_error = relative_error(plain.of_head, exact.of_head);
    const double length = projection(got.gradients, exact.gradients) + error * error / 2;
    CAPTURE(vocab_size, tied, name_of(recipe), error, head_error, plain_head_error, length);
    CHECK(relative_error(got.losses, exact.losses) < 0.05);
    CHECK((error < 0.3 && std::abs(length - 1) < 0.03));
    // E5M2 rounds with an rms error of 6.5 %, the E4M3 of its other factor with a third of that.
    CHECK(head_error < plain_head_error + 0.12);
    CHECK((tied || head_error > plain_head_error));  // it does quantize; a tied table has other gradients, too
    CHECK(same_bits(got.evaluated, run(config, with_head(recipe, Storage::kFp8), 64).losses));
  }
}

TEST_CASE("copies of the weight of an FP8 head do not change a bit however they are kept", "[model][head]") {
  const bool tied = GENERATE(false, true);
  const Recipe recipe = GENERATE(Recipe::kParka, Recipe::kFp8Block);
  const ModelConfig config = small_config(101, tied);
  PrecisionConfig precision = with_head(recipe, Storage::kFp8);
  const Result both = run(config, precision, 32);
  CAPTURE(tied, name_of(recipe));
  for (const WeightCopies copies : {WeightCopies::kRows, WeightCopies::kNone}) {
    precision.weight_copies = copies;
    const Result other = run(config, precision, 32);
    CAPTURE(name_of(copies));
    CHECK(same_bits(other.losses, both.losses));
    CHECK(same_bits(other.evaluated, both.evaluated));
    CHECK(same_bits(other.gradients, both.gradients));
  }
}

TEST_CASE("evaluation in bf16 reads the weight of an FP8 head as it is", "[model][head]") {
  const ModelConfig config = small_config(101, false);
  PrecisionConfig precision = with_head(Recipe::kParka, Storage::kFp8);
  precision.eval = EvalNumerics::kBf16;
  CHECK(same_bits(run(config, precision).evaluated, run(config, precision_recipe(Recipe::kBf16)).evaluated));
}

TEST_CASE("an FP8 head has its codes in the plan: two of the weight, two of a chunk's gradient",
          "[model][head][plan]") {
  const int64_t V = 1008, d = 64, chunk = 32;
  ModelConfig config = small_config(1001, false);
  ParameterRules rules;
  const auto bytes = [&](WeightCopies copies, Storage head, std::string_view category) {
    PrecisionConfig precision = with_head(Recipe::kParka, head);
    precision.weight_copies = copies;
    MemoryPlan plan;
    const Model model(config, precision, false, kShape, chunk, Model::Use::kTraining, {}, plan, rules);
    int64_t sum = 0;
    for (const auto& entry : plan.entries()) {
      if (entry.category == category) sum += entry.bytes;
    }
    return sum;
  };
  for (const auto& [copies, kept] :
       {std::pair{WeightCopies::kBoth, 2}, {WeightCopies::kRows, 0}, {WeightCopies::kNone, 0}}) {
    CAPTURE(name_of(copies));
    const int64_t of_weight =
        bytes(copies, Storage::kFp8, "fp8 weights") - bytes(copies, Storage::kCompute, "fp8 weights");
    CHECK((of_weight >= kept * V * d && of_weight < kept * V * d + 1024));
    const int64_t of_chunk = 2 * chunk * V + 2 * chunk * d, made = (2 - kept) * V * d;
    const int64_t more = bytes(copies, Storage::kFp8, "workspace") - bytes(copies, Storage::kCompute, "workspace");
    CHECK((more >= of_chunk + made && more < of_chunk + made + 4096));
  }
  // Only a gradient of the weight reads transposed codes of a chunk.
  rules.frozen = {"head"};
  const int64_t more = bytes(WeightCopies::kBoth, Storage::kFp8, "workspace") -
                       bytes(WeightCopies::kBoth, Storage::kCompute, "workspace");
  CHECK((more >= chunk * V + chunk * d && more < chunk * V + chunk * d + 4096));
}

TEST_CASE("a frozen FP8 head changes no bit of other gradients", "[model][head]") {
  for (const int64_t vocab_size : {96, 101}) {
    const ModelConfig config = small_config(vocab_size, false);
    const PrecisionConfig precision = with_head(Recipe::kParka, Storage::kFp8);
    Fixture random{config, kShape, random_tokens(kShape.num_tokens(), vocab_size, 5), {}};
    for (Device* device : devices()) {
      TrainedModel all(config, precision, kShape, *device, {}, 32),
          rest(config, precision, kShape, *device, {.frozen = {"head"}}, 32);
      for (TrainedModel* m : {&all, &rest}) m->load(random, nullptr, [](const ParameterInfo&) { return true; });
      CAPTURE(vocab_size, device->name());
      CHECK(all.backward(random) == rest.backward(random));
      int64_t wrong = 0;
      for (size_t i = 0; i < rest.gradients.size(); ++i) {
        wrong += rest.model.parameters().is_trainable(static_cast<int>(i)) && all.gradient(i) != rest.gradient(i);
      }
      CHECK(wrong == 0);
    }
  }
}
