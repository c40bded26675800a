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
};
// All of a config's, A before B of each adapter.
std::vector<PeftTensor> peft_tensors(const Config& config, const HuggingFaceFamily& family);

// Writes the adapters of a checkpoint as peft does: adapter_model.safetensors, in fp32, and adapter_config.json, in
// a new folder. `base` is what the config names as the model that they belong to, if it is known. Throws
// Error(kBadInput) if the checkpoint's config has no adapters.
void write_peft_adapter(const LoadedCheckpoint& checkpoint, const Config& config, const HuggingFaceFamily& family,
                        const std::optional<std::string>& base, const std::string& out);

}  // namespace parka
