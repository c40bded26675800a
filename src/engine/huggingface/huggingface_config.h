#pragma once
#include <cstdint>
#include <optional>
#include <string>

#include "core/dtype.h"
#include "engine/files/json.h"
#include "engine/huggingface/huggingface_families.h"
#include "model/model_config.h"

// Reads and writes the config.json of a Hugging Face model, as transformers does; llava_config.h with a tower.
namespace parka {

struct HuggingFaceModel {
  const HuggingFaceFamily* family = nullptr;  // of a model with a tower that of its language model
  ModelConfig model;
  int64_t max_positions = 2048;  // longest sequence that the model is meant for
};

// The model that computes what transformers computes from this config.json. Keys that transformers ignores are
// ignored; others are supported or refused, with Error(kBadInput) whose message begins with `where`.
HuggingFaceModel parse_huggingface_config(const json& config, const std::string& where,
                                          std::span<const HuggingFaceFamily> families = huggingface_families());

// True if `config`, as it was read, does not say theta of layers with a window, so that versions of transformers
// take different ones: rope_theta in version 4, and the family's own since.
bool leaves_local_theta_open(const HuggingFaceModel& read, const json& config);

// Throws Error(kBadInput), whose message begins with `where`, for a model that no config of Parka's may have.
void check_huggingface_model(const ModelConfig& model, const std::string& where);

// A new config.json for a model in `dtype` that its family can express. `origin`, if given, is the config.json that
// the model comes from: its special tokens are copied.
std::string make_huggingface_config(const HuggingFaceModel& model, DType dtype, const json* origin);

// The format of the weights that a config.json names; nullopt if it names none.
std::optional<std::string> huggingface_dtype(const json& config);
// The same config.json with another format.
std::string with_huggingface_dtype(const std::string& config_text, DType dtype);
// The name of a format in transformers, such as "bfloat16".
std::string huggingface_name_of(DType dtype);

}  // namespace parka
