// precision.tower = fp8: closeness to fp32, and the same bits however copies of weights and activations are kept.
#include <cmath>
#include <string>

#include "core/philox.h"
#include "model/vision/image_embedding.h"
#include "tests/model/small_model.h"
#include "tests/support/catch.h"

using namespace parka;
using namespace parka::test;

namespace {

constexpr BatchShape kShape{4, 24, false, /*images_per_sequence=*/1};
constexpr int32_t kImageToken = 95;

// Of CLIP's kind with heads of 16 columns, and of SigLIP's with heads of 72: 4 images are 68 rows, of which 12 more
// make a multiple of 16, and 64 rows. Two blocks are read.
ModelConfig small_config(TowerKind kind) {
  const bool is_clip = kind == TowerKind::kClip;
  ModelConfig config;
  config.vocab_size = 96;
  config.d_model = 64;
  config.num_layers = 2;
  config.num_heads = 4;
  config.d_ffn = 176;
  config.norm = NormKind::kRmsNorm;
  config.tie_embeddings = false;
  config.vision.tower = {.kind = kind,
                         .width = is_clip ? 64 : 144,
                         .num_layers = 3,
                         .num_heads = is_clip ? 4 : 2,
                         .d_ffn = 176,
                         .image_size = 16,
                         .patch_size = 4,
                         .activation = is_clip ? Activation::kQuickGelu : Activation::kGeluTanh,
                         .norm_eps = is_clip ? 1e-5 : 1e-6};
  config.vision.image_token = kImageToken;
  return config;
}

PrecisionConfig with_tower(Recipe recipe, Storage tower = Storage::kFp8) {
  PrecisionConfig precision = precision_recipe(recipe);
  precision.tower = tower;
  return precision;
}

struct Images {
  std::vector<int32_t> tokens, targets, positions;
  std::vector<uint8_t> pixels;

  // An image in each sequence but the last, whose room is blank.
  explicit Images(const ModelConfig& config) {
    const VisionConfig& vision = config.vision;
    const int64_t S = kShape.sequence_length, slots = ImageEmbedding::num_slots(vision);
    const int64_t bytes = 3 * vision.tower.image_size * vision.tower.image_size;
    tokens = random_tokens(kShape.num_tokens(), kImageToken, 5);
    positions.assign(static_cast<size_t>(kShape.num_images() * slots), -1);
    pixels.assign(static_cast<size_t>(kShape.num_images() * bytes), 0);
    for (int64_t image = 0; image + 1 < kShape.num_images(); ++image) {
      for (int64_t slot = 0; slot < slots; ++slot) {
        const int64_t t = image * S + 3 + slot;
        tokens[t] = kImageToken;
        positions[image * slots + slot] = static_cast<int32_t>(t);
      }
      for (int64_t i = 0; i < bytes; ++i) {
        pixels[image * bytes + i] = static_cast<uint8_t>(philox4x32(6, image, static_cast<uint64_t>(i))[0]);
      }
    }
    targets.assign(tokens.size(), kIgnoreTarget);
    for (size_t t = 0; t + 1 < tokens.size(); ++t) {
      const bool is_last = static_cast<int64_t>(t + 1) % S == 0;
      if (!is_last && tokens[t + 1] != kImageToken) targets[t] = tokens[t + 1];
    }
  }
  Model::Batch batch() const {
    return {tokens.data(), targets.data(), kShape, nullptr, {}, pixels.data(), positions.data()};
  }
};

struct Result {
  std::vector<float> losses, evaluated, of_tower, of_projector, all;
  int64_t saved_bytes = 0;                     // of the tower's activations
  int64_t num_copies = 0, num_transposed = 0;  // of its weights
};

Result run(Device& device, TowerKind kind, const PrecisionConfig& precision,
           const std::vector<std::string>& frozen = {}) {
  const ModelConfig config = small_config(kind);
  MemoryPlan plan;
  Model model(config, precision, false, kShape, 1 << 20, Model::Use::kTraining, {}, plan, {.frozen = frozen});
  const auto& parameters = model.parameters().all;
  std::vector<TensorId> ids;
  for (const ParameterInfo& p : parameters) {
    ids.push_back(p.trainable ? plan.add("gradients", p.name, DType::kF32, {p.rows, p.cols}) : TensorId{});
  }
  plan.finish();
  Result result;
  for (const MemoryPlan::Entry& entry : plan.entries()) {
    if (!entry.name.starts_with(kVision)) continue;
    if (entry.category == kSavedActivationsCategory) result.saved_bytes += entry.bytes;
    result.num_copies += entry.name.ends_with(".fp8");
    result.num_transposed += entry.name.ends_with(".fp8_t");
  }
  Arena arena(device, plan);
  model.bind(device, arena);
  for (size_t i = 0; i < parameters.size(); ++i) {
    std::vector<float> values = initial_weight(config, model.parameters(), i, 1);
    if (parameters[i].role == ParameterRole::kBias) values = random_normal(parameters[i].numel(), i, 0.05f);
    upload_weight(device, model.weights().own()[i], values);
  }
  model.weights_changed(device);
  std::vector<TensorView> gradients;
  for (const TensorId id : ids) gradients.push_back(id.valid() ? arena[id] : TensorView());
  const Images images(config);
  model.evaluate(device, images.batch());
  result.evaluated = model.losses(device);
  // Twice, as of two micro-batches.
  for (const auto accumulation : {Model::Accumulation::kBegin, Model::Accumulation::kContinue}) {
    model.accumulate_gradients(device, images.batch(), {.grad_scale = 0.02f}, gradients, accumulation);
  }
  result.losses = model.losses(device);
  for (size_t i = 0; i < gradients.size(); ++i) {
    if (gradients[i].empty()) continue;
    std::vector<float> values(static_cast<size_t>(gradients[i].numel()));
    device.copy_to_host(values.data(), gradients[i].as<float>(), gradients[i].bytes());
    result.all.insert(result.all.end(), values.begin(), values.end());
    std::vector<float>& part = parameters[i].name.starts_with(kVision) ? result.of_tower : result.of_projector;
    if (parameters[i].unit == 0) part.insert(part.end(), values.begin(), values.end());
  }
  return result;
}

using parka::test::same_bits;
bool same_bits(const Result& a, const Result& b) {
  return same_bits(a.losses, b.losses) && same_bits(a.evaluated, b.evaluated) && same_bits(a.all, b.all);
}

// The rounding errors of a format are at most half of its last place, spread evenly: relative to what is rounded,
// with m bits behind the point, 2^-(m+1) / sqrt(3) in the root mean square. Those on the way to a number are
// independent of one another and add up in squares.
double noise(int e4m3_roundings, int e5m2_roundings) {
  const double e4m3 = std::ldexp(1.0, -4) / std::sqrt(3.0), e5m2 = std::ldexp(1.0, -3) / std::sqrt(3.0);
  return std::sqrt(e4m3_roundings * e4m3 * e4m3 + e5m2_roundings * e5m2 * e5m2);
}

// On the way to a gradient of the tower are its two blocks and the decoder's, forward and back. Forward rounds the
// two operands of each block's four products, and keeps in FP8 up to two norms' inputs, q, k and v, and what the
// activation reads. Backward rounds a weight and a gradient in each, and the last product's other factor.
constexpr int kBlocks = 4, kRoundedForward = kBlocks * (4 * 2 + 4), kRoundedBackward = kBlocks * 4;

}  // namespace

TEST_CASE("gradients through an FP8 tower are close to fp32's in every recipe with FP8 GEMMs", "[model][vision]") {
  const TowerKind kind = GENERATE(TowerKind::kClip, TowerKind::kSiglip);
  for (Device* device : devices()) {
    const Result exact = run(*device, kind, precision_recipe(Recipe::kFp32));
    for (const Recipe recipe : {Recipe::kFp8Linear, Recipe::kFp8Block, Recipe::kCoat, Recipe::kParka}) {
      const Result plain = run(*device, kind, with_tower(recipe, Storage::kCompute));
      const Result got = run(*device, kind, with_tower(recipe));
      const double error = relative_error(got.of_tower, exact.of_tower);
      const double projector_error = relative_error(got.of_projector, exact.of_projector);
      CAPTURE(device->name(), name_of(kind), name_of(recipe), error, projector_error);
      const double difference = relative_error(got.of_tower, plain.of_tower);
      CAPTURE(difference);
      CHECK(relative_error(got.losses, exact.losses) < noise(kRoundedForward, 0));
      CHECK(error < noise(kRoundedForward + kRoundedBackward + 1, kRoundedBackward + 1));
      CHECK(projector_error < noise(kRoundedForward + kRoundedBackward / 2 + 1, kRoundedBackward / 2 + 1));
      // It does quantize: by more than one rounding. Which of the two is nearer to fp32 is for the decoder's noise
      // to say.
      CHECK(difference > noise(1, 0));
      CHECK(!same_bits(got.losses, plain.losses));
      CHECK(same_bits(got.evaluated, got.losses));
      CHECK((plain.num_copies == 0 && plain.num_transposed == 0));
      CHECK((got.num_copies == 8 && got.num_transposed == 8));
      // Of fp8_block nearly half of the rows are padding.
      CHECK((recipe == Recipe::kFp8Block || got.saved_bytes < plain.saved_bytes));
    }
  }
}

TEST_CASE("a frozen FP8 tower keeps no activations and no transposed weights, and says the same",
          "[model][vision]") {
  const TowerKind kind = GENERATE(TowerKind::kClip, TowerKind::kSiglip);
  for (Device* device : devices()) {
    for (const Recipe recipe : {Recipe::kFp8Block, Recipe::kCoat, Recipe::kParka}) {
      CAPTURE(device->name(), name_of(kind), name_of(recipe));
      const Result trained = run(*device, kind, with_tower(recipe));
      const Result frozen = run(*device, kind, with_tower(recipe), {"vision.*"});
      CHECK((frozen.saved_bytes == 0 && frozen.num_copies == 8 && frozen.num_transposed == 0));
      CHECK((frozen.of_tower.empty() && same_bits(frozen.of_projector, trained.of_projector)));
      CHECK((same_bits(frozen.losses, trained.losses) && same_bits(frozen.evaluated, trained.evaluated)));
      const Result below = run(*device, kind, with_tower(recipe), {"vision.*", "projector.*", "embedding"});
      CHECK((below.saved_bytes == 0 && below.num_copies == 8 && below.num_transposed == 0));
      CHECK(same_bits(below.losses, trained.losses));
    }
  }
}

TEST_CASE("what an FP8 tower keeps and what it makes again gives the same bits", "[model][vision]") {
  const TowerKind kind = GENERATE(TowerKind::kClip, TowerKind::kSiglip);
  for (Device* device : devices()) {
    for (const Recipe recipe : {Recipe::kCoat, Recipe::kParka, Recipe::kFp8Block}) {
      const PrecisionConfig as_ever = with_tower(recipe);
      for (const bool is_frozen : {false, true}) {
        const std::vector<std::string> frozen(is_frozen ? 1 : 0, "vision.*");
        const Result want = run(*device, kind, as_ever, frozen);
        CAPTURE(device->name(), name_of(kind), name_of(recipe), is_frozen);
        for (const WeightCopies copies : {WeightCopies::kRows, WeightCopies::kNone}) {
          CAPTURE(name_of(copies));
          PrecisionConfig precision = as_ever;
          precision.weight_copies = copies;
          const Result got = run(*device, kind, precision, frozen);
          CHECK(same_bits(got, want));
          CHECK((got.num_transposed == 0 && got.num_copies == (copies == WeightCopies::kRows ? 8 : 0)));
        }
        PrecisionConfig again = as_ever, rerun = as_ever;
        again.save_norm_output = !as_ever.save_norm_output;
        again.save_product = !as_ever.save_product;
        rerun.recompute = Recompute::kBlock;
        CHECK(same_bits(run(*device, kind, again, frozen), want));
        CHECK(same_bits(run(*device, kind, rerun, frozen), want));
      }
    }
  }
}

TEST_CASE("evaluation in bf16 reads the weights of an FP8 tower as they are", "[model][vision]") {
  for (Device* device : devices()) {
    PrecisionConfig precision = with_tower(Recipe::kParka);
    precision.eval = EvalNumerics::kBf16;
    const Result plain = run(*device, TowerKind::kClip, precision_recipe(Recipe::kBf16));
    CHECK(same_bits(run(*device, TowerKind::kClip, precision).evaluated, plain.evaluated));
  }
}
