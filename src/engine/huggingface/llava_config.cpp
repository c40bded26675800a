#include "engine/huggingface/llava_config.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include <fmt/ranges.h>

#include "data/read_only_file.h"
#include "engine/huggingface/config_reader.h"
#include "engine/huggingface/huggingface_weights.h"
#include "model/vision/image_embedding.h"

namespace parka {
namespace {

constexpr const char *kClipType = "clip_vision_model", *kSiglipType = "siglip_vision_model";

constexpr std::array<std::pair<std::string_view, Activation>, 3> kActivations{
    {{"quick_gelu", Activation::kQuickGelu},
     {"gelu_pytorch_tanh", Activation::kGeluTanh},
     {"gelu", Activation::kGelu}}};

// Adds transformers' defaults of keys that a text_config lacks: published ones leave out what is like Llama 7B's.
json with_text_defaults(json text, const std::string& type) {
  json usual = {{"hidden_size", 4096},
                {"num_hidden_layers", 32},
                {"num_attention_heads", 32},
                {"vocab_size", 32000},
                {"intermediate_size", 11008}};
  if (type == "qwen2") {
    usual["vocab_size"] = 151936;
    usual["intermediate_size"] = 22016;
    usual["num_key_value_heads"] = 32;
  }
  for (const auto& [key, value] : usual.items()) {
    if (!text.contains(key) || text.at(key).is_null()) text[key] = value;
  }
  return text;
}

// An object of `config`, empty where there is none.
json object_at(const ConfigReader& config, std::string_view key) {
  const json* value = config.find(key);
  if (value == nullptr) return json::object();
  if (!value->is_object()) config.fail("{}: expected an object, got {}", key, describe_json(*value));
  return *value;
}

HuggingFaceModel parse_text_config(const ConfigReader& config, const std::string& where,
                                   std::span<const HuggingFaceFamily> families) {
  json text = object_at(config, "text_config");
  text.erase("architectures");  // transformers goes by model_type alone
  const std::string type = ConfigReader(text, where).text("model_type", "llama");
  if (type != "llama" && type != "qwen2") {
    config.fail("text_config: model_type \"{}\" is not supported beside a tower; llama and qwen2 are",
                printable(type));
  }
  text["model_type"] = type;
  // Either of them ties the head.
  if (config.flag("tie_word_embeddings", false)) text["tie_word_embeddings"] = true;
  return parse_huggingface_config(with_text_defaults(std::move(text), type), where + ": text_config", families);
}

bool keeps_class_token(const ConfigReader& config, TowerKind kind) {
  const std::string strategy = config.text("vision_feature_select_strategy", "default");
  if (strategy != "default" && strategy != "full") {
    config.fail("vision_feature_select_strategy = \"{}\" is not supported; default and full are",
                printable(strategy));
  }
  if (kind == TowerKind::kClip) return strategy == "full";
  if (strategy == "default") {
    config.fail(
        "vision_feature_select_strategy = \"default\" leaves out a patch of a SigLIP tower, which has no class token, "
        "and is not supported; full is");
  }
  return false;
}

// image_token_id is another name of the same key.
int64_t image_token_of(const ConfigReader& config) {
  const int64_t index = config.integer("image_token_index", 32000);
  const int64_t id = config.integer("image_token_id", index);
  if (id != index && config.find("image_token_index") != nullptr) {
    config.fail("image_token_id = {} and image_token_index = {} contradict each other; remove one", id, index);
  }
  return id;
}

std::string activation_name(Activation activation) {
  const auto* found =
      std::ranges::find_if(kActivations, [&](const auto& entry) { return entry.second == activation; });
  return std::string(found->first);
}

json tower_config_json(const TowerConfig& tower) {
  const bool is_clip = tower.kind == TowerKind::kClip;
  json config = {{"attention_dropout", 0.0},
                 {"hidden_act", activation_name(tower.activation)},
                 {"hidden_size", tower.width},
                 {"image_size", tower.image_size},
                 {"intermediate_size", tower.d_ffn},
                 {"layer_norm_eps", tower.norm_eps},
                 {"model_type", is_clip ? kClipType : kSiglipType},
                 {"num_attention_heads", tower.num_heads},
                 {"num_channels", 3},
                 {"num_hidden_layers", tower.num_layers},
                 {"patch_size", tower.patch_size}};
  if (!is_clip) config["vision_use_head"] = false;
  return config;
}

std::vector<double> three_numbers(const ConfigReader& config, std::string_view key) {
  const json* value = config.find(key);
  const bool fine = value->is_array() && value->size() == 3 &&
                    std::ranges::all_of(*value, [](const json& one) { return one.is_number(); });
  if (!fine) config.fail("{}: expected three numbers, got {}", key, describe_json(*value));
  return value->get<std::vector<double>>();
}

// Pictures become squares of the tower's size by Pillow's bicubic filter (scripts/image_data/pictures.py); a
// processor that does anything else would give the model other pixels.
void check_picture_size(const ConfigReader& processor, int64_t image_size) {
  constexpr int kBicubic = 3;
  processor.require("do_resize", true);
  processor.require("resample", kBicubic);
  for (const char* name : {"size", "crop_size"}) {
    const json* size = processor.find(name);
    if (size == nullptr || !size->is_object()) continue;
    if (std::string_view(name) == "size" && size->contains("shortest_edge")) {
      processor.require("do_center_crop", true);
    }
    for (const char* side : {"height", "width", "shortest_edge"}) {
      if (!size->contains(side) || size->at(side) == image_size) continue;
      processor.fail("{}.{} = {} is not supported; {}, the tower's image_size, is", name, side,
                     size->at(side).dump(), image_size);
    }
  }
}

}  // namespace

TowerConfig parse_tower_config(const json& root, const std::string& where) {
  const ConfigReader config(root, where);
  const std::string type = config.text("model_type", kClipType);
  if (type != kClipType && type != kSiglipType) {
    config.fail("model_type \"{}\" is not supported as a tower; {} and {} are", printable(type), kClipType,
                kSiglipType);
  }
  const bool is_clip = type == kClipType;
  config.require("num_channels", 3);
  config.require("attention_dropout", 0.0);
  config.require("tie_last_hidden_states", false);
  TowerConfig tower;
  tower.kind = is_clip ? TowerKind::kClip : TowerKind::kSiglip;
  tower.width = config.integer("hidden_size", 768);
  tower.num_layers = config.integer("num_hidden_layers", 12);
  tower.num_heads = config.integer("num_attention_heads", 12);
  tower.d_ffn = config.integer("intermediate_size", 3072);
  tower.image_size = config.integer("image_size", 224);
  tower.patch_size = config.integer("patch_size", is_clip ? 32 : 16);
  tower.norm_eps = config.number("layer_norm_eps", is_clip ? 1e-5 : 1e-6);
  const std::string activation = config.text("hidden_act", is_clip ? "quick_gelu" : "gelu_pytorch_tanh");
  const auto* found =
      std::ranges::find_if(kActivations, [&](const auto& entry) { return entry.first == activation; });
  if (found == kActivations.end()) {
    config.fail("hidden_act = \"{}\" is not supported; quick_gelu, gelu_pytorch_tanh and gelu are",
                printable(activation));
  }
  tower.activation = found->second;
  set_usual_statistics(tower);
  return tower;
}

HuggingFaceModel parse_llava_config(const json& root, const std::string& where,
                                    std::span<const HuggingFaceFamily> families) {
  const ConfigReader config(root, where);
  config.require("architectures", json{kLlavaArchitecture});
  config.require("projector_hidden_act", "gelu");
  config.require("multimodal_projector_bias", true);
  config.require("quantization_config", nullptr);
  HuggingFaceModel read = parse_text_config(config, where, families);
  // Without any vision_config transformers takes the tower of LLaVA-1.5, which TowerConfig's defaults are.
  VisionConfig& vision = read.model.vision;
  vision.tower = TowerConfig();
  if (config.find("vision_config") != nullptr) {
    vision.tower = parse_tower_config(object_at(config, "vision_config"), where + ": vision_config");
  }
  vision.tower.feature_layer = config.hidden_state("vision_feature_layer", -2);
  vision.tower.keeps_class_token = keeps_class_token(config, vision.tower.kind);
  vision.projector.kind = ProjectorKind::kMlp2xGelu;
  vision.image_token = image_token_of(config);
  check_huggingface_model(read.model, where);
  return read;
}

std::string make_llava_config(const HuggingFaceModel& described, DType dtype, const json* origin) {
  const VisionConfig& vision = described.model.vision;
  if (vision.projector.kind != ProjectorKind::kMlp2xGelu) {
    throw_bad_input("model.vision.projector = {}: transformers' {} has mlp2x_gelu alone",
                    name_of(vision.projector.kind), kLlavaArchitecture);
  }
  const json* of_text = origin;  // where special tokens are
  if (origin != nullptr && origin->contains("text_config")) of_text = &origin->at("text_config");
  HuggingFaceModel text = described;
  text.model.vision = {};
  json text_config = json::parse(make_huggingface_config(text, dtype, of_text));
  text_config.erase("architectures");
  const json config = {{"architectures", {kLlavaArchitecture}},
                       {"dtype", huggingface_name_of(dtype)},
                       {"image_seq_length", ImageEmbedding::num_slots(vision)},
                       {"image_token_index", vision.image_token},
                       {"model_type", kLlavaModelType},
                       {"multimodal_projector_bias", true},
                       {"projector_hidden_act", "gelu"},
                       {"text_config", text_config},
                       {"tie_word_embeddings", described.model.tie_embeddings},
                       {"vision_config", tower_config_json(vision.tower)},
                       {"vision_feature_layer", vision.tower.feature_layer},
                       {"vision_feature_select_strategy", vision.tower.drops_class_token() ? "default" : "full"}};
  return config.dump(2) + "\n";
}

std::string make_vila_config(const VisionConfig& vision, const json* origin) {
  if (vision.projector.kind != ProjectorKind::kMlpDownsample || !vision.projector.column_major) {
    throw_bad_input(
        "model.vision.projector = {}{} cannot be exported: transformers' {} has mlp2x_gelu alone, and VILA 1.5 "
        "mlp_downsample with column_major",
        name_of(vision.projector.kind), vision.projector.downsamples() ? " without column_major" : "",
        kLlavaArchitecture);
  }
  json config = {{"architectures", {"LlavaLlamaModel"}},
                 {"image_aspect_ratio", "resize"},
                 {"mm_use_im_start_end", false},
                 {"model_type", "llava_llama"}};
  if (origin != nullptr) config = *origin;
  config["mm_vision_select_layer"] = vision.tower.feature_layer;
  config["mm_vision_select_feature"] = vision.tower.drops_class_token() ? "patch" : "cls_patch";
  return config.dump(2) + "\n";
}

std::string make_vila_projector_config() {
  const json config = {{"architectures", {"MultimodalProjector"}},
                       {"mm_projector_type", "mlp_downsample"},
                       {"model_type", "v2l_projector"}};
  return config.dump(2) + "\n";
}

std::string make_tower_config(const TowerConfig& tower, DType dtype) {
  json config = tower_config_json(tower);
  config["architectures"] = {tower.kind == TowerKind::kClip ? "CLIPVisionModel" : "SiglipVisionModel"};
  config["dtype"] = huggingface_name_of(dtype);
  return config.dump(2) + "\n";
}

void set_usual_statistics(TowerConfig& tower) {
  const TowerConfig clip;
  const bool is_siglip = tower.kind == TowerKind::kSiglip;
  tower.pixel_mean = is_siglip ? std::vector<double>(3, 0.5) : clip.pixel_mean;
  tower.pixel_deviation = is_siglip ? std::vector<double>(3, 0.5) : clip.pixel_deviation;
}

const json& image_processor_in(const json& file) {
  if (!file.is_object()) return file;
  const auto nested = file.find(kNestedProcessorKey);
  return nested != file.end() && nested->is_object() ? *nested : file;
}

void read_pixel_statistics(const std::string& folder, TowerConfig& tower) {
  for (const char* name : {kPreprocessorName, kProcessorName}) {
    const std::string path = (fs::path(folder) / name).string();
    if (!file_exists(path)) continue;
    const json root = parse_json_text(read_text(path, kMaxHuggingFaceConfigBytes), path, JsonComments::kRefused);
    if (!root.is_object()) throw_bad_input("{}: expected an object, got {}", path, describe_json(root));
    const ConfigReader config(image_processor_in(root), path);
    for (const char* flag : {"do_rescale", "do_normalize"}) config.require(flag, true);
    constexpr double kScale = 1.0 / 255, kRoundingError = 1e-9;
    if (std::abs(config.number("rescale_factor", kScale) - kScale) > kRoundingError) {
      config.fail("rescale_factor = {} is not supported; 1 / 255 is", config.number("rescale_factor"));
    }
    check_picture_size(config, tower.image_size);
    if (config.find("image_mean") != nullptr) tower.pixel_mean = three_numbers(config, "image_mean");
    if (config.find("image_std") != nullptr) tower.pixel_deviation = three_numbers(config, "image_std");
    return;
  }
}

void require_pixel_statistics(const std::string& folder, const TowerConfig& tower, const std::string& model) {
  TowerConfig read;
  read.kind = tower.kind;
  read.image_size = tower.image_size;
  set_usual_statistics(read);
  read_pixel_statistics(folder, read);
  if (read.pixel_mean == tower.pixel_mean && read.pixel_deviation == tower.pixel_deviation) return;
  throw_bad_input(
      "{}: model.vision.pixel_mean = [{}] and pixel_deviation = [{}] would be read as [{}] and [{}]: config.json has "
      "no place for them; give --like FOLDER, of a model whose preprocessor_config.json has them",
      model, fmt::join(tower.pixel_mean, ", "), fmt::join(tower.pixel_deviation, ", "),
      fmt::join(read.pixel_mean, ", "), fmt::join(read.pixel_deviation, ", "));
}

}  // namespace parka
