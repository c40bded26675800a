#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "engine/huggingface/huggingface_families.h"
#include "model/parameter_table.h"

namespace parka {

// A weight of a Hugging Face model: whole rows of a Parka parameter, which joins q, k and v, and up and gate.
struct HuggingFaceTensor {
  std::string name;            // "model.layers.0.self_attn.q_proj.weight"
  std::vector<int64_t> shape;  // [rows, cols], [n] of a norm or a bias, or [rows, 3, p, p]
  size_t parameter = 0;        // in ParameterTable::all
  int64_t first_row = 0;
  int64_t num_rows = 0;

  // Elements of a row. The parameter may have further columns, of zeros.
  int64_t num_columns() const;
};

// How the files of a model with a tower name its weights: those of the language model as its family does, but with
// `language_model` in the place of "model."; those of tower and projector after the others.
struct LlavaNames {
  std::string_view language_model;  // "language_model.model."
  std::string_view head;            // "language_model.lm_head.weight"
  std::string_view tower;           // "vision_tower.vision_model."
  std::string_view fc1, fc2;        // "multi_modal_projector.linear_1"
  std::string_view norm = {};       // of a projector that downsamples, which transformers does not have
};

// All weights of a model of the family, in transformers' order. A tied head is not among them, but some files have
// it besides the embedding, with the same values. `llava` names those of a model with a tower; null: as published.
std::vector<HuggingFaceTensor> huggingface_tensors(const HuggingFaceFamily& family, const ModelConfig& config,
                                                   const ParameterTable& table, const LlavaNames* llava = nullptr);

// The name of a tensor of a block in which * stands for the number of an expert.
std::string name_of_expert(std::string_view name, int64_t expert);

// The tensor of the embedding, which is the first parameter.
const HuggingFaceTensor& embedding_of(const std::vector<HuggingFaceTensor>& tensors);
// The name of the head.
std::string head_name(const HuggingFaceFamily& family, const LlavaNames* llava);

// True if a file may have a tensor of this name that is no weight: rotary frequencies of older transformers.
bool is_ignored_huggingface_tensor(std::string_view name);

}  // namespace parka
