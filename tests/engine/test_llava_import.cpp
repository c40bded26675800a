// Models with towers that transformers wrote (tests/fixtures/make_llava_folder_fixtures.py): imported, computed
// with, trained from and exported again.
#include <cstring>
#include <tuple>

#include <nlohmann/json.hpp>

#include "engine/checkpoint/saved_state.h"
#include "engine/commands/commands.h"
#include "engine/config/config_io.h"
#include "engine/evaluation/inference_run.h"
#include "engine/files/safetensors.h"
#include "engine/huggingface/huggingface_weights.h"
#include "engine/huggingface/llava_config.h"
#include "engine/huggingface/llava_tensors.h"
#include "kernels/ops/elementwise/cross_entropy.h"
#include "model/vision/image_embedding.h"
#include "tests/engine/huggingface_fixture.h"
#include "tests/support/catch.h"
#include "tests/support/temporary_folder.h"

using namespace parka;
using namespace parka::test;

namespace {

namespace fs = std::filesystem;
using nlohmann::json;

const std::string kLlavaFolder = std::string(PARKA_SOURCE_DIR) + "/tests/fixtures/llava/";
const char* const kNames[] = {"clip_llama", "siglip_qwen2"};

struct Expected {
  std::vector<int32_t> tokens, targets;
  std::vector<uint8_t> pixels;
  std::vector<float> logits, loss;
  BatchShape shape;
};

Expected load_expected(const std::string& name) {
  const InputFile file(kLlavaFolder + name + ".safetensors");
  Expected expected;
  for (const SafetensorsEntry& entry : read_safetensors_header(file).tensors) {
    const auto into = [&](auto& values) {
      values.resize(static_cast<size_t>(entry.num_bytes) / sizeof(values[0]));
      file.read(entry.offset, std::as_writable_bytes(std::span(values)));
    };
    if (entry.name == "tokens") {
      into(expected.tokens);
      expected.shape = {entry.shape[0], entry.shape[1], false, /*images_per_sequence=*/2};
    }
    if (entry.name == "targets") into(expected.targets);
    if (entry.name == "pixels") into(expected.pixels);
    if (entry.name == "logits") into(expected.logits);
    if (entry.name == "loss") into(expected.loss);
  }
  return expected;
}

struct Computed {
  std::vector<float> logits;
  double loss = 0;
};

// Images in the order of their slots, as a loader gives them, and blank ones behind.
Computed compute(const std::string& imported, Expected expected) {
  const LoadedCheckpoint checkpoint = open_checkpoint(imported);
  const Config config = inference_config_of(
      checkpoint, {"precision.recipe=fp32", "training.micro_batch_size=3", "training.global_batch_size=3",
                   "data.images_per_sequence=2", "data.sequence_length=40"});
  const auto device = make_cpu_device();
  InferenceRun run(*device, checkpoint, config);
  const VisionConfig& vision = config.model.vision;
  const int64_t slots = ImageEmbedding::num_slots(vision), size = vision.tower.image_size;
  std::vector<int32_t> positions(static_cast<size_t>(expected.shape.num_images() * slots), -1);
  size_t next = 0;
  for (size_t t = 0; t < expected.tokens.size(); ++t) {
    if (expected.tokens[t] == vision.image_token) positions.at(next++) = static_cast<int32_t>(t);
  }
  expected.pixels.resize(static_cast<size_t>(expected.shape.num_images() * 3 * size * size), 0);
  const Model::Batch batch = {expected.tokens.data(), expected.targets.data(), expected.shape, nullptr, {},
                              expected.pixels.data(), positions.data()};
  Computed computed;
  computed.logits = run.model().logits(*device, batch, 0, expected.shape.num_tokens());
  run.model().evaluate(*device, batch);
  int64_t count = 0;
  const std::vector<float> losses = run.model().losses(*device);
  for (size_t t = 0; t < losses.size(); ++t) {
    if (expected.targets[t] == kIgnoreTarget) continue;
    computed.loss += losses[t];
    ++count;
  }
  computed.loss /= static_cast<double>(count);
  return computed;
}

std::string import_from(const std::string& source, const TemporaryFolder& folder, const std::string& name) {
  REQUIRE(run_import({.folder = source, .output = folder / name}) == 0);
  return folder / name;
}

json config_of_fixture(const std::string& name) {
  return json::parse(read_file(kLlavaFolder + name + "/config.json"));
}

void replace_all(std::string& text, const std::string& from, const std::string& to) {
  for (size_t at = 0; (at = text.find(from, at)) != std::string::npos; at += to.size()) {
    text.replace(at, from.size(), to);
  }
}

// A copy of a fixture with other names of its tensors.
std::string renamed(const std::string& name, const LlavaNames& names, const TemporaryFolder& folder) {
  const std::string copy = folder / "renamed";
  fs::remove_all(copy);
  fs::copy(kLlavaFolder + name, copy);
  const std::string path = copy + "/model.safetensors", bytes = read_file(path);
  size_t header_bytes = 0;
  std::memcpy(&header_bytes, bytes.data(), sizeof(header_bytes));
  std::string header = bytes.substr(8, header_bytes);
  replace_all(header, "\"language_model.lm_head.weight\"", "\"" + std::string(names.head) + "\"");
  replace_all(header, "\"language_model.model.", "\"" + std::string(names.language_model));
  replace_all(header, "\"vision_tower.", "\"" + std::string(names.tower));
  replace_all(header, "\"multi_modal_projector.linear_1", "\"" + std::string(names.fc1));
  replace_all(header, "\"multi_modal_projector.linear_2", "\"" + std::string(names.fc2));
  const size_t length = header.size();
  write_file(path,
             std::string(reinterpret_cast<const char*>(&length), 8) + header + bytes.substr(8 + header_bytes));
  return copy;
}

}  // namespace

TEST_CASE("an imported model with a tower has transformers' logits and loss", "[engine][huggingface][llava]") {
  const std::string name = GENERATE(from_range(std::begin(kNames), std::end(kNames)));
  CAPTURE(name);
  const TemporaryFolder folder;
  const std::string imported = import_from(kLlavaFolder + name, folder, "imported");
  const Expected expected = load_expected(name);
  const Computed computed = compute(imported, expected);
  CHECK(largest_difference(computed.logits, expected.logits) < 1e-4);
  CHECK(std::abs(computed.loss - double{expected.loss.at(0)}) < 1e-4);
  // Pixels, and how they are normalised, change what the model says.
  Expected other = expected;
  other.pixels[0] ^= 0x80;
  CHECK(largest_difference(compute(imported, other).logits, expected.logits) > 1e-4);
}

TEST_CASE("an imported model with a tower is exported as far as it is read, whatever its names",
          "[engine][huggingface][llava]") {
  const std::string name = GENERATE(from_range(std::begin(kNames), std::end(kNames)));
  const TemporaryFolder folder;
  for (const LlavaNames& names : all_llava_names()) {
    CAPTURE(name, names.language_model, names.tower);
    const std::string source = renamed(name, names, folder);
    const std::string imported = import_from(source, folder, "imported");
    REQUIRE(run_export({.checkpoint = imported, .output = folder / "exported"}) == 0);
    const HuggingFaceWeights old = open_huggingface_weights(source),
                             exported = open_huggingface_weights(folder / "exported");
    const auto bytes_of = [](const HuggingFaceWeights& weights, const std::string& tensor) {
      const HuggingFaceWeights::Place& place = weights.tensors.at(tensor);
      std::vector<std::byte> bytes(static_cast<size_t>(place.entry.num_bytes));
      weights.files[place.file].read(place.entry.offset, bytes);
      return bytes;
    };
    const std::string tower(names.tower);
    const auto is_last_norm = [&](const std::string& tensor) {
      return tensor.starts_with(tower + "post_layernorm");
    };
    for (const auto& [tensor, place] : exported.tensors) {
      CHECK(place.entry.dtype == old.tensors.at(tensor).entry.dtype);
      if (!is_last_norm(tensor)) CHECK(bytes_of(exported, tensor) == bytes_of(old, tensor));
    }
    for (const auto& [tensor, place] : old.tensors) {
      CAPTURE(tensor);
      CHECK((exported.tensors.contains(tensor) || tensor.starts_with(tower)));
    }
    const json config = json::parse(read_file(folder / "exported/config.json"));
    CHECK(config.at("vision_config").at("num_hidden_layers") == 2);
    CHECK(config.at("vision_feature_layer") == -1);
    CHECK(config.at("text_config").at("eos_token_id") == 301);
    CHECK(exported.tensors.contains(tower + "post_layernorm.weight"));
    CHECK(!exported.tensors.contains(tower + "encoder.layers.2.layer_norm1.weight"));

    const std::string again = import_from(folder / "exported", folder, "again");
    CHECK(read_file(again + "/shard_0.safetensors") == read_file(imported + "/shard_0.safetensors"));
    const Expected expected = load_expected(name);
    CHECK(largest_difference(compute(again, expected).logits, expected.logits) < 1e-4);
    for (const char* made : {"imported", "exported", "again"}) fs::remove_all(folder / made);
  }
}

TEST_CASE("what a LLaVA config.json leaves out is that of published models", "[engine][huggingface][llava]") {
  // As published with LLaVA-1.5-7B.
  const json published = json::parse(R"({
    "architectures": ["LlavaForConditionalGeneration"], "ignore_index": -100, "image_token_index": 32000,
    "model_type": "llava", "pad_token_id": 32001, "projector_hidden_act": "gelu",
    "text_config": {"_name_or_path": "lmsys/vicuna-7b-v1.5", "architectures": ["LlamaForCausalLM"],
      "max_position_embeddings": 4096, "model_type": "llama", "rms_norm_eps": 1e-05, "torch_dtype": "float16",
      "vocab_size": 32064},
    "tie_word_embeddings": false, "torch_dtype": "float16", "transformers_version": "4.36.0.dev0",
    "vision_config": {"hidden_size": 1024, "image_size": 336, "intermediate_size": 4096,
      "model_type": "clip_vision_model", "num_attention_heads": 16, "num_hidden_layers": 24, "patch_size": 14,
      "projection_dim": 768, "vocab_size": 32000},
    "vision_feature_layer": -2, "vision_feature_select_strategy": "default", "vocab_size": 32064})");
  const HuggingFaceModel read = parse_huggingface_config(published, "test");
  CHECK(read.family->model_type == "llama");
  CHECK((read.max_positions == 4096 && read.model.vocab_size == 32064 && read.model.d_ffn == 11008));
  CHECK((read.model.num_layers == 32 && read.model.num_heads == 32 && read.model.d_model == 4096));
  VisionConfig want;
  want.tower = TowerConfig();  // CLIP ViT-L/14-336
  want.image_token = 32000;
  CHECK(read.model.vision == want);
  json without = published;
  without.erase("vision_config");
  CHECK(parse_huggingface_config(without, "test").model.vision == want);
  const std::string written = make_huggingface_config(read, DType::kBF16, &published);
  const HuggingFaceModel again = parse_huggingface_config(json::parse(written), "again");
  CHECK((again.model == read.model && again.max_positions == 4096));
  CHECK(json::parse(written).at("image_seq_length") == 576);
  // Either key ties the head.
  json tied = published;
  tied["tie_word_embeddings"] = true;
  CHECK(parse_huggingface_config(tied, "test").model.tie_embeddings);
}

TEST_CASE("LLaVA configs that ask for what is not there are refused by name", "[engine][huggingface][llava]") {
  for (const auto& [name, patch, says] : {
           std::tuple{"clip_llama", R"({"vision_feature_layer": [-2, -1]})", "vision_feature_layer = [-2,-1]"},
           {"clip_llama", R"({"vision_feature_layer": 0})", "no hidden state 0"},
           {"clip_llama", R"({"vision_feature_select_strategy": "mean"})", "vision_feature_select_strategy"},
           {"siglip_qwen2", R"({"vision_feature_select_strategy": "default"})", "leaves out a patch of a SigLIP"},
           {"clip_llama", R"({"multimodal_projector_bias": false})", "multimodal_projector_bias = false"},
           {"clip_llama", R"({"projector_hidden_act": "relu"})", "projector_hidden_act = \"relu\""},
           {"clip_llama", R"({"architectures": ["LlavaNext"]})", "architectures"},
           {"clip_llama", R"({"quantization_config": {}})", "quantization_config"},
           {"clip_llama", R"({"image_token_index": 312})", "model.vision.image_token = 312"},
           {"clip_llama", R"({"image_token_index": null, "image_token_id": 312})",
            "model.vision.image_token = 312"},
           {"clip_llama", R"({"image_token_id": 304})",
            "image_token_id = 304 and image_token_index = 305 contradict"},
           {"siglip_qwen2", R"({"vision_config": {"tie_last_hidden_states": true}})",
            "tie_last_hidden_states = true"},
           {"clip_llama", R"({"text_config": {"model_type": "gemma"}})", "text_config: model_type \"gemma\""},
           {"clip_llama", R"({"text_config": {"mlp_bias": true}})", "text_config: mlp_bias = true"},
           {"clip_llama", R"({"vision_config": {"model_type": "pixtral"}})",
            "vision_config: model_type \"pixtral\""},
           {"clip_llama", R"({"vision_config": {"num_channels": 1}})", "num_channels = 1"},
           {"clip_llama", R"({"vision_config": {"hidden_act": "relu"}})", "hidden_act = \"relu\""},
           {"clip_llama", R"({"vision_config": {"image_size": [14, 28]}})", "image_size: expected an integer"},
           {"clip_llama", R"({"vision_config": {"num_attention_heads": 5}})", "model.vision.num_heads = 5"},
       }) {
    CAPTURE(name, patch);
    json config = config_of_fixture(name);
    config.merge_patch(json::parse(patch));
    CHECK(message_of([&, says = std::string(says)] { parse_huggingface_config(config, "test"); }).find(says) !=
          std::string::npos);
  }
}

TEST_CASE("models with towers whose files do not fit are refused", "[engine][huggingface][llava]") {
  const TemporaryFolder folder;
  const auto message = [&](const std::string& source) {
    return message_of([&] { run_import({.folder = source, .output = folder / "out"}); });
  };
  LlavaNames other = all_llava_names()[1];
  other.fc1 = "projector.linear_1";
  CHECK(message(renamed("clip_llama", other, folder)).find("have none of the names") != std::string::npos);
  other = all_llava_names()[1];
  other.fc2 = "multi_modal_projector.linear_3";
  CHECK(message(renamed("clip_llama", other, folder)).find("multi_modal_projector.linear_2.weight is missing") !=
        std::string::npos);
  // Means and deviations come from the processor.
  const std::string copy = renamed("clip_llama", all_llava_names()[1], folder);
  json processor = json::parse(read_file(copy + "/processor_config.json"));
  processor["image_processor"]["image_mean"] = {0.25, 0.5, 0.75};
  write_file(copy + "/processor_config.json", processor.dump());
  const Config config = config_of(open_checkpoint(import_from(copy, folder, "means")));
  CHECK(config.model.vision.tower.pixel_mean == std::vector<double>{0.25, 0.5, 0.75});
  // Nothing that would make other pixels than Parka does is read over.
  for (const auto& [change, says] : std::vector<std::pair<json, std::string>>{
           {{{"do_rescale", false}}, "do_rescale = false"},
           {{{"do_resize", false}}, "do_resize = false"},
           {{{"do_center_crop", false}}, "do_center_crop = false"},
           {{{"resample", 2}}, "resample = 2"},
           {{{"size", {{"shortest_edge", 20}}}}, "size.shortest_edge = 20"},
           {{{"crop_size", {{"height", 10}, {"width", 14}}}}, "crop_size.height = 10"}}) {
    CAPTURE(says);
    json changed = processor;
    changed["image_processor"].update(change);
    write_file(copy + "/processor_config.json", changed.dump());
    CHECK(message(copy).find(says) != std::string::npos);
  }
}

TEST_CASE("projectors that no release has are not exported", "[engine][huggingface][llava]") {
  VisionConfig vision;
  vision.tower = TowerConfig();
  for (const auto& [kind, is_column_major, says] :
       {std::tuple{ProjectorKind::kLinear, false,
                   std::string("model.vision.projector = linear cannot be exported")},
        {ProjectorKind::kMlpDownsample, false,
         "model.vision.projector = mlp_downsample without column_major cannot be exported"},
        {ProjectorKind::kMlpDownsample, true, ""}}) {
    vision.projector.kind = kind;
    vision.projector.column_major = is_column_major;
    const std::string message = message_of([&] { make_vila_config(vision, nullptr); });
    CHECK((says.empty() ? message.empty() : message.starts_with(says)));
  }
}
