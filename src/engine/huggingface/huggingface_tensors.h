#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "engine/huggingface/huggingface_families.h"
#include "model/parameter_table.h"

namespace parka {

// A weight of a Hugging Face model: whole rows of a Parka parameter. Parka keeps queries, keys and values, and up
// and gate, as one matrix each.
struct HuggingFaceTensor {
  std::string name;            // "model.layers.0.self_attn.q_proj.weight"
  std::vector<int64_t> shape;  // [rows, cols], or [n] of a norm or a bias
  size_t parameter = 0;        // in ParameterTable::all
  int64_t first_row = 0;
  int64_t num_rows = 0;
};

// All weights of a model of the family, in transformers' order, the embedding first. A tied head is not among them,
// but some files have it besides the embedding, with the same values.
std::vector<HuggingFaceTensor> huggingface_tensors(const HuggingFaceFamily& family, const ModelConfig& config,
                                                   const ParameterTable& table);

// Whether a file may have a tensor of this name that is not a weight: rotary frequencies, which older versions of
// transformers saved and no version reads.
bool is_ignored_huggingface_tensor(std::string_view name);

}  // namespace parka
