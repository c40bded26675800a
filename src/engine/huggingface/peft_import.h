#pragma once
#include <string>

#include <nlohmann/json.hpp>

#include "engine/checkpoint/checkpoint.h"
#include "engine/config/config.h"

namespace parka {

inline constexpr const char *kPeftConfigName = "adapter_config.json",
                            *kPeftWeightsName = "adapter_model.safetensors";

// Makes a section `finetune` of peft's adapter_config.json. Throws Error(kBadInput), whose message begins with
// `where`, for other adapters than LoRA beside whole linear layers, each in all blocks, and for settings that
// change what is computed.
FinetuneConfig parse_peft_config(const nlohmann::json& config, const std::string& where);

// Writes the adapters of peft's `folder` as a checkpoint of step 0 beside `base`, the checkpoint with the weights
// that they belong to, in a new folder `out`. Returns its description. Throws Error(kBadInput) if the folder's
// files have others than all of these adapters.
std::string import_peft_adapter(const std::string& folder, const LoadedCheckpoint& base, const std::string& out);

}  // namespace parka
