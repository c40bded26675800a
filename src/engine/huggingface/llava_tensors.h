#pragma once
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/huggingface/huggingface_tensors.h"

// The weights of a model that sees images, by the names that transformers has given them. Parts of a tower that no
// model reads, those after the hidden state that the projector reads, are no weights of Parka's.
namespace parka {

// Every version of transformers since 4.36 reads the first.
std::span<const LlavaNames> all_llava_names();
// The names of a model that has these tensors; null if none fit.
const LlavaNames* find_llava_names(const std::function<bool(const std::string&)>& has_tensor);

// VILA 1.5's, whose language model, tower and projector are models of their own, each in a folder.
inline constexpr const char *kVilaText = "llm", *kVilaTower = "vision_tower", *kVilaProjector = "mm_projector";
const LlavaNames& vila_part_names();
// The folder of a tensor that is so named.
const char* vila_part_of(std::string_view name);

// The whole model's in transformers' order: tower, projector, and those of the language model. The patch embedding
// is [v, 3, p, p]: the parameter's further columns, which meet zeros, are not in it.
std::vector<HuggingFaceTensor> llava_tensors(const ModelConfig& config, const ParameterTable& table,
                                             const LlavaNames& names,
                                             std::vector<HuggingFaceTensor> of_language_model);

// A name of the language model's in the whole model; `llava` is null where that is all.
std::string in_language_model(const std::string& name, const LlavaNames* llava);

// True if a tensor is of a part of the tower that no model reads: blocks after the hidden state that is selected,
// the last LayerNorm, SigLIP's head, and numbers of positions. `name` is without LlavaNames::tower.
bool is_unread_by_models(std::string_view name, const TowerConfig& tower);

}  // namespace parka
