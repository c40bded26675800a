// Vision towers and projectors against towers that transformers computed: golden values, and tiny random ones with
// every gradient (tests/fixtures/make_vision_fixtures.py made the files).
#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "engine/files/safetensors.h"
#include "model/precision_recipe.h"
#include "model/vision/projector.h"
#include "model/vision/vision_tower.h"
#include "tests/kernels/op_bounds.h"
#include "tests/model/small_model.h"
#include "tests/model/vision_fixture.h"
#include "tests/support/catch.h"

using namespace parka;
using namespace parka::test;

namespace {

using Tensors = std::map<std::string, std::vector<float>>;

// A tower and a projector with weights and gradients, in one plan.
struct Vision {
  Vision(Device& on, const PrecisionConfig& of_tower, const TowerConfig& tower_config,
         const ProjectorConfig& projector_config, int64_t num_images, int64_t rows_of_padding = 0)
      : device(on),
        config(tower_config),
        precision(of_tower),
        plain(without_fp8(of_tower)),
        images(num_images),
        padding(rows_of_padding),
        table(table_of(tower_config, projector_config)),
        weights(table, Formats(precision), {WeightCopies::kBoth}, training_use(precision), plan),
        tower_scope(precision, tower_shape(), BufferScope::Purpose::kTraining, plan),
        tower(config, table, tower_scope),
        projected_shape{num_images, Projector::num_tokens(projector_config, config)},
        projector_scope(plain, projected_shape, BufferScope::Purpose::kTraining, plan),
        projector(projector_config, config, table, projector_scope) {
    for (const ParameterInfo& p : table.all) {
      gradient_ids.push_back(plan.add("gradients", p.name, DType::kF32, {p.rows, p.cols}));
    }
    const int64_t d = projector_config.d_model;
    pixels_id = plan.add("batch", "pixels", DType::kF32, {images, 3, config.image_size, config.image_size});
    out_id = plan.add("batch", "out", tower_scope.compute(), {projected_shape.num_tokens(), d});
    d_out_id = plan.add("batch", "d_out", tower_scope.compute(), {projected_shape.num_tokens(), d});
    plan.finish();
    arena = std::make_unique<Arena>(device, plan);
    tower.bind(device, *arena);
    weights.bind(*arena);
    for (TensorId id : gradient_ids) gradients.push_back((*arena)[id]);
  }

  static ParameterTable table_of(const TowerConfig& tower, const ProjectorConfig& projector) {
    const ModelConfig initial;
    const LoraRules no_adapters;
    ParameterList list(initial, no_adapters);
    VisionTower::add_parameters(list, tower);
    list.begin_unit();
    Projector::add_parameters(list, projector, tower);
    ParameterTable table(list.take());
    table.num_blocks = tower.num_blocks();
    return table;
  }
  BatchShape tower_shape() const {
    BatchShape shape{images, config.num_tokens()};
    shape.padding = padding;
    return shape;
  }

  // All memory, as it may be before anything is written.
  void fill_with_nan() const {
    for (size_t i = 0; i < plan.entries().size(); ++i) {
      const TensorView t = (*arena)[{static_cast<int>(i)}];
      const std::vector<uint8_t> ones(static_cast<size_t>(t.bytes()), 0xff);
      device.copy_to_device(t.data, ones.data(), t.bytes());
      device.synchronize();  // `ones` ends here
    }
  }

  // By name; the patch embedding without its columns of padding.
  void set_weights(const Tensors& values) {
    for (size_t i = 0; i < table.all.size(); ++i) {
      const ParameterInfo& p = table.all[i];
      const std::vector<float>& given = values.at(p.name);
      const size_t rows = static_cast<size_t>(p.rows), cols = static_cast<size_t>(p.cols),
                   used = given.size() / rows;
      std::vector<float> padded(rows * cols);
      for (size_t row = 0; row < rows; ++row) std::copy_n(&given[row * used], used, &padded[row * cols]);
      upload_weight(device, weights.own()[i], padded);
    }
    weights.find_amax(device);
    weights.quantize(device);
  }

  StepContext step(const BatchShape& shape, Accumulation accumulation) {
    StepContext step{.device = device, .arena = *arena, .weights = weights};
    step.shape = shape;
    step.keep = true;
    step.gradients = &gradients;
    step.accumulation = accumulation;
    return step;
  }
  void forward(const std::vector<float>& pixels) {
    upload_weight(device, (*arena)[pixels_id], pixels);
    const StepContext of_tower = step(tower_shape(), Accumulation::kBegin);
    tower.load(of_tower);
    tower.forward(of_tower, (*arena)[pixels_id]);
    projector.forward(step(projected_shape, Accumulation::kBegin), tower.features(of_tower), (*arena)[out_id]);
  }
  // Through the tower too, unless it is frozen.
  void backward(const std::vector<float>& d_out, bool frozen = false,
                Accumulation accumulation = Accumulation::kBegin) {
    upload_weight(device, (*arena)[d_out_id], d_out);
    const StepContext of_tower = step(tower_shape(), accumulation);
    projector.backward(step(projected_shape, accumulation), tower.features(of_tower), (*arena)[d_out_id],
                       frozen ? TensorView() : tower.d_features(of_tower));
    if (!frozen) tower.backward(of_tower);
  }

  std::vector<float> download(const TensorView& t) const {
    std::vector<float> host(static_cast<size_t>(t.numel()));
    if (t.dtype == DType::kF32) {
      device.copy_to_host(host.data(), t.data, t.bytes());
      return host;
    }
    std::vector<BFloat16> codes(host.size());
    device.copy_to_host(codes.data(), t.data, t.bytes());
    std::transform(codes.begin(), codes.end(), host.begin(), decode_bf16);
    return host;
  }
  std::vector<float> embedded() { return download(tower.embedded(step(tower_shape(), Accumulation::kBegin))); }
  std::vector<float> features() { return download(tower.features(step(tower_shape(), Accumulation::kBegin))); }
  std::vector<float> out() const { return download((*arena)[out_id]); }
  // Without columns of padding; those of `cols` columns.
  std::vector<float> gradient(size_t i, size_t cols) const {
    const std::vector<float> all = download(gradients[i]);
    const size_t stored = static_cast<size_t>(table.all[i].cols);
    std::vector<float> used;
    for (size_t row = 0; row < all.size() / stored; ++row) {
      used.insert(used.end(), &all[row * stored], &all[row * stored] + cols);
    }
    return used;
  }

  Device& device;
  TowerConfig config;
  PrecisionConfig precision, plain;
  int64_t images, padding;
  MemoryPlan plan;
  ParameterTable table;
  ModelWeights weights;
  BufferScope tower_scope;
  VisionTower tower;
  BatchShape projected_shape;
  BufferScope projector_scope;
  Projector projector;
  std::vector<TensorId> gradient_ids;
  TensorId pixels_id, out_id, d_out_id;
  std::unique_ptr<Arena> arena;
  std::vector<TensorView> gradients;
};

struct VisionFixture {
  TowerConfig tower;
  ProjectorConfig projector;
  int64_t num_images;
  Tensors tensors;

  // Of tensors named prefix/<name>.
  Tensors under(const std::string& prefix) const {
    Tensors found;
    for (const auto& [key, values] : tensors) {
      if (key.starts_with(prefix)) found[key.substr(prefix.size())] = values;
    }
    return found;
  }
};

VisionFixture load_vision_fixture(const std::string& name) {
  const InputFile file(std::string(PARKA_SOURCE_DIR) + "/tests/fixtures/vision_" + name + ".safetensors");
  const SafetensorsHeader header = read_safetensors_header(file);
  const auto& meta = header.metadata;
  const auto number = [&](const char* key) { return std::stoll(meta.at(key)); };
  VisionFixture fixture;
  fixture.tower = fixture_tower(meta);
  fixture.tower.keeps_class_token = meta.at("keeps_class_token") == "true";
  const std::string& projector = meta.at("projector");
  fixture.projector.kind = projector == "linear"       ? ProjectorKind::kLinear
                           : projector == "mlp2x_gelu" ? ProjectorKind::kMlp2xGelu
                                                       : ProjectorKind::kMlpDownsample;
  fixture.projector.d_model = number("d_model");
  fixture.projector.column_major = meta.at("column_major") == "true";
  fixture.num_images = number("num_images");
  for (const SafetensorsEntry& entry : header.tensors) {
    std::vector<std::byte> bytes(static_cast<size_t>(entry.num_bytes));
    file.read(entry.offset, bytes);
    std::vector<float>& values = fixture.tensors[entry.name];
    values.resize(bytes.size() / 4);
    std::memcpy(values.data(), bytes.data(), bytes.size());
  }
  return fixture;
}

const char* const kVisionFixtures[] = {"clip_mlp2x", "clip_class", "siglip_rows", "siglip_columns",
                                       "siglip_heads72"};

// What is handed on of the fixture's hidden state, whose class tokens may be dropped.
std::vector<float> kept_rows(const VisionFixture& fixture) {
  const std::vector<float>& hidden = fixture.tensors.at("hidden");
  if (!fixture.tower.drops_class_token()) return hidden;
  std::vector<float> kept;
  const size_t of_image = static_cast<size_t>(fixture.tower.num_tokens() * fixture.tower.width);
  for (size_t begin = 0; begin < hidden.size(); begin += of_image) {
    kept.insert(kept.end(), &hidden[begin + static_cast<size_t>(fixture.tower.width)], &hidden[begin] + of_image);
  }
  return kept;
}

// Of all gradients; the names in both must be the same.
void check_gradients(const Vision& vision, const Tensors& want, double bound) {
  CHECK(want.size() == vision.table.all.size());
  for (size_t i = 0; i < vision.table.all.size(); ++i) {
    CAPTURE(vision.table.all[i].name);
    const std::vector<float>& expected = want.at(vision.table.all[i].name);
    const std::vector<float> got =
        vision.gradient(i, expected.size() / static_cast<size_t>(vision.table.all[i].rows));
    CHECK(relative_error(got, expected) < bound);
  }
}

}  // namespace

TEST_CASE("fp32 hidden states, projections and every gradient of vision towers equal transformers'",
          "[model][vision]") {
  const std::string name = GENERATE(from_range(std::begin(kVisionFixtures), std::end(kVisionFixtures)));
  const VisionFixture fixture = load_vision_fixture(name);
  for (Device* device : devices()) {
    CAPTURE(name, device->name());
    Vision vision(*device, precision_recipe(Recipe::kFp32), fixture.tower, fixture.projector, fixture.num_images);
    vision.set_weights(fixture.under("weight/"));
    vision.forward(fixture.tensors.at("pixels"));
    CHECK(relative_error(vision.features(), kept_rows(fixture)) < 1e-5);
    CHECK(relative_error(vision.out(), fixture.tensors.at("features")) < 1e-5);
    vision.backward(fixture.tensors.at("d_features"));
    check_gradients(vision, fixture.under("grad/"), 1e-4);
  }
}

TEST_CASE("bf16 gradients of vision towers stay within bf16 noise of transformers' fp32", "[model][vision]") {
  const std::string name = GENERATE(from_range(std::begin(kVisionFixtures), std::end(kVisionFixtures)));
  const VisionFixture fixture = load_vision_fixture(name);
  for (Device* device : devices()) {
    CAPTURE(name, device->name());
    Vision vision(*device, precision_recipe(Recipe::kBf16), fixture.tower, fixture.projector, fixture.num_images);
    vision.set_weights(fixture.under("weight/"));
    vision.forward(fixture.tensors.at("pixels"));
    CHECK(relative_error(vision.out(), fixture.tensors.at("features")) < 0.02);
    vision.backward(fixture.tensors.at("d_features"));
    check_gradients(vision, fixture.under("grad/"), 0.06);
  }
}

TEST_CASE("rows of padding behind the images of a tower change nothing", "[model][vision]") {
  const std::string name = GENERATE(from_range(std::begin(kVisionFixtures), std::end(kVisionFixtures)));
  const VisionFixture fixture = load_vision_fixture(name);
  for (Device* device : devices()) {
    const auto run = [&](int64_t padding) {
      Vision vision(*device, precision_recipe(Recipe::kFp32), fixture.tower, fixture.projector, fixture.num_images,
                    padding);
      vision.fill_with_nan();
      vision.set_weights(fixture.under("weight/"));
      vision.forward(fixture.tensors.at("pixels"));
      std::vector<std::vector<float>> all = {vision.features(), vision.out()};
      vision.backward(fixture.tensors.at("d_features"));
      for (const TensorView& gradient : vision.gradients) all.push_back(vision.download(gradient));
      return all;
    };
    CAPTURE(name, device->name());
    const auto padded = run(7), want = run(0);
    for (size_t i = 0; i < want.size(); ++i) CHECK(relative_error(padded[i], want[i]) < 1e-5);
  }
}

// On the CPU: the tower is narrower than what GPUs' FP8 products want.
TEST_CASE("vision towers run in FP8, and their projectors beside them do not", "[model][vision]") {
  const std::string name = GENERATE(as<std::string>{}, "clip_mlp2x", "siglip_rows");
  const VisionFixture fixture = load_vision_fixture(name);
  for (const Recipe recipe : {Recipe::kFp8Linear, Recipe::kCoat, Recipe::kParka}) {
    CAPTURE(name, static_cast<int>(recipe));
    Vision vision(*devices().front(), precision_recipe(recipe), fixture.tower, fixture.projector,
                  fixture.num_images);
    vision.set_weights(fixture.under("weight/"));
    vision.forward(fixture.tensors.at("pixels"));
    CHECK(relative_error(vision.out(), fixture.tensors.at("features")) < 0.15);
    vision.backward(fixture.tensors.at("d_features"));
    check_gradients(vision, fixture.under("grad/"), 0.3);
  }
}

TEST_CASE("vision towers give the same gradients from what backward makes again", "[model][vision]") {
  const std::string name = GENERATE(as<std::string>{}, "clip_mlp2x", "siglip_rows");
  const VisionFixture fixture = load_vision_fixture(name);
  const auto gradients = [&](Device& device, const PrecisionConfig& precision) {
    Vision vision(device, precision, fixture.tower, fixture.projector, fixture.num_images);
    vision.set_weights(fixture.under("weight/"));
    vision.forward(fixture.tensors.at("pixels"));
    vision.backward(fixture.tensors.at("d_features"));
    std::vector<std::vector<float>> all;
    for (const TensorView& gradient : vision.gradients) all.push_back(vision.download(gradient));
    return all;
  };
  Device& cpu = *devices().front();
  for (const Recipe recipe : {Recipe::kBf16, Recipe::kCoat}) {
    const PrecisionConfig all_kept = precision_recipe(recipe);
    PrecisionConfig made_again = all_kept, rerun = all_kept;
    made_again.save_product = made_again.save_norm_output = false;
    rerun.recompute = Recompute::kBlock;
    const auto want = gradients(cpu, all_kept);
    CHECK(gradients(cpu, made_again) == want);
    CHECK(gradients(cpu, rerun) == want);
  }
}

TEST_CASE("gradients of vision towers add up over micro-batches", "[model][vision]") {
  const VisionFixture fixture = load_vision_fixture("clip_mlp2x");
  Vision vision(*devices().front(), precision_recipe(Recipe::kFp32), fixture.tower, fixture.projector,
                fixture.num_images);
  vision.set_weights(fixture.under("weight/"));
  vision.forward(fixture.tensors.at("pixels"));
  vision.backward(fixture.tensors.at("d_features"));
  vision.backward(fixture.tensors.at("d_features"), /*frozen=*/false, Accumulation::kContinue);
  Tensors twice = fixture.under("grad/");
  for (auto& [unused, values] : twice) {
    for (float& value : values) value *= 2;
  }
  check_gradients(vision, twice, 1e-4);
}

TEST_CASE("a frozen tower leaves its gradients alone, and the projector's are as ever", "[model][vision]") {
  const std::string name = GENERATE(as<std::string>{}, "clip_mlp2x", "siglip_rows");
  const VisionFixture fixture = load_vision_fixture(name);
  Device& device = *devices().front();
  Vision vision(device, precision_recipe(Recipe::kFp32), fixture.tower, fixture.projector, fixture.num_images);
  vision.set_weights(fixture.under("weight/"));
  for (const TensorView& gradient : vision.gradients) device.fill_zero(gradient.data, gradient.bytes());
  vision.forward(fixture.tensors.at("pixels"));
  vision.backward(fixture.tensors.at("d_features"), /*frozen=*/true);
  const Tensors want = fixture.under("grad/");
  for (size_t i = 0; i < vision.gradients.size(); ++i) {
    const std::string& parameter = vision.table.all[i].name;
    CAPTURE(parameter);
    const std::vector<float> got = vision.download(vision.gradients[i]);
    if (parameter.starts_with(kVision)) {
      CHECK(std::all_of(got.begin(), got.end(), [](float g) { return g == 0; }));
    } else {
      CHECK(relative_error(got, want.at(parameter)) < 1e-4);
    }
  }
}

namespace {

// The tower of the golden values: two layers, without SigLIP's head.
TowerConfig golden_tower(TowerKind kind, int64_t feature_layer) {
  const bool is_clip = kind == TowerKind::kClip;
  TowerConfig tower;
  tower.kind = kind;
  tower.width = 16;
  tower.num_layers = 2;
  tower.num_heads = 2;
  tower.d_ffn = 32;
  tower.image_size = 14;
  tower.patch_size = 7;
  tower.activation = is_clip ? Activation::kQuickGelu : Activation::kGeluTanh;
  tower.norm_eps = is_clip ? 1e-5 : 1e-6;
  tower.feature_layer = feature_layer;
  tower.keeps_class_token = true;
  return tower;
}

// Names in transformers and sizes of its tensors.
std::map<std::string, int64_t> golden_sizes(const TowerConfig& t) {
  const int64_t v = t.width;
  std::map<std::string, int64_t> sizes = {
      {"embeddings.patch_embedding.weight", v * 3 * t.patch_size * t.patch_size},
      {"embeddings.position_embedding.weight", t.num_tokens() * v}};
  const auto add = [&](const std::string& layer, int64_t rows, int64_t cols) {
    sizes[layer + ".weight"] = rows * cols;
    sizes[layer + ".bias"] = rows;
  };
  for (int64_t l = 0; l < t.num_layers; ++l) {
    const std::string prefix = "encoder.layers." + std::to_string(l) + ".";
    for (const char* norm : {"layer_norm1", "layer_norm2"}) add(prefix + norm, v, 1);
    for (const char* name : {"q_proj", "k_proj", "v_proj", "out_proj"}) add(prefix + "self_attn." + name, v, v);
    add(prefix + "mlp.fc1", t.d_ffn, v);
    add(prefix + "mlp.fc2", v, t.d_ffn);
  }
  add("post_layernorm", v, 1);
  if (t.has_patch_bias()) sizes["embeddings.patch_embedding.bias"] = v;
  if (!t.has_class_token()) return sizes;
  sizes["embeddings.class_embedding"] = v;
  add("pre_layrnorm", v, 1);
  return sizes;
}

// Tensor k in the order of names has 0.2 sin(k + 0.7 j), and 1 more in the weights of norms.
Tensors golden_weights(const TowerConfig& t) {
  Tensors theirs;
  for (int k = 0; const auto& [name, size] : golden_sizes(t)) {
    const double offset = name.find("norm") != std::string::npos && name.ends_with("weight") ? 1.0 : 0.0;
    for (int64_t j = 0; j < size; ++j) {
      theirs[name].push_back(static_cast<float>(0.2 * std::sin(k + 0.7 * static_cast<double>(j)) + offset));
    }
    ++k;
  }
  Tensors ours;
  const auto take = [&](const std::string& name, const std::vector<std::string>& parts) {
    for (const std::string& part : parts) {
      ours[name].insert(ours[name].end(), theirs.at(part).begin(), theirs.at(part).end());
    }
  };
  take("vision.patch_embedding", {"embeddings.patch_embedding.weight"});
  if (t.has_patch_bias()) take("vision.patch_embedding_bias", {"embeddings.patch_embedding.bias"});
  take("vision.positions", {"embeddings.position_embedding.weight"});
  if (t.has_class_token()) {
    take("vision.class_token", {"embeddings.class_embedding"});
    take("vision.pre_norm", {"pre_layrnorm.weight"});
    take("vision.pre_norm_bias", {"pre_layrnorm.bias"});
  }
  for (int64_t l = 0; l < t.num_layers; ++l) {
    const std::string to = block_prefix(kVision, l), from = "encoder.layers." + std::to_string(l) + ".";
    for (const auto& [end, suffix] : {std::pair{".weight", ""}, {".bias", "_bias"}}) {
      take(to + "attention_norm" + suffix, {from + "layer_norm1" + end});
      take(to + "qkv" + suffix,
           {from + "self_attn.q_proj" + end, from + "self_attn.k_proj" + end, from + "self_attn.v_proj" + end});
      take(to + "attention_out" + suffix, {from + "self_attn.out_proj" + end});
      take(to + "ffn_norm" + suffix, {from + "layer_norm2" + end});
      take(to + "fc1" + suffix, {from + "mlp.fc1" + end});
      take(to + "fc2" + suffix, {from + "mlp.fc2" + end});
    }
  }
  return ours;
}

struct Golden {
  TowerKind kind;
  int64_t row;  // of the hidden states
  std::vector<double> embedded, first, second;
};
const Golden kGolden[] = {
    {TowerKind::kSiglip,
     0,
     {0.691567604, 1.453303814, -2.138268869},
     {0.007044617, 1.954979549, -2.199445481},
     {-0.808259962, 1.928503885, -2.083712676}},
    {TowerKind::kClip,
     0,
     {1.070359371, 1.559904512, 1.216607011},
     {-0.009627870, 2.455436290, 0.674801591},
     {-0.811185424, 2.587112898, 0.425832590}},
    {TowerKind::kClip,
     1,
     {0.268981102, 0.998142187, -1.368292265},
     {-0.585368101, 1.602311227, -1.388575962},
     {-1.481052107, 1.595164665, -1.254252844}},
};

}  // namespace

TEST_CASE("vision towers have the hidden states that transformers computes in fp64", "[model][vision]") {
  const Golden& golden = GENERATE(from_range(std::begin(kGolden), std::end(kGolden)));
  const int64_t layer = GENERATE(int64_t{-2}, int64_t{-1});
  const TowerConfig tower = golden_tower(golden.kind, layer);
  Tensors weights = golden_weights(tower);
  const ProjectorConfig projector{.kind = ProjectorKind::kLinear, .d_model = 16};
  weights["projector.fc1"].resize(256);
  weights["projector.fc1_bias"].resize(16);
  std::vector<float> pixels;
  for (int j = 0; j < 3 * 14 * 14; ++j) pixels.push_back(static_cast<float>(std::sin(0.3 * j)));
  for (Device* device : devices()) {
    CAPTURE(device->name(), layer, golden.row);
    Vision vision(*device, precision_recipe(Recipe::kFp32), tower, projector, 1);
    vision.set_weights(weights);
    vision.forward(pixels);
    const auto check = [&](const std::vector<float>& got, const std::vector<double>& want) {
      for (size_t i = 0; i < want.size(); ++i) {
        CHECK(std::abs(got[static_cast<size_t>(golden.row * tower.width) + i] - want[i]) < 1e-5);
      }
    };
    check(vision.embedded(), golden.embedded);
    check(vision.features(), layer == -2 ? golden.first : golden.second);
    if (layer == -1) continue;
    double sum = 0;
    for (const float value : vision.features()) sum += value;
    CHECK(std::abs(sum - (golden.kind == TowerKind::kClip ? 0.865666590 : -1.038193529)) < 1e-4);
  }
}

TEST_CASE("towers without a block before the selected state are refused, and class tokens in a grid",
          "[model][vision]") {
  TowerConfig tower = golden_tower(TowerKind::kClip, -3);
  CHECK(contains(bad_input_error([&] { (void)tower.num_blocks(); }), "no hidden state -3"));
  tower.feature_layer = 3;
  CHECK(contains(bad_input_error([&] { (void)tower.num_blocks(); }), "no hidden state 3"));
  tower.feature_layer = -2;
  CHECK(contains(
      bad_input_error([&] { Vision::table_of(tower, {.kind = ProjectorKind::kMlpDownsample, .d_model = 8}); }),
      "takes a square grid of patches"));
}
