#pragma once
#include <optional>
#include <string>
#include <vector>

#include "engine/checkpoint/checkpoint.h"
#include "engine/config/config.h"
#include "engine/huggingface/huggingface_families.h"

namespace parka {

// A factor of an adapter, and its name in peft's files: "base_model.model.<layer>.lora_A.weight".
struct PeftTensor {
  std::string name;
  ParameterInfo parameter;
  int64_t expert = 0;  // whose part of the parameter it is, where that is stacked

  int64_t rows() const { return parameter.rows / parameter.num_stacked; }
  int64_t numel() const { return rows() * parameter.cols; }
};
// All of a config's, A before B of each adapter, and those of experts in order.
std::vector<PeftTensor> peft_tensors(const Config& config, const HuggingFaceFamily& family);

// Writes the adapters of a checkpoint as peft does: adapter_model.safetensors, in fp32, and adapter_config.json, in
// a new folder. `base` is the model that the config names, if known. Throws Error(kBadInput) without adapters.
void write_peft_adapter(const LoadedCheckpoint& checkpoint, const Config& config, const HuggingFaceFamily& family,
                        const std::optional<std::string>& base, const std::string& out);

inline constexpr const char *kPeftConfigName = "adapter_config.json",
                            *kPeftWeightsName = "adapter_model.safetensors";

// Makes a section `finetune` of peft's adapter_config.json. Throws Error(kBadInput), beginning with `where`, for
// other adapters than LoRA beside whole linear layers of all blocks, and for settings that change the computation.
FinetuneConfig parse_peft_config(const json& config, const std::string& where);

// Writes the adapters of peft's `folder` as a checkpoint of step 0 beside `base`, which has their weights, in a new
// folder `out`. Returns its description. Throws Error(kBadInput) if files have others than all of them.
std::string import_peft_adapter(const std::string& folder, const LoadedCheckpoint& base, const std::string& out);

}  // namespace parka
