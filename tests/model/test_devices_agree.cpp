#include <cmath>
#include <tuple>

#include "model/vision/image_embedding.h"
#include "tests/model/small_model.h"
#include "tests/support/catch.h"

using namespace parka;
using namespace parka::test;

// Loss and gradients of whole models on a GPU against the CPU; without a GPU there is nothing to compare.
namespace {

constexpr BatchShape kShape{3, 200};  // no multiple of any tile

ModelConfig config_of(NormKind norm, int64_t heads, int64_t kv_heads, QkNormKind qk_norm, NormPlacement placement) {
  ModelConfig config;
  config.vocab_size = 1000;
  config.d_model = 512;
  config.num_layers = 3;
  config.num_heads = heads;
  config.num_kv_heads = kv_heads;
  config.d_ffn = 1368;
  config.norm = norm;
  config.norm_placement = placement;
  config.qkv_bias = placement == NormPlacement::kBoth;
  config.qk_norm = qk_norm;
  config.tie_embeddings = norm == NormKind::kLayerNorm;
  return config;
}

// The same with what Gemma 3 has, heads of 256 among it.
ModelConfig gemma_of(ModelConfig config) {
  config.given_head_dim = 256;
  config.norm_unit_offset = true;
  config.activation = GateActivation::kGeluTanh;
  config.embedding_scale = EmbeddingScale::kSqrtDModel;
  config.query_pre_attn_scalar = 168;
  config.tie_embeddings = true;
  return config;
}

struct Result {
  std::vector<float> losses;
  std::vector<std::vector<float>> gradients;
};

// Two images in the first sequence, one in the second that is cut, and none in the third.
struct Pictures {
  Pictures(const ModelConfig& config, const BatchShape& shape) {
    if (shape.num_images() == 0) return;
    const int64_t slots = ImageEmbedding::num_slots(config.vision), S = shape.sequence_length;
    const int64_t size = config.vision.tower.image_size;
    positions.assign(static_cast<size_t>(shape.num_images() * slots), -1);
    for (const auto& [image, first, count] :
         {std::tuple{int64_t{0}, int64_t{3}, slots}, {1, 3 + slots, slots}, {2, S + 9, slots / 2}}) {
      for (int64_t k = 0; k < count; ++k) positions[image * slots + k] = static_cast<int32_t>(first + k);
    }
    pixels.resize(static_cast<size_t>(shape.num_images() * 3 * size * size));
    for (size_t i = 0; i < pixels.size() / 2; ++i) pixels[i] = static_cast<uint8_t>(philox4x32(5, 3, i)[0] % 256);
  }
  std::vector<uint8_t> pixels;
  std::vector<int32_t> positions;
};

Result run(const ModelConfig& config, const PrecisionConfig& precision, Device& device,
           const BatchShape& shape = kShape) {
  SmallModel m(config, precision, shape, /*logits_chunk=*/256, device);
  m.initialize(config, 11);
  std::vector<int32_t> tokens(static_cast<size_t>(shape.num_tokens())), targets(tokens);
  for (size_t t = 0; t < tokens.size(); ++t) {
    tokens[t] = static_cast<int32_t>(philox4x32(5, 1, t)[0] % 1000);
    targets[t] = t % 7 == 0 ? kIgnoreTarget : static_cast<int32_t>(philox4x32(5, 2, t)[0] % 1000);
  }
  const Pictures pictures(config, shape);
  const Model::Batch batch = {tokens.data(),          targets.data(),           shape, nullptr, {},
                              pictures.pixels.data(), pictures.positions.data()};
  Result result;
  // A GPU runs the work as it is, then records and replays it, then replays it.
  const int num_runs = device.kind() == DeviceKind::kCpu ? 1 : 3;
  for (int i = 0; i < num_runs; ++i) {
    m.model.accumulate_gradients(device, batch, {.grad_scale = 0.01f, .z_loss = 1e-4f}, m.gradients,
                                 Model::Accumulation::kBegin);
    Result again{m.model.losses(device), {}};
    for (size_t p = 0; p < m.gradients.size(); ++p) again.gradients.push_back(m.gradient(p));
    if (i > 0) CHECK((again.losses == result.losses && again.gradients == result.gradients));
    result = std::move(again);
  }
  return result;
}

double distance(const std::vector<float>& got, const std::vector<float>& want) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    difference += (double{got[i]} - want[i]) * (double{got[i]} - want[i]);
    norm += double{want[i]} * want[i];
  }
  return std::sqrt(difference / norm);
}

}  // namespace

TEST_CASE("a GPU's loss and gradients of a whole model are those of the CPU", "[model][devices]") {
  if (gpu() == nullptr) return;
  using Placement = NormPlacement;
  const auto [norm, heads, kv_heads, qk_norm, placement] =
      GENERATE(table<NormKind, int64_t, int64_t, QkNormKind, NormPlacement>({
          {NormKind::kLayerNorm, 4, 0, QkNormKind::kNone, Placement::kBefore},  // head dim 128
          {NormKind::kRmsNorm, 8, 2, QkNormKind::kNone, Placement::kBefore},    // 64, grouped
          {NormKind::kRmsNorm, 16, 0, QkNormKind::kNone, Placement::kBefore},   // 32: tensor cores are not used
          {NormKind::kRmsNorm, 4, 2, QkNormKind::kPerHead, Placement::kBefore},
          {NormKind::kRmsNorm, 8, 2, QkNormKind::kFull, Placement::kBefore},
          {NormKind::kRmsNorm, 8, 2, QkNormKind::kFull, Placement::kAfter},
          {NormKind::kRmsNorm, 4, 2, QkNormKind::kPerHead, Placement::kBoth},
          {NormKind::kRmsNorm, 2, 1, QkNormKind::kPerHead, Placement::kBoth},  // 256
      }));
  const ModelConfig config = config_of(norm, heads, kv_heads, qk_norm, placement);
  const Result exact = run(config, precision_recipe(Recipe::kFp32), cpu_device());
  const Result fp32 = run(config, precision_recipe(Recipe::kFp32), *gpu());
  const Result cpu_bf16 = run(config, precision_recipe(Recipe::kBf16), cpu_device()),
               gpu_bf16 = run(config, precision_recipe(Recipe::kBf16), *gpu());
  CAPTURE(name_of(norm), heads, kv_heads, name_of(qk_norm), name_of(placement));
  CHECK(distance(fp32.losses, exact.losses) < 1e-6);
  CHECK(distance(gpu_bf16.losses, exact.losses) < 2e-3);
  for (size_t p = 0; p < exact.gradients.size(); ++p) {
    CAPTURE(p);
    CHECK(distance(fp32.gradients[p], exact.gradients[p]) < 1e-5);
    // No further from the exact gradient than the CPU's bf16 is, give or take.
    const double of_cpu = distance(cpu_bf16.gradients[p], exact.gradients[p]);
    CHECK(distance(gpu_bf16.gradients[p], exact.gradients[p]) < 1.5 * of_cpu + 1e-3);
  }
}

// Half the blocks look through a window: with tensor cores, as attention does within documents.
TEST_CASE("a GPU's loss and gradients of a model with windows are those of the CPU", "[model][devices]") {
  if (gpu() == nullptr) return;
  const int64_t heads = GENERATE(int64_t{2}, int64_t{4}, int64_t{8}, int64_t{16}),
                window = GENERATE(int64_t{50}, int64_t{128});
  ModelConfig config = config_of(NormKind::kRmsNorm, heads, heads / 2, QkNormKind::kNone, NormPlacement::kBefore);
  config.sliding_window = window;
  config.full_attention_every = 2;
  config.local_rope_theta = 500;
  config.rope_scaling.kind = RopeScalingKind::kYarn;
  config.rope_scaling.original_length = 64;
  const Result exact = run(config, precision_recipe(Recipe::kFp32), cpu_device());
  const Result fp32 = run(config, precision_recipe(Recipe::kFp32), *gpu());
  const Result cpu_bf16 = run(config, precision_recipe(Recipe::kBf16), cpu_device()),
               gpu_bf16 = run(config, precision_recipe(Recipe::kBf16), *gpu());
  CAPTURE(heads, window);
  CHECK(distance(fp32.losses, exact.losses) < 1e-6);
  CHECK(distance(gpu_bf16.losses, exact.losses) < 2e-3);
  for (size_t p = 0; p < exact.gradients.size(); ++p) {
    CAPTURE(p);
    CHECK(distance(fp32.gradients[p], exact.gradients[p]) < 1e-5);
    const double of_cpu = distance(cpu_bf16.gradients[p], exact.gradients[p]);
    CHECK(distance(gpu_bf16.gradients[p], exact.gradients[p]) < 1.5 * of_cpu + 1e-3);
  }
}

TEST_CASE("a GPU's loss and gradients of a model with a tower are those of the CPU", "[model][devices][vision]") {
  if (gpu() == nullptr) return;
  const bool is_clip = GENERATE(true, false);
  ModelConfig config = config_of(NormKind::kRmsNorm, 4, 2, QkNormKind::kNone, NormPlacement::kBefore);
  config.d_ffn = 1376;  // a multiple of 16, for FP8
  TowerConfig& tower = config.vision.tower;
  tower.kind = is_clip ? TowerKind::kClip : TowerKind::kSiglip;
  tower.activation = is_clip ? Activation::kQuickGelu : Activation::kGeluTanh;
  tower.width = is_clip ? 256 : 288;  // heads of 64, and of 72
  tower.num_layers = 3;
  tower.num_heads = 4;
  tower.d_ffn = 512;
  tower.image_size = 98;
  tower.patch_size = 14;
  if (!is_clip) config.vision.projector.kind = ProjectorKind::kMlpDownsample;
  const BatchShape shape = {3, 208, false, /*images_per_sequence=*/2};
  const Result exact = run(config, precision_recipe(Recipe::kFp32), cpu_device(), shape);
  const Result fp32 = run(config, precision_recipe(Recipe::kFp32), *gpu(), shape);
  CAPTURE(is_clip);
  CHECK(distance(fp32.losses, exact.losses) < 1e-6);
  for (size_t p = 0; p < exact.gradients.size(); ++p) {
    CAPTURE(p);
    CHECK(distance(fp32.gradients[p], exact.gradients[p]) < 3e-5);
  }
  for (const auto& [recipe, tower] : {std::pair{Recipe::kBf16, Storage::kCompute},
                                      {Recipe::kCoat, Storage::kCompute},
                                      {Recipe::kParka, Storage::kCompute},
                                      {Recipe::kFp8Linear, Storage::kFp8},
                                      {Recipe::kFp8Block, Storage::kFp8},
                                      {Recipe::kCoat, Storage::kFp8},
                                      {Recipe::kParka, Storage::kFp8}}) {
    CAPTURE(name_of(recipe), name_of(tower));
    PrecisionConfig precision = precision_recipe(recipe);
    precision.tower = tower;
    const Result on_cpu = run(config, precision, cpu_device(), shape),
                 on_gpu = run(config, precision, *gpu(), shape);
    CHECK(distance(on_gpu.losses, exact.losses) < 1.5 * distance(on_cpu.losses, exact.losses) + 1e-3);
    for (size_t p = 0; p < exact.gradients.size(); ++p) {
      CAPTURE(p);
      const double of_cpu = distance(on_cpu.gradients[p], exact.gradients[p]);
      CHECK(distance(on_gpu.gradients[p], exact.gradients[p]) < 1.5 * of_cpu + 1e-3);
    }
  }
}

TEST_CASE("a GPU's loss and gradients of a Gemma 3 model are those of the CPU", "[model][devices]") {
  if (gpu() == nullptr) return;
  ModelConfig config = gemma_of(config_of(NormKind::kRmsNorm, 2, 1, QkNormKind::kPerHead, NormPlacement::kBoth));
  config.sliding_window = 50;
  config.full_attention_every = 2;
  config.local_rope_theta = 500;
  const Result exact = run(config, precision_recipe(Recipe::kFp32), cpu_device());
  const Result fp32 = run(config, precision_recipe(Recipe::kFp32), *gpu());
  const Result cpu_bf16 = run(config, precision_recipe(Recipe::kBf16), cpu_device()),
               gpu_bf16 = run(config, precision_recipe(Recipe::kBf16), *gpu());
  CHECK(distance(fp32.losses, exact.losses) < 1e-6);
  CHECK(distance(gpu_bf16.losses, exact.losses) < 1.5 * distance(cpu_bf16.losses, exact.losses));
  for (size_t p = 0; p < exact.gradients.size(); ++p) {
    CAPTURE(p);
    CHECK(distance(fp32.gradients[p], exact.gradients[p]) < 1e-5);
    const double of_cpu = distance(cpu_bf16.gradients[p], exact.gradients[p]);
    CHECK(distance(gpu_bf16.gradients[p], exact.gradients[p]) < 1.5 * of_cpu + 1e-3);
  }
}

namespace {

struct Float8Case {
  NormKind norm;
  int64_t heads, kv_heads;
  BatchShape shape;
  QkNormKind qk_norm = QkNormKind::kNone;
  NormPlacement placement = NormPlacement::kBefore;
  bool gemma = false;
};

// Widths are multiples of 16, as FP8 tensor cores want them; of 128 only some.
ModelConfig float8_config(const Float8Case& c) {
  ModelConfig config = config_of(c.norm, c.heads, c.kv_heads, c.qk_norm, c.placement);
  config.d_model = 256;
  config.num_layers = 2;
  config.d_ffn = 688;
  return c.gemma ? gemma_of(config) : config;
}

const std::vector<Float8Case> kFloat8Cases = {
    {NormKind::kLayerNorm, 4, 0, {2, 256}},  // head dim 64
    {NormKind::kRmsNorm, 2, 1, {2, 256}},    // 128, grouped
    {NormKind::kRmsNorm, 4, 2, {3, 200}},    // tokens that are no multiple of 16
    {NormKind::kRmsNorm, 2, 1, {2, 256}, QkNormKind::kPerHead},
    {NormKind::kRmsNorm, 4, 2, {3, 200}, QkNormKind::kFull},
    {NormKind::kRmsNorm, 4, 2, {3, 200}, QkNormKind::kFull, NormPlacement::kAfter},
    {NormKind::kRmsNorm, 2, 1, {2, 256}, QkNormKind::kPerHead, NormPlacement::kBoth},
    {NormKind::kRmsNorm, 2, 1, {2, 256}, QkNormKind::kPerHead, NormPlacement::kBoth, /*gemma=*/true},
};
// The FP8 recipes, and some with an FP8 head. Of its vocabulary of 1000 the last 8 columns of codes are padding.
std::vector<PrecisionConfig> float8_precisions() {
  std::vector<PrecisionConfig> all;
  for (const Recipe recipe :
       {Recipe::kFp8Linear, Recipe::kFp8Block, Recipe::kCoatActivation, Recipe::kCoat, Recipe::kParka}) {
    all.push_back(precision_recipe(recipe));
  }
  for (const Recipe recipe : {Recipe::kFp8Block, Recipe::kParka}) {
    all.push_back(precision_recipe(recipe));
    all.back().head = Storage::kFp8;
  }
  all.push_back(precision_recipe(Recipe::kParka));
  all.back().sampled_amax = false;
  return all;
}

// <a, b> / <b, b> over all tensors: the length of a along b.
double length_along(const Result& a, const Result& b) {
  double dot = 0, norm = 0;
  for (size_t p = 0; p < b.gradients.size(); ++p) {
    for (size_t i = 0; i < b.gradients[p].size(); ++i) {
      dot += double{a.gradients[p][i]} * b.gradients[p][i];
      norm += double{b.gradients[p][i]} * b.gradients[p][i];
    }
  }
  return dot / norm;
}

double mean_of(const std::vector<float>& x) {
  double sum = 0;
  for (const float v : x) sum += v;
  return sum / static_cast<double>(x.size());
}

}  // namespace

// A number that differs in its last bf16 place now and then falls into another FP8 code, and what follows differs
// by that much more: after two layers most of the rounding errors of two devices are different ones. (Weights
// changed by 1e-4, all on the CPU, change gradients by 0.6 to 0.9 of their distance from the exact ones.) So
// devices are compared by the size of their errors, which the same change moves by 10 % at most in the tensors with
// few elements, and by 3 % in the others. A wrong scale or a lost term shows in the size, or in the length along
// the exact gradient.
TEST_CASE("a GPU's loss and gradients in every FP8 recipe are as exact as the CPU's", "[model][devices]") {
  if (gpu() == nullptr) return;
  const Float8Case c = GENERATE(from_range(kFloat8Cases));
  const ModelConfig config = float8_config(c);
  const Result exact = run(config, precision_recipe(Recipe::kFp32), cpu_device(), c.shape);
  for (const PrecisionConfig& precision : float8_precisions()) {
    const Result cpu = run(config, precision, cpu_device(), c.shape);
    const Result got = run(config, precision, *gpu(), c.shape);
    CAPTURE(name_of(precision.recipe), name_of(precision.head), name_of(c.norm), name_of(c.qk_norm),
            name_of(c.placement), c.heads, c.kv_heads, c.shape.sequence_length);
    // Losses of single tokens are off by some 2 %, differently on each device; so is their mean, by that over the
    // root of 500.
    const double cpu_loss = mean_of(cpu.losses), got_loss = mean_of(got.losses);
    CAPTURE(mean_of(exact.losses), cpu_loss, got_loss);
    CHECK(std::abs(got_loss - cpu_loss) < 3e-3 * cpu_loss);
    CHECK(distance(got.losses, exact.losses) < 1.3 * distance(cpu.losses, exact.losses));
    const double cpu_length = length_along(cpu, exact), got_length = length_along(got, exact);
    CAPTURE(cpu_length, got_length);
    CHECK(std::abs(got_length - cpu_length) < 0.02);
    for (size_t p = 0; p < exact.gradients.size(); ++p) {
      const double of_cpu = distance(cpu.gradients[p], exact.gradients[p]);
      const double of_gpu = distance(got.gradients[p], exact.gradients[p]);
      const double between = distance(got.gradients[p], cpu.gradients[p]);
      CAPTURE(p, exact.gradients[p].size(), of_cpu, of_gpu, between);
      CHECK(of_gpu < 1.3 * of_cpu);
      CHECK(of_gpu > 0.7 * of_cpu);
      // Errors that had nothing in common would be 1.41 times their size apart.
      CHECK(between < 1.1 * of_cpu);
    }
  }
}

TEST_CASE("a GPU's gradients have the same bits however memory is saved", "[model][devices]") {
  if (gpu() == nullptr) return;
  const Float8Case c = GENERATE(from_range(kFloat8Cases));
  const ModelConfig config = float8_config(c);
  std::vector<PrecisionConfig> bases;
  for (const Recipe recipe :
       {Recipe::kBf16, Recipe::kFp8Linear, Recipe::kFp8Block, Recipe::kCoat, Recipe::kParka}) {
    bases.push_back(precision_recipe(recipe));
  }
  bases.push_back(precision_recipe(Recipe::kCoat));
  bases.back().sampled_amax = true;
  for (const Recipe recipe : {Recipe::kParka, Recipe::kFp8Block}) {
    bases.push_back(precision_recipe(recipe));
    bases.back().head = Storage::kFp8;
  }
  for (const PrecisionConfig& base : bases) {
    const Result reference = run(config, base, *gpu(), c.shape);
    for (int change = 0; change < 5; ++change) {
      PrecisionConfig precision = base;
      if (change == 0) precision.save_norm_output = !base.save_norm_output;
      if (change == 1) precision.save_product = !base.save_product;
      if (change == 2) precision.recompute = Recompute::kBlock;
      if (change == 3) precision.weight_copies = WeightCopies::kRows;
      if (change == 4) precision.weight_copies = WeightCopies::kNone;
      const Result other = run(config, precision, *gpu(), c.shape);
      CAPTURE(name_of(base.recipe), base.head, name_of(c.norm), name_of(c.qk_norm), name_of(c.placement), c.heads,
              c.shape.sequence_length, change);
      CHECK((other.losses == reference.losses));
      for (size_t p = 0; p < reference.gradients.size(); ++p) {
        CAPTURE(p);
        CHECK((other.gradients[p] == reference.gradients[p]));
      }
    }
  }
}
