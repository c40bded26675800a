#include "engine/huggingface/import_source.h"

#include <algorithm>
#include <functional>
#include <utility>

#include <fmt/ranges.h>

#include "core/error.h"
#include "core/tensor.h"
#include "data/read_only_file.h"
#include "engine/files/json_text.h"
#include "engine/huggingface/bitsandbytes.h"
#include "engine/huggingface/config_reader.h"
#include "engine/huggingface/huggingface_origin.h"
#include "engine/huggingface/llava_config.h"
#include "engine/huggingface/llava_tensors.h"
#include "engine/huggingface/peft_adapter.h"

namespace parka {
namespace {

constexpr int64_t kVocabularyUnit = 64;  // to which a vocabulary grows
constexpr const char* kOriginalArchitecture = "LlavaLlamaForCausalLM";
// The names that parts in several folders are given.
const LlavaNames& published_names() { return all_llava_names().front(); }

std::string config_path_in(const std::string& folder) {
  return (fs::path(folder) / kHuggingFaceConfigName).string();
}

json read_config(const std::string& folder) {
  const std::string path = config_path_in(folder);
  json config = parse_json_text(read_text(path, kMaxHuggingFaceConfigBytes), path, JsonComments::kRefused);
  if (!config.is_object()) throw_bad_input("{}: expected an object, got {}", path, describe_json(config));
  return config;
}

std::vector<ImportSource::CarriedFile> carried_from(const std::string& folder) {
  std::vector<ImportSource::CarriedFile> files;
  for (std::string& name : carried_files(folder)) {
    refuse_lfs_pointer(InputFile((fs::path(folder) / name).string()));
    files.push_back({.folder = folder, .name = std::move(name)});
  }
  return files;
}

// Adds the tensors to which `rename` gives a name; those without one are left out.
void add_weights(HuggingFaceWeights&& from, const std::function<std::string(const std::string&)>& rename,
                 HuggingFaceWeights& into) {
  const size_t before = into.files.size();
  for (auto& [name, place] : from.tensors) {
    const std::string renamed = rename(name);
    if (renamed.empty()) continue;
    place.file += before;
    place.entry.name = renamed;
    if (!into.tensors.emplace(renamed, place).second) {
      throw_bad_input("{}: the tensor {} is there twice", from.files[place.file - before].path(), printable(name));
    }
  }
  for (InputFile& file : from.files) into.files.push_back(std::move(file));
}

// Gives experts that are stacked, as version 5 of transformers has them in memory, the names and places of tensors
// of their own. It calls their part of a block mlp in all families.
void split_stacked_experts(const HuggingFaceModel& described, HuggingFaceWeights& weights) {
  const ModelConfig& model = described.model;
  const TensorNames& names = described.family->tensors;
  using InBlock = TensorNames::InBlock;
  for (int64_t l = 0; l < model.num_layers && model.moe.exists(); ++l) {
    const std::string block = fmt::format("{}{}.", names.blocks, l);
    // Moves a tensor, or its parts of equal size in the order of the file, to other names.
    const auto move = [&](std::string_view from, std::vector<int64_t> shape, const std::vector<BlockTensor>& to) {
      auto stacked = weights.tensors.extract(block + std::string(from));
      if (stacked.empty()) return;
      HuggingFaceWeights::Place part = stacked.mapped();
      const std::string& path = weights.files[part.file].path();
      if (part.entry.shape != shape) {
        throw_bad_input("{}: {} is [{}], {} wants [{}]", path, stacked.key(), fmt::join(part.entry.shape, ", "),
                        kHuggingFaceConfigName, fmt::join(shape, ", "));
      }
      const int64_t experts = shape.size() == 3 ? shape.front() : 1;
      if (shape.size() == 3) shape = {shape[1] / static_cast<int64_t>(to.size()), shape[2]};
      part.entry.shape = shape;
      part.entry.num_bytes /= experts * static_cast<int64_t>(to.size());
      for (int64_t e = 0; e < experts; ++e) {
        for (const BlockTensor holds : to) {
          part.entry.name =
              block + name_of_expert(std::ranges::find(names.in_block, holds, &InBlock::holds)->name, e);
          if (!weights.tensors.emplace(part.entry.name, part).second) {
            throw_bad_input("{}: has {} besides {}; remove one of them", path, part.entry.name, stacked.key());
          }
          part.entry.offset += part.entry.num_bytes;
        }
      }
    };
    const int64_t experts = model.moe.num_experts, d = model.d_model, f = model.d_ffn;
    move("mlp.gate.weight", {experts, d}, {BlockTensor::kRouter});
    move("mlp.experts.gate_up_proj", {experts, 2 * f, d}, {BlockTensor::kExpertGate, BlockTensor::kExpertUp});
    move("mlp.experts.down_proj", {experts, d, f}, {BlockTensor::kExpertDown});
  }
}

// Reads a folder of a tower alone, or of a CLIP or SigLIP model with one for text as well.
TowerConfig read_tower(const std::string& folder) {
  json config = read_config(folder);
  const std::string type = ConfigReader(config, config_path_in(folder)).text("model_type", "");
  if (type == "clip" || type == "siglip") {
    // Older CLIP models have this as well, and transformers takes all of it, with its defaults.
    const bool has_dict = type == "clip" && !config.value("vision_config_dict", json()).is_null();
    const char* key = has_dict ? "vision_config_dict" : "vision_config";
    json vision = config.value(key, json::object());
    if (!vision.is_object()) {
      throw_bad_input("{}: {}: expected an object, got {}", config_path_in(folder), key, describe_json(vision));
    }
    vision["model_type"] = type + "_vision_model";
    config = std::move(vision);
  }
  TowerConfig tower = parse_tower_config(config, config_path_in(folder));
  read_pixel_statistics(folder, tower);
  return tower;
}

void add_tower(const std::string& folder, HuggingFaceWeights& into) {
  constexpr std::string_view kPrefix = "vision_model.";
  HuggingFaceWeights weights = open_huggingface_weights(folder);
  const bool has_prefix =
      std::ranges::any_of(weights.tensors, [&](const auto& tensor) { return tensor.first.starts_with(kPrefix); });
  const std::string target(published_names().tower);
  // After no prefix are the text's tower, projections and scales of the scores of both.
  const auto rename = [&](const std::string& name) -> std::string {
    if (!has_prefix) return target + name;
    return name.starts_with(kPrefix) ? target + name.substr(kPrefix.size()) : std::string();
  };
  add_weights(std::move(weights), rename, into);
}

// The original LLaVA's config.json: Llama's keys, and its own.
bool is_original(const json& config) {
  const auto found = config.find("architectures");
  return found != config.end() && *found == json{kOriginalArchitecture};
}

// The names of a language model in transformers' LLaVA; the same for names of the original LLaVA.
std::string renamed_from_original(const std::string& name) {
  constexpr std::string_view kTower = "model.vision_tower.vision_tower.vision_model.",
                             kFc1 = "model.mm_projector.0", kFc2 = "model.mm_projector.2",
                             kProjector = "model.mm_projector.";
  const LlavaNames& names = published_names();
  const auto behind = [&](std::string_view prefix) { return name.substr(prefix.size()); };
  if (name.starts_with(kTower)) return std::string(names.tower) + behind(kTower);
  if (name.starts_with(kFc1)) return std::string(names.fc1) + behind(kFc1);
  if (name.starts_with(kFc2)) return std::string(names.fc2) + behind(kFc2);
  if (name.starts_with(kProjector)) return name;  // unknown: it will be refused
  const bool is_known = name.starts_with("model.") || name == "lm_head.weight";
  return is_known ? in_language_model(name, &names) : name;
}

// Which hidden state is selected, and what of it.
void read_original_tower(const ConfigReader& config, TowerConfig& tower) {
  config.require("mm_use_im_start_end", false);
  config.require("mm_use_im_patch_token", false);
  config.require("mm_patch_merge_type", "flat");
  const std::string feature = config.text("mm_vision_select_feature", "patch");
  if (feature != "patch" && feature != "cls_patch") {
    config.fail("mm_vision_select_feature = \"{}\" is not supported; patch and cls_patch are", printable(feature));
  }
  if (feature == "patch" && !tower.has_class_token()) {
    config.fail(
        "mm_vision_select_feature = \"patch\" leaves out a patch of a SigLIP tower; cls_patch is supported");
  }
  tower.keeps_class_token = feature == "cls_patch" && tower.has_class_token();
  tower.feature_layer = config.hidden_state("mm_vision_select_layer", tower.feature_layer);
}

// An original pads pictures by its own code, before its tower's processor; transformers has a processor that
// does.
bool pads_pictures(const ConfigReader& config) {
  const json* ratio = config.find("image_aspect_ratio");
  if (ratio == nullptr || *ratio == "square") return false;
  if (*ratio == "pad") return true;
  config.fail("image_aspect_ratio = {} is not supported; \"pad\" and \"square\" are", printable(ratio->dump()));
}

std::string padding_processor(const TowerConfig& tower, const std::string& of_tower) {
  json processor = {{"do_resize", true},    {"do_center_crop", true},         {"do_rescale", true},
                    {"do_normalize", true}, {"image_mean", tower.pixel_mean}, {"image_std", tower.pixel_deviation}};
  if (file_exists(of_tower)) {
    processor = parse_json_text(read_text(of_tower, kMaxHuggingFaceConfigBytes), of_tower, JsonComments::kRefused);
    if (!processor.is_object()) throw_bad_input("{}: is not an object", of_tower);
    processor.erase("feature_extractor_type");
  }
  processor["image_processor_type"] = "LlavaImageProcessor";
  processor["do_pad"] = true;
  processor["size"] = {{"shortest_edge", tower.image_size}};
  processor["crop_size"] = {{"height", tower.image_size}, {"width", tower.image_size}};
  return processor.dump(2) + "\n";
}

void check_language_model(const HuggingFaceFamily& family, const std::string& where) {
  if (family.model_type == "llama" || family.model_type == "qwen2") return;
  throw_bad_input("{}: model_type \"{}\" is not supported beside a tower; llama and qwen2 are", where,
                  family.model_type);
}

// VILA 1.5's projector and what comes before it. None of NVILA's settings is supported.
void read_vila_projector(const std::string& folder, const json& whole, VisionConfig& vision) {
  const ConfigReader top(whole, config_path_in(folder));
  for (const char* key : {"s2", "dynamic_s2"}) top.require(key, false);
  read_original_tower(top, vision.tower);
  const std::string projector_folder = (fs::path(folder) / kVilaProjector).string();
  const json own = read_config(projector_folder);
  const ConfigReader config(own, config_path_in(projector_folder));
  config.require("mm_projector_type", "mlp_downsample");
  if (config.find("mm_projector_type") == nullptr) config.fail("has no mm_projector_type");
  vision.projector.kind = ProjectorKind::kMlpDownsample;
  vision.projector.column_major = true;  // NVILA's are row by row, and have another type or several scales
}

const LlavaNames& vila_names() {
  static const LlavaNames names = [] {
    LlavaNames all = published_names();
    all.norm = "multi_modal_projector.norm";
    return all;
  }();
  return names;
}

std::string renamed_vila_projector(const std::string& name) {
  const LlavaNames &in_part = vila_part_names(), &names = vila_names();
  for (const auto& [theirs, ours] :
       {std::pair{in_part.norm, names.norm}, {in_part.fc1, names.fc1}, {in_part.fc2, names.fc2}}) {
    if (name.starts_with(std::string(theirs) + ".")) return std::string(ours) + name.substr(theirs.size());
  }
  return name;  // unknown: it will be refused
}

// Images take an id after the vocabulary, unless one of it is named.
void choose_image_token(int64_t image_token, ImportSource& source) {
  ModelConfig& model = source.described.model;
  source.num_stored_tokens = model.vocab_size;
  model.vision.image_token = image_token < 0 ? model.vocab_size : image_token;
  if (model.vision.image_token < model.vocab_size) return;
  model.vocab_size = ceil_div(model.vision.image_token + 1, kVocabularyUnit) * kVocabularyUnit;
}

// Folders directly below `folder` that hold a model or adapters, in order.
std::vector<std::string> models_below(const fs::path& folder) {
  std::vector<std::string> models;
  for (const std::string& name : list_names(folder.string())) {
    const std::string below = (folder / name).string();
    if (file_exists(config_path_in(below)) || file_exists((fs::path(below) / kPeftConfigName).string()))
      models.push_back(below);
  }
  std::ranges::sort(models);
  return models;
}

}  // namespace

std::string model_folder_of(const std::string& folder) {
  if (file_exists(config_path_in(folder))) return folder;
  const std::vector<std::string> snapshots = models_below(fs::path(folder) / "snapshots");
  if (snapshots.size() == 1) return snapshots.front();
  if (!snapshots.empty()) {
    throw_bad_input("{}: is a folder of the hub's cache with several snapshots; name one: {}", folder,
                    fmt::join(snapshots, ", "));
  }
  const std::vector<std::string> models = models_below(folder);
  throw_bad_input("{}: has no {}, so it is not the folder of a Hugging Face model{}", folder,
                  kHuggingFaceConfigName,
                  models.empty() ? std::string("; download all files of the model, not its weights alone")
                                 : fmt::format("; there is one in {}", fmt::join(models, ", ")));
}

ImportSource open_model(const std::string& folder) {
  ImportSource source;
  source.config_path = config_path_in(folder);
  source.config_text = read_text(source.config_path, kMaxHuggingFaceConfigBytes);
  json config = parse_json_text(source.config_text, source.config_path, JsonComments::kRefused);
  if (config.is_object() && is_original(config)) {
    throw_bad_input("{}: a model of the original LLaVA; give the folder of its tower ({}) as --vision-tower",
                    source.config_path, printable(config.value("mm_vision_tower", json()).dump()));
  }
  if (config.is_object() && is_bitsandbytes_config(config, source.config_path)) {
    source.is_quantized = true;
    config.erase("quantization_config");  // the weights as they are imported are in none
    source.config_text = config.dump(2) + "\n";
  }
  source.described = parse_huggingface_config(config, source.config_path);
  source.num_stored_tokens = source.described.model.vocab_size;
  source.weights = open_huggingface_weights(folder);
  split_stacked_experts(source.described, source.weights);
  source.carried = carried_from(folder);
  if (!source.described.model.vision.exists()) return source;
  if (source.is_quantized) {
    throw_bad_input("{}: models with a tower are not imported from 4 bits; import one in bf16, fp16 or fp32",
                    source.config_path);
  }
  read_pixel_statistics(folder, source.described.model.vision.tower);
  check_huggingface_model(source.described.model, folder);
  source.llava = find_llava_names([&](const std::string& name) { return source.weights.tensors.contains(name); });
  if (source.llava != nullptr) return source;
  throw_bad_input("{}: its tensors have none of the names that transformers gives to those of {}", folder,
                  kLlavaArchitecture);
}

ImportSource open_model_with_tower(const std::string& folder, const std::string& tower_folder,
                                   int64_t image_token) {
  ImportSource source;
  source.config_path = config_path_in(folder);
  source.special_tokens = read_config(folder);
  json text = source.special_tokens;
  const bool original = is_original(text);
  if (original) {
    text["model_type"] = "llama";
    text.erase("architectures");
  }
  if (text.contains("quantization_config") && !text.at("quantization_config").is_null()) {
    throw_bad_input(
        "{}: quantization_config is not supported with --vision-tower; give a model in bf16, fp16 or fp32",
        source.config_path);
  }
  source.described = parse_huggingface_config(text, source.config_path);
  ModelConfig& model = source.described.model;
  if (model.vision.exists()) {
    throw_bad_input("{}: has a tower; leave out --vision-tower to import the model as it is", source.config_path);
  }
  check_language_model(*source.described.family, source.config_path);
  model.vision.tower = read_tower(tower_folder);
  if (original) {
    const ConfigReader config(text, source.config_path);
    if (config.find("mm_projector_type") == nullptr) {
      config.fail("mm_projector_type is not there, which means linear, and is not supported; \"mlp2x_gelu\" is");
    }
    config.require("mm_projector_type", "mlp2x_gelu");
    read_original_tower(config, model.vision.tower);
  }
  model.vision.projector.kind = ProjectorKind::kMlp2xGelu;
  choose_image_token(image_token, source);
  check_huggingface_model(model, source.config_path);

  source.llava = &published_names();
  source.has_projector = original;
  source.is_one_folder = false;
  add_weights(open_huggingface_weights(folder), renamed_from_original, source.weights);
  const std::string patches = std::string(source.llava->tower) + "embeddings.patch_embedding.weight";
  if (!source.weights.tensors.contains(patches)) add_tower(tower_folder, source.weights);
  source.carried = carried_from(folder);
  for (const ImportSource::CarriedFile& file : carried_from(tower_folder)) {
    const bool is_there =
        std::ranges::any_of(source.carried, [&](const auto& other) { return other.name == file.name; });
    if (file.name == kPreprocessorName && !is_there) source.carried.push_back(file);
  }
  if (original && pads_pictures(ConfigReader(text, source.config_path))) {
    auto place = std::ranges::find(source.carried, kPreprocessorName, &ImportSource::CarriedFile::name);
    if (place == source.carried.end()) {
      place = source.carried.insert(place, {tower_folder, kPreprocessorName});
    }
    place->text = padding_processor(model.vision.tower, (fs::path(place->folder) / place->name).string());
  }
  return source;
}

bool is_vila_folder(const std::string& folder) {
  return file_exists(config_path_in((fs::path(folder) / kVilaText).string())) &&
         file_exists(config_path_in((fs::path(folder) / kVilaProjector).string()));
}

ImportSource open_vila_model(const std::string& folder, int64_t image_token) {
  const auto part = [&](const char* name) { return (fs::path(folder) / name).string(); };
  ImportSource source;
  const std::string text_folder = part(kVilaText);
  source.config_path = config_path_in(text_folder);
  source.described = parse_huggingface_config(read_config(text_folder), source.config_path);
  ModelConfig& model = source.described.model;
  check_language_model(*source.described.family, source.config_path);
  model.vision.tower = read_tower(part(kVilaTower));
  read_vila_projector(folder, read_config(folder), model.vision);
  choose_image_token(image_token, source);
  check_huggingface_model(model, config_path_in(folder));

  // There is no config.json of transformers' for it, so VILA's goes along.
  source.config_text = read_text(config_path_in(folder), kMaxHuggingFaceConfigBytes);
  source.llava = &vila_names();
  source.is_one_folder = false;
  add_weights(open_huggingface_weights(text_folder), renamed_from_original, source.weights);
  add_tower(part(kVilaTower), source.weights);
  add_weights(open_huggingface_weights(part(kVilaProjector)), renamed_vila_projector, source.weights);
  source.carried = carried_from(text_folder);
  for (const ImportSource::CarriedFile& file : carried_from(part(kVilaTower))) {
    if (file.name == kPreprocessorName) source.carried.push_back(file);
  }
  return source;
}

}  // namespace parka
