#include "engine/huggingface/llava_tensors.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <utility>

#include <fmt/format.h>

#include "core/error.h"
#include "model/vision/vision_tower.h"

namespace parka {
namespace {

constexpr std::array<LlavaNames, 4> kNames{{
    // Published by versions 4.36 to 4.51.
    {"language_model.model.", "language_model.lm_head.weight", "vision_tower.vision_model.",
     "multi_modal_projector.linear_1", "multi_modal_projector.linear_2"},
    // Saved by version 5.
    {"language_model.model.", "language_model.lm_head.weight", "vision_tower.", "multi_modal_projector.linear_1",
     "multi_modal_projector.linear_2"},
    // Saved by 4.52.
    {"model.language_model.", "lm_head.weight", "model.vision_tower.vision_model.",
     "model.multi_modal_projector.linear_1", "model.multi_modal_projector.linear_2"},
    // Names of version 5 in memory.
    {"model.language_model.", "lm_head.weight", "model.vision_tower.", "model.multi_modal_projector.linear_1",
     "model.multi_modal_projector.linear_2"},
}};

constexpr std::string_view kLayers = "encoder.layers.";

class TensorLister {
 public:
  TensorLister(const ParameterTable& table, std::vector<HuggingFaceTensor>& tensors)
      : table_(table), tensors_(tensors) {}

  // Rows of a matrix, in the tensor's own shape; empty: as the parameter's.
  void add(std::string name, const std::string& parameter, int64_t first_row, int64_t num_rows,
           std::vector<int64_t> shape = {}) {
    const int index = table_.index_of(parameter);
    PARKA_REQUIRE(index >= 0);
    const int64_t cols = table_.all[static_cast<size_t>(index)].cols;
    if (shape.empty()) shape = {num_rows, cols};
    tensors_.push_back({std::move(name), std::move(shape), static_cast<size_t>(index), first_row, num_rows});
  }
  // A whole parameter of one dimension.
  void add_vector(std::string name, const std::string& parameter) {
    const ParameterInfo& p = table_.all[static_cast<size_t>(table_.index_of(parameter))];
    add(std::move(name), parameter, 0, p.rows, {p.numel()});
  }
  void add_norm(const std::string& name, const std::string& parameter) {
    add_vector(name + ".weight", parameter);
    add_vector(name + ".bias", parameter + "_bias");
  }
  // Rows of a linear layer and of its bias.
  void add_linear(const std::string& name, const std::string& parameter, int64_t first_row, int64_t num_rows) {
    add(name + ".weight", parameter, first_row, num_rows);
    add(name + ".bias", parameter + "_bias", first_row, num_rows, {num_rows});
  }

 private:
  const ParameterTable& table_;
  std::vector<HuggingFaceTensor>& tensors_;
};

void add_tower_layer(TensorLister& list, const TowerConfig& tower, const std::string& theirs,
                     const std::string& ours) {
  const int64_t v = tower.width;
  list.add_linear(theirs + "self_attn.k_proj", ours + "qkv", v, v);
  list.add_linear(theirs + "self_attn.v_proj", ours + "qkv", 2 * v, v);
  list.add_linear(theirs + "self_attn.q_proj", ours + "qkv", 0, v);
  list.add_linear(theirs + "self_attn.out_proj", ours + "attention_out", 0, v);
  list.add_norm(theirs + "layer_norm1", ours + "attention_norm");
  list.add_linear(theirs + "mlp.fc1", ours + "fc1", 0, tower.d_ffn);
  list.add_linear(theirs + "mlp.fc2", ours + "fc2", 0, v);
  list.add_norm(theirs + "layer_norm2", ours + "ffn_norm");
}

void add_tower(TensorLister& list, const TowerConfig& tower, const std::string& prefix) {
  const int64_t v = tower.width, p = tower.patch_size;
  if (tower.has_class_token()) list.add_vector(prefix + "embeddings.class_embedding", "vision.class_token");
  list.add(prefix + "embeddings.patch_embedding.weight", "vision.patch_embedding", 0, v, {v, 3, p, p});
  if (tower.has_patch_bias()) {
    list.add_vector(prefix + "embeddings.patch_embedding.bias", "vision.patch_embedding_bias");
  }
  list.add(prefix + "embeddings.position_embedding.weight", "vision.positions", 0, tower.num_tokens());
  if (tower.has_pre_norm()) list.add_norm(prefix + "pre_layrnorm", "vision.pre_norm");
  for (int64_t l = 0; l < tower.num_blocks(); ++l) {
    add_tower_layer(list, tower, fmt::format("{}{}{}.", prefix, kLayers, l), block_prefix(kVision, l));
  }
}

}  // namespace

std::span<const LlavaNames> all_llava_names() { return kNames; }

const LlavaNames* find_llava_names(const std::function<bool(const std::string&)>& has_tensor) {
  const auto* found = std::ranges::find_if(kNames, [&](const LlavaNames& names) {
    const bool has_embedding = has_tensor(std::string(names.language_model) + "embed_tokens.weight") ||
                               has_tensor(std::string(names.head));  // tied, under its other name
    return has_embedding && has_tensor(std::string(names.language_model) + "norm.weight") &&
           has_tensor(std::string(names.tower) + "embeddings.patch_embedding.weight") &&
           has_tensor(std::string(names.fc1) + ".weight");
  });
  return found == kNames.end() ? nullptr : found;
}

const LlavaNames& vila_part_names() {
  static constexpr LlavaNames kNamesInParts{"model.",   "lm_head.weight", "vision_model.",
                                            "layers.2", "layers.4",       "layers.1"};
  return kNamesInParts;
}

const char* vila_part_of(std::string_view name) {
  if (name.starts_with(vila_part_names().tower)) return kVilaTower;
  return name.starts_with("layers.") ? kVilaProjector : kVilaText;
}

std::vector<HuggingFaceTensor> llava_tensors(const ModelConfig& config, const ParameterTable& table,
                                             const LlavaNames& names,
                                             std::vector<HuggingFaceTensor> of_language_model) {
  PARKA_REQUIRE(config.vision.projector.has_two_layers());
  PARKA_REQUIRE(config.vision.projector.downsamples() == !names.norm.empty());
  std::vector<HuggingFaceTensor> tensors;
  TensorLister list(table, tensors);
  add_tower(list, config.vision.tower, std::string(names.tower));
  if (config.vision.projector.downsamples()) list.add_norm(std::string(names.norm), "projector.norm");
  list.add_linear(std::string(names.fc1), "projector.fc1", 0, config.d_model);
  list.add_linear(std::string(names.fc2), "projector.fc2", 0, config.d_model);
  for (HuggingFaceTensor& tensor : of_language_model) {
    tensor.name = in_language_model(tensor.name, &names);
    tensors.push_back(std::move(tensor));
  }
  return tensors;
}

std::string in_language_model(const std::string& name, const LlavaNames* llava) {
  constexpr std::string_view kModel = "model.";
  if (llava == nullptr) return name;
  if (name == "lm_head.weight") return std::string(llava->head);
  PARKA_REQUIRE(name.starts_with(kModel));
  return std::string(llava->language_model) + name.substr(kModel.size());
}

bool is_unread_by_models(std::string_view name, const TowerConfig& tower) {
  if (name.starts_with("post_layernorm.") || name == "embeddings.position_ids") return true;
  if (name.starts_with("head.")) return tower.kind == TowerKind::kSiglip;
  if (!name.starts_with(kLayers)) return false;
  name.remove_prefix(kLayers.size());
  int64_t layer = 0;
  const auto end = std::from_chars(name.data(), name.data() + name.size(), layer);
  return end.ec == std::errc() && layer >= tower.num_blocks() && layer < tower.num_layers &&
         name.substr(static_cast<size_t>(end.ptr - name.data())).starts_with('.');
}

}  // namespace parka
