#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "model/parameter_table.h"

namespace parka {

// A weight of LlamaForCausalLM or OlmoForCausalLM: whole rows of a parameter of Parka, which keeps queries, keys
// and values, and up and gate, as one matrix each.
struct HuggingFaceTensor {
  std::string name;            // "model.layers.0.self_attn.q_proj.weight"
  std::vector<int64_t> shape;  // [rows, cols], or [cols] of a norm
  size_t parameter = 0;        // in ParameterTable::all
  int64_t first_row = 0;
  int64_t num_rows = 0;
};

// All that a model has, in transformers' order. A tied head is not among them.
std::vector<HuggingFaceTensor> huggingface_tensors(const ModelConfig& config, const ParameterTable& table);

// The head; in a model whose head is tied some files have it beside the embedding, with the same values.
inline constexpr std::string_view kHuggingFaceHead = "lm_head.weight";
inline constexpr std::string_view kHuggingFaceEmbedding = "model.embed_tokens.weight";

// Whether a file may have a tensor of this name that is no weight: frequencies of rotary positions, which older
// versions of transformers saved and no version reads.
bool is_ignored_huggingface_tensor(std::string_view name);

}  // namespace parka
