// Models that see images: loss, logits and every gradient against transformers' LLaVA, computed in FP32
// (tests/fixtures/make_llava_fixtures.py made the files), and what of it is frozen.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "engine/files/safetensors.h"
#include "model/vision/image_embedding.h"
#include "tests/model/small_model.h"
#include "tests/model/vision_fixture.h"
#include "tests/support/catch.h"

using namespace parka;
using namespace parka::test;

namespace {

struct LlavaFixture {
  ModelConfig config;
  BatchShape shape;
  std::vector<int32_t> tokens, targets, positions;
  std::vector<uint8_t> pixels;
  std::map<std::string, std::vector<float>> tensors;

  Model::Batch batch() const {
    return {tokens.data(), targets.data(), shape, nullptr, {}, pixels.data(), positions.data()};
  }
  float grad_scale() const {
    const auto count = std::ranges::count_if(targets, [](int32_t target) { return target != kIgnoreTarget; });
    return 1.0f / static_cast<float>(count);
  }
};

ModelConfig config_of(const std::map<std::string, std::string>& meta) {
  const auto number = [&](const char* key) { return std::stoll(meta.at(key)); };
  ModelConfig c;
  c.vocab_size = number("vocab_size");
  c.d_model = number("d_model");
  c.num_layers = number("model_layers");
  c.num_heads = number("model_heads");
  c.num_kv_heads = number("model_kv_heads");
  c.d_ffn = number("model_d_ffn");
  c.norm = NormKind::kRmsNorm;
  c.tie_embeddings = false;
  c.vision.tower = fixture_tower(meta);
  c.vision.image_token = number("image_token");
  return c;
}

// Images in the order of their slots, as a loader gives them, and blank ones behind.
void place_images(LlavaFixture& f) {
  const int64_t slots = ImageEmbedding::num_slots(f.config.vision), size = f.config.vision.tower.image_size;
  f.positions.assign(static_cast<size_t>(f.shape.num_images() * slots), -1);
  size_t next = 0;
  for (size_t t = 0; t < f.tokens.size(); ++t) {
    if (f.tokens[t] == f.config.vision.image_token) f.positions.at(next++) = static_cast<int32_t>(t);
  }
  for (float value : f.tensors.at("pixels")) f.pixels.push_back(static_cast<uint8_t>(value));
  f.pixels.resize(static_cast<size_t>(f.shape.num_images() * 3 * size * size), 0);
}

LlavaFixture load_llava_fixture(const std::string& name) {
  const InputFile file(std::string(PARKA_SOURCE_DIR) + "/tests/fixtures/llava_" + name + ".safetensors");
  const SafetensorsHeader header = read_safetensors_header(file);
  LlavaFixture fixture;
  fixture.config = config_of({header.metadata.begin(), header.metadata.end()});
  fixture.shape = {std::stoll(header.metadata.at("sequences")), std::stoll(header.metadata.at("length")), false,
                   /*images_per_sequence=*/2};
  for (const SafetensorsEntry& entry : header.tensors) {
    std::vector<std::byte> bytes(static_cast<size_t>(entry.num_bytes));
    file.read(entry.offset, bytes);
    const auto into = [&](auto& values) {
      values.resize(bytes.size() / 4);
      std::memcpy(values.data(), bytes.data(), bytes.size());
    };
    if (entry.name == "tokens") {
      into(fixture.tokens);
    } else if (entry.name == "targets") {
      into(fixture.targets);
    } else {
      into(fixture.tensors[entry.name]);
    }
  }
  place_images(fixture);
  return fixture;
}

// The patch embedding has columns of padding, of zeros.
std::vector<float> padded(const ParameterInfo& p, const std::vector<float>& values) {
  const size_t rows = static_cast<size_t>(p.rows), cols = static_cast<size_t>(p.cols), used = values.size() / rows;
  std::vector<float> all(rows * cols);
  for (size_t row = 0; row < rows; ++row) std::copy_n(&values[row * used], used, &all[row * cols]);
  return all;
}

void load_weights(SmallModel& m, const LlavaFixture& fixture) {
  const auto& parameters = m.model.parameters().all;
  for (size_t i = 0; i < parameters.size(); ++i) {
    m.set_weight(i, padded(parameters[i], fixture.tensors.at("weight/" + parameters[i].name)));
  }
  m.model.weights_changed(*m.device);
}

void accumulate(SmallModel& m, const LlavaFixture& fixture,
                Model::Accumulation accumulation = Model::Accumulation::kBegin) {
  m.model.accumulate_gradients(*m.device, fixture.batch(), {.grad_scale = fixture.grad_scale()}, m.gradients,
                               accumulation);
}

// Relative to the fixture's; the columns of padding have none.
void check_gradients(const SmallModel& m, const LlavaFixture& fixture, double bound) {
  const auto& parameters = m.model.parameters().all;
  for (size_t i = 0; i < parameters.size(); ++i) {
    CAPTURE(parameters[i].name);
    CHECK(relative_error(m.gradient(i), padded(parameters[i], fixture.tensors.at("grad/" + parameters[i].name))) <
          bound);
  }
}

constexpr const char* kLlavaFixtures[] = {"clip", "siglip"};

}  // namespace

TEST_CASE("fp32 loss, logits and every gradient equal those of transformers' LLaVA", "[model][vision][llava]") {
  const std::string name = GENERATE(from_range(std::begin(kLlavaFixtures), std::end(kLlavaFixtures)));
  const LlavaFixture fixture = load_llava_fixture(name);
  for (Device* device : devices()) {
    CAPTURE(name, device->name());
    SmallModel m(fixture.config, precision_recipe(Recipe::kFp32), fixture.shape, 1 << 20, *device);
    load_weights(m, fixture);
    const std::vector<float> logits = m.model.logits(*device, fixture.batch(), 0, fixture.shape.num_tokens());
    CHECK(relative_error(logits, fixture.tensors.at("logits")) < 1e-5);
    accumulate(m, fixture);
    const double want = fixture.tensors.at("loss")[0];
    CHECK(std::abs(mean_loss(m.model.losses(*device), fixture.targets) - want) < 1e-5 * want);
    check_gradients(m, fixture, 1e-4);
    int64_t num_gradients = 0;
    for (const auto& [key, unused] : fixture.tensors) num_gradients += key.starts_with("grad/");
    CHECK(num_gradients == static_cast<int64_t>(m.gradients.size()));
    // The same again, on top of it.
    accumulate(m, fixture, Model::Accumulation::kContinue);
    LlavaFixture twice = fixture;
    for (auto& [key, values] : twice.tensors) {
      if (!key.starts_with("grad/")) continue;
      for (float& value : values) value *= 2;
    }
    check_gradients(m, twice, 1e-4);
  }
}

TEST_CASE("bf16 gradients of models with towers stay within bf16 noise", "[model][vision][llava]") {
  const std::string name = GENERATE(from_range(std::begin(kLlavaFixtures), std::end(kLlavaFixtures)));
  const LlavaFixture fixture = load_llava_fixture(name);
  for (Device* device : devices()) {
    CAPTURE(name, device->name());
    SmallModel m(fixture.config, precision_recipe(Recipe::kBf16), fixture.shape, 1 << 20, *device);
    load_weights(m, fixture);
    accumulate(m, fixture);
    const double want = fixture.tensors.at("loss")[0];
    CHECK(std::abs(mean_loss(m.model.losses(*device), fixture.targets) - want) < 0.01 * want);
    check_gradients(m, fixture, 0.1);
  }
}

// 96 tokens, a multiple of 16: of FP8 recipes the decoder alone is FP8.
TEST_CASE("models with towers train under FP8 recipes", "[model][vision][llava]") {
  LlavaFixture fixture = load_llava_fixture("clip");
  fixture.shape = {2, 24, false, 2};
  fixture.tokens.resize(48);
  fixture.targets.resize(48);
  const size_t images = 4, slots = static_cast<size_t>(ImageEmbedding::num_slots(fixture.config.vision));
  fixture.positions.resize(images * slots);
  fixture.pixels.resize(images * 3 * 14 * 14);
  for (Device* device : devices()) {
    SmallModel exact(fixture.config, precision_recipe(Recipe::kFp32), fixture.shape, 1 << 20, *device);
    load_weights(exact, fixture);
    accumulate(exact, fixture);
    const double want = mean_loss(exact.model.losses(*device), fixture.targets);
    for (const Recipe recipe : {Recipe::kFp8Linear, Recipe::kCoat, Recipe::kParka}) {
      CAPTURE(device->name(), static_cast<int>(recipe));
      PrecisionConfig precision = precision_recipe(recipe);
      precision.qkv = Storage::kCompute;  // heads of 8 columns are no group
      SmallModel m(fixture.config, precision, fixture.shape, 1 << 20, *device);
      load_weights(m, fixture);
      accumulate(m, fixture);
      CHECK(std::abs(mean_loss(m.model.losses(*device), fixture.targets) - want) < 0.05 * want);
      for (const ParameterInfo& p : m.model.parameters().all) {
        CHECK((p.unit != 0 || p.role != ParameterRole::kLinear));
      }
      const int patch = m.model.parameters().index_of(kPatchEmbedding);
      CHECK(relative_error(m.gradient(static_cast<size_t>(patch)), exact.gradient(static_cast<size_t>(patch))) <
            0.5);
    }
  }
}

TEST_CASE("models with towers give the same bits from what backward makes again", "[model][vision][llava]") {
  const LlavaFixture fixture = load_llava_fixture("clip");
  const auto gradients = [&](Device& device, const PrecisionConfig& precision) {
    SmallModel m(fixture.config, precision, fixture.shape, 1 << 20, device);
    load_weights(m, fixture);
    accumulate(m, fixture);
    return m.all_gradients();
  };
  for (Device* device : devices()) {
    const PrecisionConfig all_kept = precision_recipe(Recipe::kBf16);
    PrecisionConfig made_again = all_kept, rerun = all_kept;
    made_again.save_product = made_again.save_norm_output = false;
    rerun.recompute = Recompute::kBlock;
    const auto want = gradients(*device, all_kept);
    CHECK(gradients(*device, made_again) == want);
    CHECK(gradients(*device, rerun) == want);
  }
}

namespace {

// A model of which a part is frozen: gradients by name.
std::map<std::string, std::vector<float>> gradients_without(Device& device, const LlavaFixture& fixture,
                                                            const std::vector<std::string>& frozen,
                                                            int64_t* saved_bytes = nullptr) {
  MemoryPlan plan;
  Model model(fixture.config, precision_recipe(Recipe::kFp32), false, fixture.shape, 1 << 20, Model::Use::kTraining,
              {}, plan, {.frozen = frozen});
  std::vector<TensorId> ids;
  const auto& parameters = model.parameters().all;
  for (const ParameterInfo& p : parameters) {
    ids.push_back(p.trainable ? plan.add("gradients", p.name, DType::kF32, {p.rows, p.cols}) : TensorId{});
  }
  plan.finish();
  if (saved_bytes != nullptr) {
    *saved_bytes = 0;
    for (const MemoryPlan::Entry& entry : plan.entries()) {
      const bool is_saved = entry.category == kSavedActivationsCategory && entry.name.starts_with(kVision);
      if (is_saved) *saved_bytes += entry.bytes;
    }
  }
  Arena arena(device, plan);
  model.bind(device, arena);
  for (size_t i = 0; i < parameters.size(); ++i) {
    upload_weight(device, model.weights().own()[i],
                  padded(parameters[i], fixture.tensors.at("weight/" + parameters[i].name)));
  }
  model.weights_changed(device);
  std::vector<TensorView> views;
  for (TensorId id : ids) views.push_back(arena[id]);
  model.accumulate_gradients(device, fixture.batch(), {.grad_scale = fixture.grad_scale()}, views,
                             Model::Accumulation::kBegin);
  std::map<std::string, std::vector<float>> gradients;
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (!parameters[i].trainable) continue;
    std::vector<float>& values = gradients[parameters[i].name];
    values.resize(static_cast<size_t>(views[i].numel()));
    device.copy_to_host(values.data(), views[i].data, views[i].bytes());
  }
  return gradients;
}

}  // namespace

TEST_CASE("what stages of training freeze leaves the other gradients as they are", "[model][vision][llava]") {
  const std::string name = GENERATE(from_range(std::begin(kLlavaFixtures), std::end(kLlavaFixtures)));
  const LlavaFixture fixture = load_llava_fixture(name);
  const std::vector<std::string> decoder = {"embedding", "blocks.*", "final_norm", "head"};
  std::vector<std::string> all_but_projector = decoder, all_but_tower = decoder;
  all_but_projector.push_back("vision.*");
  all_but_tower.push_back("projector.*");
  for (Device* device : devices()) {
    CAPTURE(name, device->name());
    int64_t saved_whole = 0, saved_frozen = 0;
    const auto want = gradients_without(*device, fixture, {}, &saved_whole);
    for (const auto& frozen :
         {std::vector<std::string>{"vision.*"}, all_but_projector, all_but_tower,
          std::vector<std::string>{"embedding"}, std::vector<std::string>{"vision.*", "projector.*"},
          std::vector<std::string>{"vision.blocks.0.*"}}) {
      CAPTURE(frozen);
      const auto got = gradients_without(*device, fixture, frozen, &saved_frozen);
      CHECK(got.size() < want.size());
      CHECK(!got.empty());
      for (const auto& [parameter, values] : got) {
        CAPTURE(parameter);
        CHECK(values == want.at(parameter));
      }
      const bool is_tower_frozen = std::ranges::count(frozen, "vision.*") > 0;
      CHECK((saved_frozen == 0) == is_tower_frozen);
    }
    CHECK(saved_whole > 0);
  }
}

TEST_CASE("a model with a tower evaluates text without images, and images change what follows them",
          "[model][vision][llava]") {
  const LlavaFixture fixture = load_llava_fixture("clip");
  for (Device* device : devices()) {
    SmallModel m(fixture.config, precision_recipe(Recipe::kFp32), fixture.shape, 1 << 20, *device);
    load_weights(m, fixture);
    const BatchShape& shape = fixture.shape;
    m.model.evaluate(*device, fixture.batch());
    const std::vector<float> losses = m.model.losses(*device);
    // The sequence without images alone.
    const int64_t S = shape.sequence_length;
    const Model::Batch text = {&fixture.tokens[2 * S], &fixture.targets[2 * S], {1, S}};
    m.model.evaluate(*device, text);
    const std::vector<float> alone = m.model.losses(*device);
    CHECK(relative_error(alone, std::vector<float>(losses.begin() + 2 * S, losses.end())) < 1e-5);
    // Another picture in the second sequence, whose image is the third.
    LlavaFixture changed = fixture;
    const int64_t bytes = 3 * 14 * 14;
    for (int64_t i = 0; i < bytes; ++i) changed.pixels[2 * bytes + i] ^= 0x55;
    m.model.evaluate(*device, changed.batch());
    const std::vector<float> other = m.model.losses(*device);
    CHECK(std::equal(other.begin(), other.begin() + S + 4, losses.begin()));  // before the image's rows
    CHECK(!std::equal(other.begin() + S, other.begin() + 2 * S, losses.begin() + S));
  }
}
