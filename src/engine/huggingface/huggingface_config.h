#pragma once
#include <cstdint>
#include <optional>
#include <string>

#include <nlohmann/json.hpp>

#include "core/dtype.h"
#include "engine/huggingface/huggingface_families.h"
#include "model/model_config.h"

// config.json of a Hugging Face model, as transformers reads and writes it, by the table of families.
namespace parka {

struct HuggingFaceModel {
  const HuggingFaceFamily* family = nullptr;
  ModelConfig model;
  int64_t max_positions = 2048;  // longest sequence that the model is meant for
};

// The model that computes what transformers computes from this config.json. Keys that transformers does not look at
// are passed over, all that change what is computed are either understood or refused: Error(kBadInput) whose
// message begins with `where`.
HuggingFaceModel parse_huggingface_config(const nlohmann::json& config, const std::string& where,
                                          std::span<const HuggingFaceFamily> families = huggingface_families());

// A new config.json for a model in `dtype`, which its family can be. `origin`, if there is one, is the config.json
// that the model comes from: special tokens are taken over.
std::string make_huggingface_config(const HuggingFaceModel& model, DType dtype, const nlohmann::json* origin);

// The format of its weights that a config.json names; nullopt where it names none.
std::optional<std::string> huggingface_dtype(const nlohmann::json& config);
// config.json with another format named, and otherwise as it was.
std::string with_huggingface_dtype(const std::string& config_text, DType dtype);
// What transformers calls a format: "bfloat16".
std::string huggingface_name_of(DType dtype);

}  // namespace parka
